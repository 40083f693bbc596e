"""Helpers for chat messages in OpenAI's format: their text, and keys that identify them."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
"""Functions that may be called: ``{"type": "function", "function": {name, parameters, ...}}``."""


def text_of(content: Any) -> str:
    """Return the text of a message's content: a string, a list of text parts, or None.

    Raises:
        ValueError: a part is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return valid_unicode(content)
    if not isinstance(content, list):
        raise ValueError(f"a message's content is of type {type(content).__name__}; expected text")
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"a message has a part of type {kind!r}; only text is supported")
        parts.append(valid_unicode(text))
    return "".join(parts)


def valid_unicode(text: str) -> str:
    """Return ``text`` with lone surrogates, which can't be encoded, replaced by ``?``."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


def message_key(message: Message, *, reasoning: bool) -> tuple[Any, ...]:
    """Return a key that is equal for messages that are the same to the policy."""
    role, content = message["role"], message.get("content") or ""
    if role == "assistant":
        calls = tuple(_call_key(call) for call in message.get("tool_calls") or ())
        thought = (message.get("reasoning_content") or "") if reasoning else ""
        return role, content, thought, calls
    return role, content, message.get("tool_call_id"), message.get("name")


def _call_key(call: Mapping[str, Any]) -> tuple[Any, str, str]:
    function = call["function"]
    arguments = function["arguments"]
    with contextlib.suppress(ValueError, RecursionError):
        # Clients that parse and rewrite JSON change its whitespace and the order of its keys.
        arguments = json.dumps(json.loads(arguments), sort_keys=True)
    return call.get("id"), function["name"], arguments


def clipped(text: str, limit: int) -> str:
    """Return ``text``; if it is too long, only its beginning and end, with a note between them."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit:,} characters left out ...]\n{text[-tail:]}"
