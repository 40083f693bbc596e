"""Conversion of conversations in other common formats to messages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from primerl.data.errors import ConversationError
from primerl.data.json_text import decoded_if_text, decoded_json, says_nothing
from primerl.data.result_parts import with_parts_as_messages

_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "assistant"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function"), "tool"),
    **dict.fromkeys(("function_response", "function-response"), "tool"),
    "system": "system",
    "developer": "developer",
}
_CALLS = ("function_call", "function-call")
_SYSTEMS = ("system", "system_prompt")


@attrs.frozen
class RowFormat:
    """A format of rows: the keys that tell it, and those that are used if they are there.

    Attributes:
        name: what errors call the format.
        keys: the keys that a row of this format has.
        messages: converts a row to messages; it gets the row, the format and the place.
        also: the keys that are converted, too, if they are there.
        only_texts: the values of the keys are lists of texts; others are no such format.
    """

    name: str
    keys: tuple[str, ...]
    messages: Callable[[Mapping[str, Any], "RowFormat", str], list[Any]]
    also: tuple[str, ...] = ()
    only_texts: bool = False


def require_messages(row: Any, place: str) -> None:
    """Check that a row has messages and no other conversation.

    Raises:
        ConversationError: it is in another format, which the error names.
    """
    found = _formats_of(row)
    if not found:
        return
    if not says_nothing(row.get("messages")):
        _require_one_source(decoded_if_text(row["messages"], place), row, found, place)
        return
    if found[0].messages is _preferences:
        _preferences(row, found[0], place)
    raise ConversationError(
        f"{place}: the row has the format {found[0].name}, not 'messages'; pass convert=True "
        "(--convert) to convert it"
    )


def to_messages(row: Any, place: str) -> Any:
    """Convert a row in another format to one with messages; ``FORMATS`` lists the formats.

    A system prompt beside the conversation becomes its first message. Parts of the types
    ``tool_use`` and ``tool_result`` become calls and results. Replies in a prompt get the weight 0.
    Other keys stay. A row whose format is not known is returned as it is.

    Raises:
        ConversationError: a turn is malformed, the row holds preferences or several conversations,
            or has something that the conversion would lose.
    """
    if not isinstance(row, Mapping):
        return row
    found = _formats_of(row)
    if not says_nothing(row.get("messages")):
        messages = decoded_if_text(row["messages"], f"{place}: messages")
        if isinstance(messages, list | tuple):
            messages = [
                _turn(turn, f"{place}: messages[{index}]")
                if isinstance(turn, Mapping) and "from" in turn
                else turn
                for index, turn in enumerate(messages)
            ]
        _require_one_source(messages, row, found, place)
        used: set[str] = set()
    elif not found:
        return row
    else:
        if len(found) > 1:
            names = " and ".join(one.name for one in found)
            raise ConversationError(
                f"{place}: the row holds two conversations ({names}); expected one of them"
            )
        messages = found[0].messages(row, found[0], place)
        used = {*found[0].keys, *found[0].also}
    if isinstance(messages, list | tuple):
        messages = with_parts_as_messages(_with_system(row, messages, used, place), place)
    kept = {key: row[key] for key in row if key not in used}
    return {**kept, "messages": messages}


def _formats_of(row: Any) -> list[RowFormat]:
    """Return the formats whose keys a row has."""
    if not isinstance(row, Mapping):
        return []
    found = [one for one in FORMATS if all(not says_nothing(row.get(key)) for key in one.keys)]
    return [one for one in found if not one.only_texts or _are_texts(row[one.keys[0]])]


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)


def _require_one_source(
    messages: Any, row: Mapping[str, Any], found: Sequence[RowFormat], place: str
) -> None:
    """Refuse a row with messages and another conversation that says something else."""
    said = str(messages)
    for one in found:
        try:
            other = one.messages(row, one, place)
        except ConversationError:
            continue  # such as preferences, or a column that only has the same name
        texts = [turn.get("content") for turn in other if isinstance(turn, Mapping)]
        if any(isinstance(text, str) and repr(text)[1:-1] not in said for text in texts):
            raise ConversationError(
                f"{place}: the row holds two conversations (messages and {one.name}); expected "
                "one of them"
            )


def _with_system(
    row: Mapping[str, Any], messages: Sequence[Any], used: set[str], place: str
) -> list[Any]:
    """Return the messages after the system prompt that the row has beside them."""
    systems = [key for key in _SYSTEMS if not says_nothing(row.get(key))]
    used.update(systems)
    for key in systems:
        text = row[key]
        if not isinstance(text, str):
            raise ConversationError(f"{place}: {key} is {text!r:.60}; expected a string")
        first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
        if first.get("role") == "system":
            if first.get("content") != text:
                raise ConversationError(
                    f"{place}: {key} differs from the system prompt in the messages; expected one"
                )
        else:
            messages = [{"role": "system", "content": text}, *messages]
    return list(messages)


def _turns(row: Mapping[str, Any], kind: RowFormat, place: str) -> list[Any]:
    """Convert turns, each with its speaker, or texts of which the user says the first."""
    (key,) = kind.keys
    turns = decoded_if_text(row[key], f"{place}: {key}")
    if not isinstance(turns, list | tuple):
        raise ConversationError(f"{place}: {key} is {turns!r:.60}; expected a list of turns")
    if _are_texts(turns):
        roles = ("user", "assistant")
        return [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]
    return [_turn(turn, f"{place}: {key}[{index}]") for index, turn in enumerate(turns)]


def _turn(turn: Any, place: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise ConversationError(f"{place} is {turn!r:.80}; expected an object")
    speaker = _either(turn, "from", "role", place)
    value = _either(turn, "value", "content", place)
    rest = {key: turn[key] for key in turn if key not in ("from", "role", "value", "content")}
    if isinstance(speaker, str) and speaker in _CALLS:
        calls = decoded_json(value, f"{place}.value") if isinstance(value, str) else value
        calls = calls if isinstance(calls, list) else [calls]
        if not says_nothing(rest.get("tool_calls")):
            raise ConversationError(f"{place} has tool_calls beside its value; expected one")
        return {**rest, "role": "assistant", "content": "", "tool_calls": calls}
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        key = "from" if "from" in turn else "role"
        expected = ", ".join((*_SPEAKERS, *_CALLS))
        raise ConversationError(f"{place}.{key} is {speaker!r:.40}; expected one of {expected}")
    if value is None and "from" in turn and "tool_calls" not in turn:
        raise ConversationError(f"{place}.value is missing; expected a string")
    return {**rest, "role": _SPEAKERS[speaker], "content": value}


def _either(turn: Mapping[str, Any], one: str, other: str, place: str) -> Any:
    """Return what a turn has under either key."""
    found = [key for key in (one, other) if turn.get(key) is not None]
    if len(found) == 2 and turn[one] != turn[other] and not says_nothing(turn[other]):
        raise ConversationError(f"{place} has {one} and {other}; expected one of them")
    return turn[found[0]] if found else None


def _pair(row: Mapping[str, Any], kind: RowFormat, place: str) -> list[Any]:
    """Convert a prompt, what follows it after an empty line, and a completion."""
    prompt, completion = kind.keys
    asked = row[prompt]
    for key in kind.also:
        more = row.get(key)
        if key == "history" or says_nothing(more):
            continue
        if not isinstance(asked, str) or not isinstance(more, str):
            raise ConversationError(
                f"{place}: {prompt} is {asked!r:.40} and {key} is {more!r:.40}; expected strings"
            )
        asked = f"{asked}\n\n{more}"
    return [
        *(_history(row["history"], place) if "history" in kind.also and row.get("history") else ()),
        *map(_untrained, _said("user", asked, f"{place}: {prompt}")),
        *_said("assistant", row[completion], f"{place}: {completion}"),
    ]


def _history(history: Any, place: str) -> list[dict[str, Any]]:
    """Convert earlier turns: pairs of what the user and the assistant said."""
    turns = []
    for index, pair in enumerate(history if isinstance(history, list | tuple) else [history]):
        if not isinstance(pair, list | tuple) or not all(isinstance(one, str) for one in pair):
            pair = []
        if len(pair) != 2:
            raise ConversationError(
                f"{place}: history[{index}] is no pair of strings, a question and its answer"
            )
        turns.append({"role": "user", "content": pair[0]})
        turns.append({"role": "assistant", "content": pair[1]})
    return turns


def _untrained(message: Any) -> Any:
    """Return a message of a prompt; a reply without a weight gets 0."""
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return message
    return {"weight": 0, **message}


def _said(role: str, said: Any, place: str) -> list[Any]:
    if isinstance(said, str):
        return [{"role": role, "content": said}]
    if isinstance(said, list | tuple):
        return list(said)
    raise ConversationError(f"{place} is {said!r:.80}; expected text or a list of messages")


def _query(row: Mapping[str, Any], _: RowFormat, place: str) -> list[Any]:
    """Convert a query and the calls that answer it."""
    calls = decoded_if_text(row["answers"], f"{place}: answers")
    return [
        *_said("user", row["query"], f"{place}: query"),
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]


def _preferences(_row: Mapping[str, Any], _: RowFormat, place: str) -> list[Any]:
    raise ConversationError(
        f"{place}: the row has the format preferences (chosen and rejected); expected one "
        "conversation"
    )


FORMATS = (
    RowFormat("preferences", ("chosen", "rejected"), _preferences),
    RowFormat("ShareGPT", ("conversations",), _turns),
    RowFormat("ShareGPT (conversation)", ("conversation",), _turns),
    RowFormat("UltraChat (data)", ("data",), _turns, only_texts=True),
    RowFormat("prompt/completion", ("prompt", "completion"), _pair, also=("input",)),
    RowFormat("prompt/response", ("prompt", "response"), _pair, also=("input",)),
    RowFormat("instruction/output", ("instruction", "output"), _pair, also=("input", "history")),
    RowFormat("instruction/response", ("instruction", "response"), _pair, also=("context",)),
    RowFormat("question/response", ("question", "response"), _pair),
    RowFormat("query/answers", ("query", "answers"), _query),
)
