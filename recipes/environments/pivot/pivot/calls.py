"""Parsing of tool calls in messages, and a similarity measure between calls."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

_OPENING = "<tool_call>"
_CLOSING = "</tool_call>"


@attrs.frozen
class Call:
    """A tool call: the function's name and its arguments by name."""

    name: str
    arguments: Mapping[str, Any]


def calls_of(message: Mapping[str, Any]) -> list[Call] | None:
    """Parse the tool calls of an assistant message, from ``tool_calls`` or ``<tool_call>`` text.

    Returns None if a call can't be parsed.
    """
    try:
        if message.get("tool_calls"):
            return [_call(call.get("function", call)) for call in message["tool_calls"]]
        content = message.get("content")
        text = content if isinstance(content, str) else ""
        return [_call(json.loads(written)) for written in _between_tags(text)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _between_tags(text: str) -> Iterator[str]:
    """Yield the text of each call. Takes linear time, unlike a regular expression."""
    begin = text.find(_OPENING)
    while begin >= 0:
        begin += len(_OPENING)
        end = text.find(_CLOSING, begin)
        if end < 0:
            return
        yield text[begin:end].strip()
        begin = text.find(_OPENING, end + len(_CLOSING))


def _call(call: Mapping[str, Any]) -> Call:
    arguments = call.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(call["name"], str) or not isinstance(arguments, Mapping):
        raise TypeError("expected a call with a name and a mapping of arguments")
    return Call(call["name"], dict(arguments))


def likeness(calls: Sequence[Call], recorded: Sequence[Call]) -> float:
    """Return the similarity of two lists of calls, from 0 to 1, averaged over pairs of calls.

    A pair scores the fraction of equal arguments, or 0 if the names differ. The mean is over the
    length of the longer list, so that missing and extra calls count as 0.
    """
    longest = max(len(calls), len(recorded))
    if not longest:
        return 1.0
    pairs = zip(calls, recorded, strict=False)
    return sum(share(call, wanted) for call, wanted in pairs) / longest


def share(call: Call, wanted: Call) -> float:
    """Return the fraction of equal arguments among all arguments of either call."""
    if call.name != wanted.name:
        return 0.0
    names = set(call.arguments) | set(wanted.arguments)
    if not names:
        return 1.0
    equal = [
        name in call.arguments
        and name in wanted.arguments
        and same(call.arguments[name], wanted.arguments[name])
        for name in names
    ]
    return sum(equal) / len(names)


def same(left: Any, right: Any) -> bool:
    """Check whether two values are equal once normalized: 1 equals 1.0, but not True."""
    try:
        return _written(left) == _written(right)
    except (RecursionError, OverflowError):
        return False


def _written(value: Any) -> Any:
    """Normalize a value: remove differences without meaning, such as trailing spaces."""
    if isinstance(value, str):
        lines = value.replace("\r\n", "\n").strip().split("\n")
        return ("text", "\n".join(line.rstrip() for line in lines))
    if isinstance(value, bool) or value is None:
        return ("constant", value)
    if isinstance(value, int | float):
        return ("number", value)
    if isinstance(value, Mapping):
        return ("object", sorted((name, _written(item)) for name, item in value.items()))
    return ("list", [_written(item) for item in value])
