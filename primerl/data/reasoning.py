"""The reasoning of a reply, under whatever keys and in whatever parts it stands."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from primerl.data.errors import ConversationError
from primerl.data.json_text import says_nothing
from primerl.data.keys import HARMLESS, REASONING, REASONING_LISTS

REASONING_PARTS = ("thinking", "reasoning", "reasoning.text", "reasoning.summary")
ENCRYPTED_PARTS = ("redacted_thinking", "reasoning.encrypted")
_TEXTS = ("thinking", "text", "reasoning", "summary", "content")
_ENCRYPTED = ("data", "encrypted_content")
_BLOCK = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_END = re.compile(
    r"(?:\s*<think>)?((?:(?!<think>).)*?)</think>", re.DOTALL
)  # some lack the first tag


def divided(content: str) -> tuple[str, str]:
    """Return the text of the ``<think>`` block with which a content begins, and the rest."""
    block = _BLOCK.match(content)
    return (block[1], content[block.end() :]) if block else ("", content)


def thought_of(part: Any, place: str) -> str | None:
    """Return the text of a part that is reasoning; None if the reasoning is encrypted.

    Raises:
        ConversationError: the part has no text, several, or something else that would be lost.
    """
    if not isinstance(part, Mapping):
        raise ConversationError(f"{place} is {part!r:.80}; expected an object")
    found = [part[key] for key in _TEXTS if not says_nothing(part.get(key))]
    lost = [
        key
        for key in part
        if key not in (*_TEXTS, *_ENCRYPTED, *HARMLESS) and not says_nothing(part[key])
    ]
    if lost:
        raise ConversationError(f"{place}.{lost[0]} is {part[lost[0]]!r:.60}, which is not read")
    if not found:
        return None
    if len(found) > 1:
        raise ConversationError(f"{place} is {part!r:.80}; expected one text of reasoning")
    if isinstance(found[0], list | tuple):  # Mistral's parts and OpenAI's summaries hold parts
        inner = [
            one if isinstance(one, str) else thought_of(one, f"{place}[{index}]")
            for index, one in enumerate(found[0])
        ]
        return "".join(text for text in inner if text)
    if not isinstance(found[0], str):
        raise ConversationError(f"{place} is {part!r:.80}; expected reasoning as a string")
    return found[0]


def reasoning_of(
    message: Mapping[str, Any], content: str, parts: Sequence[str | None], place: str
) -> tuple[str, str]:
    """Return a reply's reasoning and its content without it.

    The reasoning may stand under several keys, in parts of the content, and in ``<think>`` tags at
    the beginning of the content, but white space apart it must be the same everywhere. Reasoning
    in tags alone stays in the content.

    Raises:
        ConversationError: there are two different ones, or encrypted reasoning alone.
    """
    if not parts and message.keys().isdisjoint((*REASONING, *REASONING_LISTS)):
        return "", content
    found: dict[str, str] = {}
    encrypted: list[str] = []
    for key in REASONING:
        if not says_nothing(message.get(key)):
            if not isinstance(message[key], str):
                raise ConversationError(f"{place}.{key} is {message[key]!r:.80}; expected a string")
            found[key] = message[key]
    lists = {"content": list(parts)}
    for key in REASONING_LISTS:
        if says_nothing(message.get(key)):
            continue
        if not isinstance(message[key], list | tuple):
            raise ConversationError(f"{place}.{key} is {message[key]!r:.60}; expected a list")
        lists[key] = [
            thought_of(part, f"{place}.{key}[{index}]") for index, part in enumerate(message[key])
        ]
    for key, texts in lists.items():
        readable = "".join(text for text in texts if text)
        if readable:
            found[key] = readable
        elif None in texts:
            encrypted.append(key)
    if encrypted and not found:
        raise ConversationError(
            f"{place}.{encrypted[0]}[0] is reasoning without a text. Encrypted or redacted "
            "reasoning can't be trained: remove it"
        )
    tagged = _END.match(content)
    if found and tagged:
        content = content[tagged.end() :].lstrip()
        if tagged[1].strip():
            found["<think> tags"] = tagged[1]
    if len({"".join(text.split()) for text in found.values()}) > 1:
        raise ConversationError(
            f"{place} has different reasoning as {' and '.join(found)}; expected one of them"
        )
    return next(iter(found.values()), ""), content
