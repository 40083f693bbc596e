"""Check that a chat template renders everything that a conversation says, once each.

A template drops what it does not know without a word: reasoning under another key, the second of
two calls, a participant's name. So every text of the conversation is replaced by a different mark,
and each mark must occur once in what the template renders. Templates may also drop a text for what
it says, such as reasoning in ``<think>`` tags; ``missing_text`` looks for the texts themselves.
"""

import html
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from primerl.data.json_text import leaves
from primerl.data.keys import REASONING
from primerl.data.reasoning import divided

_ADVICE = "use a template that renders it, or remove it"
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@attrs.frozen
class SaidText:
    """A text of a conversation: which part of which message it is, and what it says."""

    part: str
    text: str
    reasoning: bool = False


def said(message: Mapping[str, Any]) -> Iterator[SaidText]:
    """Yield the texts of a checked message, but for the white space at their ends.

    Content that begins with ``<think>`` tags, or whose reasoning ends with ``</think>`` alone, has
    two texts, since templates write other white space around the tags.
    """
    if message.get("reasoning_content"):
        yield SaidText("reasoning_content", message["reasoning_content"].strip(), reasoning=True)
    thought, rest = divided(message["content"])
    yield SaidText("content", thought.strip(), reasoning=True)
    before, tag, after = rest.partition("</think>")
    if tag and "<think>" not in before:
        yield SaidText("content", before.strip())
        rest = after
    yield SaidText("content", rest.strip())
    if message["role"] != "tool" and message.get("name"):  # a result's name is that of its call
        yield SaidText("name", message["name"])
    for index, call in enumerate(message.get("tool_calls", ())):
        path = f"tool_calls[{index}]"
        yield SaidText(f"{path}.name", call["function"]["name"])
        arguments = call["function"]["arguments"]
        for place, value in leaves(arguments, f"{path}.arguments", keys=True):
            yield SaidText(place, value if isinstance(value, str) else json.dumps(value))


def ids_of(message: Mapping[str, Any]) -> Iterator[SaidText]:
    """Yield the ids of a message's calls, or of the call that it answers."""
    if "tool_call_id" in message:
        yield SaidText("tool_call_id", message["tool_call_id"])
    for index, call in enumerate(message.get("tool_calls", ())):
        yield SaidText(f"tool_calls[{index}].id", call.get("id", ""))


def missing_text(texts: Iterable[SaidText], rendered: str) -> SaidText | None:
    """Return a text that does not occur in ``rendered``, or None if there is none.

    No two texts may share a place. Texts may be written as in JSON, Python or HTML.
    """
    left = rendered
    for one in sorted(texts, key=lambda one: -len(one.text)):
        if not one.text:
            continue
        for form in _forms(one.text):
            if form in left:
                left = left.replace(form, "\0", 1)
                break
        else:
            return one
    return None


def _forms(text: str) -> Iterator[str]:
    yield text
    quoted = json.dumps(text, ensure_ascii=False)[1:-1]
    yield quoted
    yield json.dumps(text)[1:-1]
    yield repr(text)[1:-1]
    yield json.dumps(quoted, ensure_ascii=False)[1:-1]
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")  # as LFM2's template does
    yield escaped.replace("\n", "\\n").replace("\r", "\\r")
    yield html.escape(text).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")
    if text in ("true", "false", "null"):
        yield {"true": "True", "false": "False", "null": "None"}[text]


