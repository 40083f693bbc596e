"""Parser for tool calls in Hermes' format: JSON in ``<tool_call>`` tags, as Qwen writes them."""

import json
import re
from typing import Any

import attrs

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
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
    """Return the text without its well-formed calls, and all calls."""
    if "<tool_call>" not in text:
        return Parsed(text)
    calls, kept, end = [], [], 0
    for match in _CALL.finditer(text):
        call = _call(match[1])
        calls.append(call)
        if call.status == "ok":
            kept.append(text[end : match.start()])
            end = match.end()
    rest = text[end:]
    opened = text.rfind("<tool_call>")
    if "</tool_call>" not in text[opened:]:
        raw = text[opened + len("<tool_call>") :]
        calls.append(_malformed(raw, "the call is not closed with </tool_call>"))
    said = "".join([*kept, rest])
    return Parsed(said.strip() if kept else text, calls)


def _call(raw: str) -> ParsedToolCall:
    try:
        call = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return _malformed(raw, f"the call is not JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return _malformed(raw, "the call is not an object with a 'name'")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return _malformed(raw, "the call's 'arguments' are not an object of names and values")
    return ParsedToolCall(call["name"], arguments, raw=raw)


def _malformed(raw: str, fault: str) -> ParsedToolCall:
    named = _NAME.search(raw)
    return ParsedToolCall("" if named is None else named[1], status=fault, raw=raw)
