"""Recorded conversations of rollouts: every message once, and of bounded size."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from primerl.track.run_folder import plain

MAX_TEXT = 20_000
"""Most characters of one recorded text: a message, its reasoning, or the arguments of a call."""

MAX_NAME = 200  # most characters of the name of a role, a tool or an agent

MAX_CHARACTERS = 1_000_000
"""Most characters of all texts of a rollout; beyond that, every long text is cut shorter."""

MAX_PLACES = 200_000
"""Most messages of all branches of a rollout; further branches are only counted.

Branches share most of their messages, and each counts a shared message again.
"""


def recorded_conversation(
    conversation: Mapping[str, Any], *, agent: str = "policy", samples: int = 1
) -> dict[str, Any]:
    """Convert a conversation to JSON's types, with branches as lists of indices into ``messages``.

        {"messages": [{"role": "user", "content": "2 + 2?"}, ...], "left_out": 0,
         "branches": [{"agent": "policy", "origin": "start", "sample": 0,
                       "messages": [0, 1], "turns": [None, 1]}]}

    A conversation without branches becomes one branch. Texts that are too long are cut, with a note
    in their place.

    Args:
        conversation: the ``conversation`` of a ``Rollout``.
        agent: the agent of a conversation without branches.
        samples: the number of the rollout's samples. If there are several, it is not known which
            one has the tokens of a conversation without branches.
    """
    messages = conversation.get("messages", ())
    whole = {"agent": agent, "messages": messages, "sample": 0 if samples == 1 else None}
    given = conversation.get("branches") or [whole]
    kept = list(_first_branches(given))
    unique = {id(one): one for branch in kept for one in branch["messages"]}
    limit = _text_limit([len(text) for one in unique.values() for text in _texts(one)])
    plain_messages: list[dict[str, Any]] = []
    place_of: dict[str, int] = {}
    places: dict[int, int] = {}
    for key, message in unique.items():
        recorded = _recorded(message, limit)
        content = json.dumps(recorded)
        if content not in place_of:
            place_of[content] = len(plain_messages)
            plain_messages.append(recorded)
        places[key] = place_of[content]
    branches = [
        {
            "agent": _cut(branch.get("agent", agent), MAX_NAME),
            "origin": _cut(branch.get("origin", "start"), MAX_NAME),
            "sample": plain(branch.get("sample")),
            "messages": [places[id(one)] for one in branch["messages"]],
            "turns": plain(branch.get("turns")),
        }
        for branch in kept
    ]
    return {"messages": plain_messages, "branches": branches, "left_out": len(given) - len(kept)}


def _first_branches(branches: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield as many branches as have at most ``MAX_PLACES`` messages in total."""
    left = MAX_PLACES
    for branch in branches:
        left -= len(branch["messages"])
        if left < 0:
            return
        yield branch


def _text_limit(lengths: Sequence[int]) -> int:
    limit = MAX_TEXT
    while limit and sum(min(length, limit) for length in lengths) > MAX_CHARACTERS:
        limit //= 2
    return limit


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    yield _text(message.get("content"))
    yield _text(message.get("reasoning_content"))
    for call in message.get("tool_calls") or ():
        yield _text(_function(call).get("arguments"))


def _recorded(message: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Return a message in OpenAI's form, without empty entries."""
    recorded: dict[str, Any] = {
        "role": _cut(message.get("role"), MAX_NAME),
        "content": _cut(message.get("content"), limit),
    }
    if message.get("reasoning_content"):
        recorded["reasoning_content"] = _cut(message["reasoning_content"], limit)
    for name in ("name", "tool_call_id"):
        if message.get(name):
            recorded[name] = _cut(message[name], MAX_NAME)
    if message.get("tool_calls"):
        recorded["tool_calls"] = [_recorded_call(call, limit) for call in message["tool_calls"]]
    return recorded


def _recorded_call(call: Mapping[str, Any], limit: int) -> dict[str, Any]:
    function = {
        "name": _cut(_function(call).get("name"), MAX_NAME),
        "arguments": _cut(_function(call).get("arguments"), limit),
    }
    return {"id": _cut(call.get("id"), MAX_NAME), "type": "function", "function": function}


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function: Mapping[str, Any] = call.get("function", call)
    return function


def _text(value: Any) -> str:
    """Return the text of a content, which may be text, a list of parts, or None; others as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_part(one) for one in value)
    return json.dumps(value, default=str)


def _part(part: Any) -> str:
    if isinstance(part, Mapping) and not isinstance(part.get("text"), str):
        return f"[{part.get('type', 'part')}]"  # for example, an image
    return _text(part["text"] if isinstance(part, Mapping) else part)


def _cut(value: Any, limit: int) -> str:
    """Return a value's text, in valid Unicode; if too long, its beginning, a note and its end."""
    text = _text(value)
    left_out = len(text) - limit
    if left_out > 0:
        tail = limit // 2
        note = f"\n[... {left_out:,} characters are left out of the record ...]\n"
        text = text[: limit - tail] + note + text[len(text) - tail :]
    return text.encode(errors="replace").decode()
