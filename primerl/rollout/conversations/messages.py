"""Chat messages in OpenAI's form: their text, and what makes two of them the same."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
"""Functions that may be called: ``{"type": "function", "function": {name, parameters, ...}}``."""


def text_of(content: Any) -> str:
    """The text of a message's content, which may be a list of parts.

    Raises:
        ValueError: a part is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return valid_unicode(content)
    if not isinstance(content, list):
        raise ValueError(f"a message's content is a {type(content).__name__}; expected text")
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"a message holds a part of type {kind!r}; only text is supported")
        parts.append(valid_unicode(text))
    return "".join(parts)


def valid_unicode(text: str) -> str:
    """``text`` with ``?`` for what is no character, such as half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


def message_key(message: Message, *, reasoning: bool) -> tuple[Any, ...]:
    """What two messages have in common if they are the same to the policy."""
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
        # Clients that parse and write JSON change its spaces and order.
        arguments = json.dumps(json.loads(arguments), sort_keys=True)
    return call.get("id"), function["name"], arguments


def clipped(text: str, limit: int) -> str:
    """``text``, or its beginning and end around a note of what was left out."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit:,} characters left out ...]\n{text[-tail:]}"
