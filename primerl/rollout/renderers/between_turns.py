"""What a chat template has between a reply and the next one."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, bool], str]
"""Messages as text; the second argument says whether a reply follows."""

_PLACEHOLDER = "reply-7c1e9b04d2"


@attrs.frozen
class Between:
    """A template's ``text`` after a reply, up to the next; ``closing`` is how it ends a reply."""

    text: str
    closing: str
    extends: bool
    """Whether the template renders what comes before the reply as it did when it was sampled."""


def between_turns(
    render: Render, opening: Messages, messages: Messages, *, begins: str = ""
) -> Between:
    """A chat template's text between the reply to ``opening`` and that to ``messages``.

    ``begins`` is how the reply begins, such as with reasoning that a template may leave out later.
    """
    said = begins + _PLACEHOLDER
    reply = {"role": "assistant", "content": said}
    prompt = render(opening, True)
    longer = render([*opening, reply, *messages], True)
    closed = render([*opening, reply], False)
    return Between(
        text=_after_reply(longer),
        closing=_after_reply(closed),
        extends=longer.startswith(prompt + said),
    )


def _after_reply(text: str) -> str:
    return text[text.rindex(_PLACEHOLDER) + len(_PLACEHOLDER) :]


def without_closing(
    token_ids: list[int], last: int, *, closing: list[int], stop_token_ids: Collection[int]
) -> list[int]:
    """The tokens after a reply whose last one is ``last``, without repeating what has ended it.

    Templates may have tokens before the stop token (Cohere2's ``<|END_RESPONSE|>``): where the
    policy has stopped, they are not added either. Some end a reply by what opens the next message.
    """
    if last not in stop_token_ids:
        return token_ids
    ending = closing if last in closing else token_ids[:1]
    return token_ids[ending.index(last) + 1 :] if last in ending else token_ids
