"""Messages that a chat template does not take as they are, merged by fixed rules.

Agents send several system messages, system messages between others, and several user messages in a
row. Some chat templates refuse them, or leave them out. For such a template,

1. system messages at the beginning are joined, with an empty line between them;
2. a later system message becomes a user message;
3. if it takes no system message at all, the first user message begins with the system messages;
4. a tool's result becomes a user message, in ``<tool_response>`` tags, if the template has no form
   for calls and none for results;
5. user messages in a row are joined, with an empty line between them.

The rules depend on the template only, so the same messages are always merged in the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]

_TEXTS = ("first-5e0c", "second-91d7", "third-27ab", "fourth-63f2")


class MessageMerger:
    """Merges messages by the rules above, as far as a template needs it.

    Args:
        render: returns a template's text for some messages.
        knows_calls: whether the template has a form for calls, and so for their results.
    """

    def __init__(self, render: Render, *, knows_calls: bool = True) -> None:
        self._render = render
        self._knows_calls = knows_calls

    def merged(self, messages: Sequence[Message], *, opening: bool = True) -> list[Message]:
        """Return the messages as the template takes them.

        ``opening`` says whether they begin the conversation.
        """
        merged = list(messages)
        if any(one["role"] == "tool" for one in merged) and not self._takes_results:
            merged = [_result_as_user(one) for one in merged]
        count = _leading_systems(merged) if opening else 0
        if any(one["role"] == "system" for one in merged[count:]) and not self._takes_late_system:
            merged[count:] = [_as_user(one) for one in merged[count:]]
        if count > 1 and not self._takes_two_systems:
            merged[:count] = [_joined(merged[:count])]
            count = 1
        if count and not self._takes_system:
            merged[:count] = [_as_user(one) for one in merged[:count]]
        if _has_users_in_a_row(merged) and not self._takes_two_users:
            merged = _with_joined_users(merged)
        return merged

    @cached_property
    def _takes_system(self) -> bool:
        return self._takes("system", "user")

    @cached_property
    def _takes_two_systems(self) -> bool:
        return self._takes("system", "system", "user")

    @cached_property
    def _takes_late_system(self) -> bool:
        after_user = self._takes("user", "system", "user")
        return after_user and self._takes("user", "assistant", "system", "user")

    @cached_property
    def _takes_results(self) -> bool:
        return self._knows_calls or self._takes("user", "assistant", "tool")

    @cached_property
    def _takes_two_users(self) -> bool:
        return self._takes("user", "user") and self._takes("user", "assistant", "user", "user")

    def _takes(self, *roles: str) -> bool:
        import jinja2  # transformers uses it to render chat templates, so it is installed

        pairs = zip(roles, _TEXTS, strict=False)
        messages = [{"role": role, "content": text} for role, text in pairs]
        try:
            rendered = self._render(messages)
        except (jinja2.TemplateError, TypeError, ValueError):
            return False
        places = [rendered.find(text) for text in _TEXTS[: len(roles)]]
        return -1 not in places and places == sorted(places)


def _leading_systems(messages: Sequence[Message]) -> int:
    roles = [one["role"] for one in messages]
    return next((i for i, role in enumerate(roles) if role != "system"), len(roles))


def _as_user(message: Message) -> Message:
    return {**message, "role": "user"} if message["role"] == "system" else message


def _result_as_user(message: Message) -> Message:
    if message["role"] != "tool":
        return message
    result = str(message.get("content") or "")
    return {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"}


def _joined(messages: Sequence[Message]) -> Message:
    if len(messages) == 1:
        return messages[0]
    text = "\n\n".join(str(one.get("content") or "") for one in messages)
    return {"role": messages[0]["role"], "content": text}


def _with_joined_users(messages: Sequence[Message]) -> list[Message]:
    joined: list[Message] = []
    for role, group in groupby(messages, lambda one: one["role"]):
        run = list(group)
        joined += [_joined(run)] if role == "user" else run
    return joined


def _has_users_in_a_row(messages: Sequence[Message]) -> bool:
    roles = [one["role"] for one in messages]
    return any(pair == ("user", "user") for pair in pairwise(roles))
