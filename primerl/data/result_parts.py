"""Conversion of calls and results that are parts of content, as Anthropic writes them."""

from collections.abc import Mapping, Sequence
from typing import Any

from primerl.data.errors import ConversationError
from primerl.data.json_text import says_nothing


def with_parts_as_messages(messages: Sequence[Any], place: str) -> list[Any]:
    """Return messages whose ``tool_use`` and ``tool_result`` parts are calls and results.

    Raises:
        ConversationError: text follows a call in a reply, or a part says something else.
    """
    found: list[Any] = []
    for index, message in enumerate(messages):
        kinds = _kinds(message)
        if "tool_use" in kinds:
            found.append(_reply(message, f"{place}: messages[{index}]"))
        elif "tool_result" in kinds:
            found += _results(message, f"{place}: messages[{index}]")
        else:
            found.append(message)
    return found


def _kinds(message: Any) -> set[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list | tuple) else ()
    return {
        part["type"]
        for part in parts
        if isinstance(part, Mapping) and isinstance(part.get("type"), str)
    }


def _reply(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a reply whose parts of the type ``tool_use`` are its calls."""
    parts: list[Any] = []
    calls: list[Any] = []
    for index, part in enumerate(message["content"]):
        if isinstance(part, Mapping) and part.get("type") == "tool_use":
            calls.append({key: part[key] for key in part if key != "cache_control"})
        elif calls:
            raise ConversationError(
                f"{place}.content[{index}] follows a call; expected all calls at the end"
            )
        else:
            parts.append(part)
    if not says_nothing(message.get("tool_calls")):
        raise ConversationError(f"{place} has tool_calls and parts of the type tool_use")
    return {**message, "content": parts, "tool_calls": calls}


def _results(message: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """Return the results in a message, and what the user says before and after them."""
    found: list[dict[str, Any]] = []
    rest = {key: message[key] for key in message if key != "content"}
    for index, part in enumerate(message["content"]):
        if isinstance(part, Mapping) and part.get("type") == "tool_result":
            lost = set(part) - {"type", "tool_use_id", "content", "is_error", "cache_control"}
            if part.get("is_error") or lost:
                key = "is_error" if part.get("is_error") else min(lost)
                raise ConversationError(
                    f"{place}.content[{index}].{key} is {part[key]!r:.60}, which is not read; say "
                    "it in the text of the result"
                )
            identity = part.get("tool_use_id")
            content = part.get("content", "")
            found.append({"role": "tool", "tool_call_id": identity, "content": content})
        elif found and found[-1]["role"] != "tool":
            found[-1]["content"].append(part)
        else:
            found.append({**rest, "content": [part]})
    return found
