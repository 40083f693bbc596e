"""The text of messages whose content is a string or a list of parts."""

from collections.abc import Collection, Mapping
from typing import Any

from primerl.rollout.conversations.messages import text_of
from primerl.rollout.gateways.apis import BadRequest
from primerl.rollout.gateways.fields import PART, check_fields

# The types of parts with text, and the key of the text.
_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
_REASONING = {
    "thinking": "thinking",
    "reasoning": "text",
    "reasoning_text": "text",
    "summary_text": "text",
}


def plain_text(content: Any, where: str, ignored: Collection[str]) -> str:
    """Return the text of a message that has no reasoning.

    Raises:
        BadRequest: a part is not text.
    """
    text, reasoning = text_and_reasoning(content, where, ignored)
    if reasoning:
        raise BadRequest("only an assistant's message can have reasoning", field=f"{where}content")
    return text


def text_and_reasoning(content: Any, where: str, ignored: Collection[str]) -> tuple[str, str]:
    """Return the text of a message, and the reasoning among its parts.

    Raises:
        BadRequest: a part is neither.
    """
    if not isinstance(content, list):
        return _text(content, where), ""
    texts: list[str] = []
    thoughts: list[str] = []
    for number, part in enumerate(content):
        place = f"{where}content[{number}]."
        if not isinstance(part, Mapping):
            texts.append(_text(part, where))
            continue
        kind = part.get("type", "text")
        if not isinstance(kind, str) or (kind not in _TEXTS and kind not in _REASONING):
            raise BadRequest(
                f"a message has a part of type {kind!r}; only text is supported", field=place[:-1]
            )
        check_fields(part, PART, where=place, ignored=ignored)
        key = _TEXTS.get(kind) or _REASONING[kind]
        (texts if kind in _TEXTS else thoughts).append(_text(part.get(key), where))
    return "".join(texts), "".join(thoughts)


def _text(content: Any, where: str) -> str:
    try:
        return text_of(content)
    except ValueError as error:
        raise BadRequest(str(error), field=f"{where}content") from error
