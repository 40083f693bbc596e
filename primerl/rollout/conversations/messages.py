"""Helpers for chat messages in OpenAI's format: their text, and keys that identify them."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

# Longer texts are compared by their hashes.
_COMPARED_CHARACTERS = 1024

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
    """Return a key that is equal for messages that are the same to the policy.

    Clients strip replies, so white space at the ends of a reply's text and reasoning is ignored.
    Some clients send reasoning back as text, in ``<think>`` tags.
    """
    role, content = message["role"], message.get("content") or ""
    if role == "assistant":
        thought = message.get("reasoning_content") or ""
        if not thought:
            thought, content = split_reasoning(content)
        return (
            role,
            _text_key(content.strip()),
            _text_key(thought.strip()) if reasoning else "",
            calls_key(message),
        )
    return role, _text_key(content), message.get("tool_call_id"), message.get("name")


def split_reasoning(content: str) -> tuple[str, str]:
    """Return the reasoning with which a reply's text begins in ``<think>`` tags, and the rest."""
    begins = content.lstrip()
    thought, closing, rest = begins.removeprefix("<think>").partition("</think>")
    return (thought, rest) if begins.startswith("<think>") and closing else ("", content)


def calls_key(message: Message) -> tuple[Any, ...]:
    """Return a key of a message's tool calls: their ids, names and arguments."""
    return tuple(_call_key(call) for call in message.get("tool_calls") or ())


def _text_key(content: Any) -> Any:
    if not isinstance(content, str) or len(content) <= _COMPARED_CHARACTERS:
        return content
    return len(content), xxhash.xxh3_128_digest(content.encode(errors="surrogatepass"))


def _call_key(call: Mapping[str, Any]) -> tuple[Any, str, str]:
    function = call["function"]
    arguments = function["arguments"]
    with contextlib.suppress(ValueError, RecursionError, OverflowError):
        # Clients that parse and rewrite JSON change its whitespace and the order of its keys.
        arguments = json.dumps(_with_plain_numbers(json.loads(arguments)), sort_keys=True)
    return call.get("id"), function["name"], arguments


def _with_plain_numbers(value: Any) -> Any:
    """Return a JSON value with numbers as JavaScript writes them, which has no integers."""
    if isinstance(value, dict):
        return {key: _with_plain_numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_plain_numbers(one) for one in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**53:
        return _with_plain_numbers(float(value))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def clipped(text: str, limit: int) -> str:
    """Return ``text``; if it is too long, only its beginning and end, with a note between them."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit:,} characters left out ...]\n{text[-tail:]}"
