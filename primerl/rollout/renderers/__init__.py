"""Renderers: from messages to tokens and back, as the ``renderers`` package does for its families.

A renderer has ``render``, ``bridge_to_next_turn``, ``parse_response`` and ``get_stop_token_ids``.
Those here also have ``tokens_after``: what a turn adds to a conversation, without its history.
"""
