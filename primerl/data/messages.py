"""Checks of a conversation's messages, and the one form in which chat templates get them."""

from collections.abc import Mapping, Sequence
from typing import Any

from primerl.data import keys
from primerl.data.errors import ConversationError
from primerl.data.json_text import decoded_if_text, require_plain, says_nothing
from primerl.data.reasoning import ENCRYPTED_PARTS, REASONING_PARTS, reasoning_of, thought_of
from primerl.data.tool_calls import as_id, calls_of, require_order_of_results, tools_of

_SAID = ("messages", "tools", "functions")
_TEXT_PARTS = ("text", "input_text", "output_text")


def checked_conversation(row: Any, place: str, *, unread: set[str] | None = None) -> dict[str, Any]:
    """Return a conversation in the one form that chat templates get.

    In this form, a message's content is a string. A reply's reasoning is ``reasoning_content``, its
    calls are ``tool_calls`` of the form ``{"function": {"name": ..., "arguments": {...}}}``, and
    empty keys are absent. Keys that are not read stay as they are.

    Args:
        row: ``messages`` and, optionally, ``tools``.
        place: what the messages of errors begin with.
        unread: a set, to which the keys of messages and parts are added that are neither trained
            nor shown to the policy.

    Raises:
        ConversationError: the row is malformed, or says something that would be lost.
    """
    messages = row.get("messages") if isinstance(row, Mapping) else None
    messages = decoded_if_text(messages, f"{place}: messages")
    if not isinstance(messages, list | tuple) or not messages:
        found = f"the keys {', '.join(map(str, row))}" if isinstance(row, Mapping) else f"{row!r}"
        raise ConversationError(
            f"{place}: expected an object with 'messages', a list with at least one message; "
            f"found {found:.120}"
        )
    require_plain(messages, f"{place}: messages")
    for key in ("tools", "functions"):
        require_plain(row.get(key), f"{place}: {key}")
    others = {key: value for key, value in row.items() if key not in _SAID}
    require_plain(others, place, finite=False)
    conversation = {key: value for key, value in row.items() if key != "functions"}
    unread = set() if unread is None else unread
    conversation["messages"] = [
        _message(message, f"{place}: messages[{index}]", unread)
        for index, message in enumerate(messages)
    ]
    _read_ids_of_results(conversation["messages"])
    _require_nothing_beside(row, conversation["messages"], place)
    tools = tools_of(row, place)
    if tools:
        conversation["tools"] = tools
    else:
        conversation.pop("tools", None)
    require_order_of_results(conversation["messages"], place)
    return conversation


def _require_nothing_beside(
    row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], place: str
) -> None:
    """Refuse keys beside the messages that mean something which would be lost."""
    for key in keys.ROW_TEXTS:
        if key not in row or says_nothing(row[key]):
            continue
        if not any(row[key] == message["content"] for message in messages):
            raise ConversationError(
                f"{place}: {key!r} beside the messages is not read; write a system prompt as the "
                "first message (convert=True does), documents as text; images, audio and video are "
                "not supported"
            )
    for key in (*keys.ROW_WEIGHTS, *keys.ROW_MASKS):
        if row.get(key) is None or row[key] == []:
            continue
        if row[key] != (1 if key in keys.ROW_WEIGHTS else 0):  # 1 == True, 0 == False
            raise ConversationError(
                f"{place}: {key!r} beside the messages is {row[key]!r:.60}, which is not read; to "
                'leave a reply untrained, write "weight": 0 in its message'
            )
    if row.get("chat_template_kwargs"):
        raise ConversationError(
            f"{place}: chat_template_kwargs of one conversation are not supported; remove them, or "
            "set them in the tokenizer's chat template for all conversations"
        )


