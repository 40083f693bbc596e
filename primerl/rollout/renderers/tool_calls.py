"""Parser for tool calls in Hermes' format: JSON in ``<tool_call>`` tags, as Qwen writes them."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import attrs

_OPENING = "<tool_call>"
_CLOSING = "</tool_call>"
MOST_CALLS = 1000
"""The maximum number of calls that are parsed in one reply."""
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')


@attrs.frozen
class ParsedToolCall:
    """One tool call of a reply; ``arguments`` maps names to values.

    ``status`` is ``"ok"``, or describes the mistake in the call. ``raw`` is the text of the call.
    """

    name: str
    arguments: dict[str, Any] = attrs.field(factory=dict)
    id: str | None = None
    status: str = "ok"
    raw: str = ""


@attrs.frozen
class Parsed:
    """A reply as text and tool calls; malformed calls also stay in the text."""

    content: str
    tool_calls: list[ParsedToolCall] = attrs.field(factory=list)
    reasoning_content: str | None = None


def parse_tool_calls(text: str) -> Parsed:
    """Return the text without its well-formed calls, and all calls; takes linear time."""
    if _OPENING not in text:
        return Parsed(text)
    calls: list[ParsedToolCall] = []
    kept: list[str] = []
    end = 0
    for begin, close in _spans(text):
        if len(calls) == MOST_CALLS:
            raw = text[begin + len(_OPENING) :]
            calls.append(_malformed(raw, f"the reply has more than {MOST_CALLS:,} calls"))
            break
        raw = text[begin + len(_OPENING) : close].strip()
        call = _call(raw)
        calls.append(call)
        if call.status == "ok":
            kept.append(text[end:begin])
            end = close + len(_CLOSING)
    else:
        opened = text.rfind(_OPENING)
        if text.find(_CLOSING, opened) < 0:
            raw = text[opened + len(_OPENING) :]
            calls.append(_malformed(raw, "the call is not closed with </tool_call>"))
    said = "".join([*kept, text[end:]])
    return Parsed(said.strip() if kept else text, calls)


def parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object, such as the arguments of a tool call; takes linear time.

    Unlike ``json.loads``, this refuses NaN and Infinity, which are not JSON, and numbers such as
    1e999, which Python would read as infinity.

    Raises:
        ValueError: the text is not JSON, is not an object, or has a number that is not finite or
            has too many digits. The message completes a sentence such as "the arguments are ...".
    """
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError("not an object of names and values")
    return value


def parse_arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of a tool call, given as an object or as the JSON text of an object.

    None and the empty text stand for no arguments.

    Raises:
        ValueError: the value is something else, or ``parse_object`` refuses the text.
    """
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        return parse_object(value)
    if not isinstance(value, dict):
        raise ValueError("not an object of names and values")
    return value


def parse_json(text: str) -> Any:
    """Parse JSON strictly: without NaN, infinity and numbers that are too large.

    Raises:
        ValueError: the text is not JSON.
    """
    try:
        return _JSON.decode(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"the number {number:.40} is too large")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed as a number")


_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield the index of each call's opening tag, and that of its closing tag."""
    # A regular expression would search for a closing tag from each opening tag: quadratic time if
    # there is none.
    begin = text.find(_OPENING)
    while begin >= 0:
        close = text.find(_CLOSING, begin + len(_OPENING))
        if close < 0:
            return
        yield begin, close
        begin = text.find(_OPENING, close + len(_CLOSING))


def _call(raw: str) -> ParsedToolCall:
    try:
        call = parse_json(raw)
    except ValueError as error:
        return _malformed(raw, f"the call is {error}")
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not name:
        return _malformed(raw, "the call is not an object with a 'name'")
    try:
        arguments = parse_arguments(call.get("arguments"))
    except ValueError as error:
        return _malformed(raw, f"the call's 'arguments' are {error}")
    return ParsedToolCall(name, arguments, raw=raw)


def _malformed(raw: str, fault: str) -> ParsedToolCall:
    named = _NAME.search(raw)
    return ParsedToolCall("" if named is None else named[1], status=fault, raw=raw)