class Marks:
    """A conversation whose texts are marks, each of nine letters and digits.

    Attributes:
        messages: the messages with marks.
        tools: the tools with marks; None if there are none.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> None:
        self._numbers = itertools.count()
        self._marks: list[tuple[str, int, SaidText]] = []
        self._ids: dict[str, str] = {}
        self.messages = [self._marked(message, index) for index, message in enumerate(messages)]
        self._tools: list[tuple[str, str]] = []
        self.tools = None if not tools else [self._marked_tool(tool) for tool in tools]
        self._plain = messages

    def problem(self, rendered: str) -> str | None:
        """Describe a text that does not occur once in ``rendered``; None if there is none.

        The reasoning of earlier replies may be left out, since reasoning models do not see it.
        """
        for mark, index, one in self._marks:
            count = rendered.count(mark)
            if count == 1 or (count == 0 and one.reasoning and index < len(self._plain) - 1):
                continue
            if count and one.part.endswith(".name"):  # results may be headed by their call's name
                continue
            if count:
                return (
                    f"renders messages[{index}].{one.part} {count} times ({one.text!r:.60}); use "
                    "a template that renders it once"
                )
            where = " of the reply" if self._plain[index]["role"] == "assistant" else ""
            return (
                f"leaves {one.text!r:.60} of messages[{index}] out{where} ({one.part}); {_ADVICE}"
            )
        for mark, part in self._tools:
            if mark not in rendered:
                return f"leaves out {part}; {_ADVICE}"
        return self._problem_of_results(rendered)

    def _problem_of_results(self, rendered: str) -> str | None:
        """Describe results in another order than their calls, unless the template shows ids."""
        calls: list[str] = []
        for index, message in enumerate(self._plain):
            if message["role"] == "assistant":
                calls = [str(call.get("id")) for call in message.get("tool_calls", ())]
            elif message["role"] == "tool" and message.get("tool_call_id") in calls:
                answered = message["tool_call_id"]
                if answered != calls.pop(0) and rendered.count(self._ids[answered]) < 2:
                    return (
                        f"shows no ids of calls, and messages[{index}] is the result of "
                        f"{answered!r:.40} before that of an earlier call; put results in the "
                        "order of their calls"
                    )
        return None

    def _new(self) -> str:
        number = next(self._numbers)
        digits = ""
        for _ in range(5):
            number, digit = divmod(number, 36)
            digits = _DIGITS[digit] + digits
        return f"qz{digits}zq"

    def _mark(self, index: int, one: SaidText) -> str:
        mark = self._new()
        self._marks.append((mark, index, one))
        return mark

    def _marked(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        marked = dict(message)
        for key in ("reasoning_content", "content", "name"):
            if message.get(key) and (key, message["role"]) != ("name", "tool"):
                one = SaidText(key, message[key], reasoning=key == "reasoning_content")
                marked[key] = self._mark(index, one)
        if "tool_call_id" in message:
            marked["tool_call_id"] = self._id(message["tool_call_id"])
        if "tool_calls" in message:
            marked["tool_calls"] = [
                self._marked_call(call, index, f"tool_calls[{place}]")
                for place, call in enumerate(message["tool_calls"])
            ]
        return marked

    def _marked_call(self, call: Mapping[str, Any], index: int, part: str) -> dict[str, Any]:
        function = call["function"]
        name = self._mark(index, SaidText(f"{part}.name", function["name"]))
        arguments = self._marked_value(function["arguments"], index, f"{part}.arguments")
        marked = {**call, "function": {**function, "name": name, "arguments": arguments}}
        if isinstance(call.get("id"), str):
            marked["id"] = self._id(call["id"])
        return marked

    def _marked_value(self, value: Any, index: int, part: str) -> Any:
        if isinstance(value, Mapping):
            return {
                key: self._marked_value(item, index, f"{part}.{key}") for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [
                self._marked_value(item, index, f"{part}[{place}]")
                for place, item in enumerate(value)
            ]
        return self._mark(index, SaidText(part, str(value)))

    def _id(self, name: str) -> str:
        if name not in self._ids:
            self._ids[name] = self._new()
        return self._ids[name]

    def _marked_tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(tool["function"])
        named = f"the tool {function['name']!r:.60}"
        self._mark_keys(function, {"name": named, "description": f"the description of {named}"})
        if function.get("parameters"):
            function["parameters"] = self._marked_parameters(function["parameters"], named)
        return {**tool, "function": function}

    def _marked_parameters(self, schema: Mapping[str, Any], tool: str) -> dict[str, Any]:
        """Mark the names and descriptions of a schema's properties, at the first level."""
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            bare = all(isinstance(one, Mapping) and "type" in one for one in schema.values())
            return self._marked_properties(schema, tool)[0] if bare else dict(schema)
        marked, names = self._marked_properties(properties, tool)
        required = schema.get("required")
        if isinstance(required, list | tuple):
            required = [names.get(name, name) for name in required if isinstance(name, str)]
            return {**schema, "properties": marked, "required": required}
        return {**schema, "properties": marked}

    def _marked_properties(
        self, properties: Mapping[str, Any], tool: str
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the properties with marks, and the mark of each name."""
        marked: dict[str, Any] = {}
        names: dict[str, str] = {}
        for name, schema in properties.items():
            part = f"the parameter {name!r:.60} of {tool}"
            names[name] = self._new()
            self._tools.append((names[name], part))
            if isinstance(schema, Mapping):
                schema = dict(schema)
                self._mark_keys(schema, {"description": f"the description of {part}"})
            marked[names[name]] = schema
        return marked, names

    def _mark_keys(self, schema: dict[str, Any], parts: Mapping[str, str]) -> None:
        for key, part in parts.items():
            if isinstance(schema.get(key), str) and schema[key].strip():
                mark = self._new()
                self._tools.append((mark, part))
                schema[key] = mark


def shown(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under every key that chat templates read."""
    if "reasoning_content" not in message:
        return dict(message)
    return {**message, **dict.fromkeys(REASONING, message["reasoning_content"])}