def _message(message: Any, place: str, unread: set[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ConversationError(
            f"{place} is {message!r:.80}; expected an object with role and content"
        )
    role = message.get("role")
    if role == "function":  # what OpenAI called tool results before there were several calls
        role = "tool"
    if role not in keys.ROLES:
        raise ConversationError(
            f"{place}.role is {role!r:.80}; expected one of {', '.join(keys.ROLES)}"
        )
    parts: list[str | None] = []
    content = _content(message.get("content"), f"{place}.content", parts, unread)
    calls = calls_of(message, place)
    reasoning, text = reasoning_of(message, content or "", parts, place)
    if role != "assistant" and (reasoning or calls):
        raise ConversationError(
            f"{place} has the role {role!r} and reasoning or tool calls; expected them in the "
            "assistant's messages only"
        )
    _require_read(message, text, place)
    if content is None and not calls and not reasoning and role != "tool":
        raise ConversationError(
            f"{place}.content is {message.get('content')!r:.80}; expected a string"
        )
    others = {key: message[key] for key in message if key not in keys.READ}
    unread.update(others)
    checked = {**others, "role": role, "content": text}
    if reasoning:
        checked["reasoning_content"] = reasoning
    if calls:
        checked["tool_calls"] = calls
    if message.get("name") not in (None, ""):
        if not isinstance(message["name"], str):
            raise ConversationError(f"{place}.name is {message['name']!r:.80}; expected a string")
        checked["name"] = message["name"]
    _read_result_id(message, checked, place)
    _read_weight(message, checked, place)
    return checked


def _require_read(message: Mapping[str, Any], text: str, place: str) -> None:
    """Refuse keys that mean something which would be lost."""
    if message.get("refusal"):
        raise ConversationError(
            f"{place}.refusal is {message['refusal']!r:.60}; chat templates leave it out: write "
            "the text as content to train it"
        )
    for key in message:
        value = message[key]
        if key in keys.MASKS and value is not None:
            raise ConversationError(
                f'{place}.{key} is {value!r:.60}; to leave a reply untrained, write "weight": 0'
            )
        if key in keys.TEXTS and not says_nothing(value):
            if isinstance(value, str) and (value.strip() in text or value == "all"):
                continue  # the content says it, too; "all" are the recipients
            raise ConversationError(
                f"{place}.{key} is {value!r:.60}, which is not read; write reasoning as "
                "reasoning_content, calls as tool_calls, text as content, or remove it"
            )


def _content(content: Any, place: str, thoughts: list[str | None], unread: set[str]) -> str | None:
    """Return a message's text, with the texts of parts joined, and add parts of reasoning."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ConversationError(f"{place} is {content!r:.80}; expected a string or a list of parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        where = f"{place}[{index}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") or "text" if isinstance(part, Mapping) else type(part).__name__
        if kind in _TEXT_PARTS:
            texts.append(_text_of(part, where, unread))
        elif kind in REASONING_PARTS or kind in ENCRYPTED_PARTS:
            if "".join(texts).strip():
                raise ConversationError(
                    f"{where} is reasoning after text; expected reasoning at the beginning"
                )
            thoughts.append(thought_of(part, where))
        else:
            raise ConversationError(
                f"{where} is a part of type {kind!r:.40}; expected text or thinking. Write calls "
                "as tool_calls and their results as messages with the role 'tool' (convert=True "
                "converts tool_use and tool_result); images, audio and video are not supported"
            )
    return "".join(texts)


def _text_of(part: Mapping[str, Any], place: str, unread: set[str]) -> str:
    """Return the text of a part, which must say nothing else."""
    for key in part:
        if key == "text" or says_nothing(part[key]):
            continue
        if key not in keys.HARMLESS:
            raise ConversationError(
                f"{place}.{key} is {part[key]!r:.60}, which is not read; expected a part with a "
                "text alone: write it as text, or remove it"
            )
        if key != "type":
            unread.add(f"content[].{key}")
    text = part.get("text")
    if text is None and part.get("type"):  # a null, which files leave out
        return ""
    if not isinstance(text, str):
        raise ConversationError(f"{place}.text is {text!r:.80}; expected a string")
    return text


def _read_result_id(message: Mapping[str, Any], checked: dict[str, Any], place: str) -> None:
    """Set the ``tool_call_id`` of a result, which other formats write under other keys."""
    if message.keys().isdisjoint(keys.RESULT_IDS):
        return
    found: dict[str, str] = {}
    for key in keys.RESULT_IDS:
        value = message.get(key)
        if says_nothing(value):
            continue
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        found[key] = as_id(value, f"{place}.{key}")
    if len(set(found.values())) > 1:
        raise ConversationError(
            f"{place} has different {' and '.join(found)}; expected tool_call_id alone"
        )
    if found:
        checked["tool_call_id"] = next(iter(found.values()))


def _read_ids_of_results(messages: Sequence[dict[str, Any]]) -> None:
    """Read a result's own ``id`` as that of its call, if a call has it."""
    ids = {call["id"] for one in messages for call in one.get("tool_calls", ()) if "id" in call}
    for message in messages:
        own = message.get("id")
        if message["role"] == "tool" and "tool_call_id" not in message and str(own) in ids:
            message["tool_call_id"] = str(message.pop("id"))


def _read_weight(message: Mapping[str, Any], checked: dict[str, Any], place: str) -> None:
    """Set the weight of a reply, 1 or 0; the weight 1 of another message says nothing."""
    if message.keys().isdisjoint(keys.WEIGHTS):
        return
    found: dict[str, int] = {}
    for key in keys.WEIGHTS:
        value = message.get(key)
        if value is None:
            continue
        if value not in (0, 1) or (key == "weight" and isinstance(value, bool)):
            raise ConversationError(
                f"{place}.{key} is {value!r:.40}; expected 1, or 0 for a reply that is not trained"
            )
        found[key] = int(value)
    if len(set(found.values())) > 1:
        raise ConversationError(
            f"{place} has different {' and '.join(found)}; expected weight alone"
        )
    if found and (checked["role"] == "assistant" or 0 in found.values()):
        checked["weight"] = next(iter(found.values()))
