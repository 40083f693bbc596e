"""Renderers: from messages to tokens and back, as the ``renderers`` package does for its families.

A renderer has ``render``, ``bridge_to_next_turn``, ``parse_response`` and ``get_stop_token_ids``.
Those here have ``tokens_after`` in place of the second: what a turn adds, without its history.
"""
