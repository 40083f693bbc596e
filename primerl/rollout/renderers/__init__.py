"""Renderers, which convert messages to tokens, and sampled tokens to messages.

A renderer of the ``renderers`` package, which supports many model families, has ``render``,
``bridge_to_next_turn``, ``parse_response`` and ``get_stop_token_ids``. The renderers here have
``tokens_after`` instead of ``bridge_to_next_turn``; it returns the tokens that a turn adds, without
needing the tokens before it.
"""
