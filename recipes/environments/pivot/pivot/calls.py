"""Tool calls of messages, and how much two of them have in common."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

_WRITTEN = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@attrs.frozen
class Call:
    """A function's name, and its arguments by name."""

    name: str
    arguments: Mapping[str, Any]


def calls_of(message: Mapping[str, Any]) -> list[Call] | None:
    """The calls of an assistant's message, in its fields or as ``<tool_call>`` text.

    None if one of them can't be read.
    """
    try:
        if message.get("tool_calls"):
            return [_call(call.get("function", call)) for call in message["tool_calls"]]
        content = message.get("content")
        text = content if isinstance(content, str) else ""
        return [_call(json.loads(written)) for written in _WRITTEN.findall(text)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _call(call: Mapping[str, Any]) -> Call:
    arguments = call.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(call["name"], str) or not isinstance(arguments, Mapping):
        raise TypeError("a call needs a name and arguments by name")
    return Call(call["name"], dict(arguments))


def likeness(calls: Sequence[Call], recorded: Sequence[Call]) -> float:
    """Calls pair by pair: 1 for equal ones, else the share of equal arguments, 0 for other names.

    The mean over the longer of both lists, so that calls that are missing or too many count as 0.
    """
    longest = max(len(calls), len(recorded))
    if not longest:
        return 1.0
    pairs = zip(calls, recorded, strict=False)
    return sum(share(call, wanted) for call, wanted in pairs) / longest


def share(call: Call, wanted: Call) -> float:
    """The share of arguments, of those that either call has, that are equal."""
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
    """Whether two values are equal after normalisation: 1 and 1.0 are, 1 and True are not."""
    try:
        return _written(left) == _written(right)
    except (RecursionError, OverflowError):
        return False


def _written(value: Any) -> Any:
    """A value in which no difference is left that has no meaning."""
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
