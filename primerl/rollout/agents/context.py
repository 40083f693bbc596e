"""Context management: functions that shorten an agent's conversation before each turn.

Such a function has the form ``async (messages, ask) -> messages``. The messages that it returns
replace the conversation. ``ask(messages)`` returns the policy's reply to other messages, sampled as
a sub-agent. Each change of the conversation begins a new branch, which is token-exact like any
other.
"""

from collections.abc import Awaitable, Callable, Sequence

from primerl.rollout.conversations.messages import Message

Ask = Callable[[Sequence[Message]], Awaitable[str]]
ManageContext = Callable[[Sequence[Message], Ask], Awaitable[Sequence[Message]]]

DROPPED = "[dropped to save space]"


def _characters(messages: Sequence[Message]) -> int:
    return sum(len(message.get("content") or "") for message in messages)


def drop_tool_results(*, over: int, to: int) -> ManageContext:
    """Return a function that empties the oldest tool results of a long conversation.

    When the messages have more than ``over`` characters, the content of the oldest tool results is
    replaced by a short note, until ``to`` characters are left. A lower ``to`` makes fewer branches.

    Raises:
        ValueError: ``to`` is not below ``over``.
    """
    if not 0 <= to < over:
        raise ValueError(f"to={to}, over={over}; expected 0 <= to < over")

    async def manage(messages: Sequence[Message], ask: Ask) -> Sequence[Message]:  # noqa: ARG001
        excess = _characters(messages) - to
        if excess <= over - to:
            return messages
        kept = []
        for message in messages:
            if excess > 0 and message["role"] == "tool" and len(message["content"]) > len(DROPPED):
                excess -= len(message["content"]) - len(DROPPED)
                message = {**message, "content": DROPPED}
            kept.append(message)
        return kept

    return manage


def summarise(
    *,
    over: int,
    instruction: str = "Summarise the conversation so far: the task, what was done, what is left.",
) -> ManageContext:
    """Return a function that has the policy summarize a long conversation.

    It does so when the messages have more than ``over`` characters. The system message and the
    first user message stay; the summary replaces all others. It is sampled as the sub-agent
    ``"summary"``, and is trained.
    """

    async def manage(messages: Sequence[Message], ask: Ask) -> Sequence[Message]:
        if _characters(messages) <= over:
            return messages
        summary = await ask([*messages, {"role": "user", "content": instruction}])
        users = [index for index, one in enumerate(messages) if one["role"] == "user"]
        head = list(messages[: users[0] + 1]) if users else []
        return [*head, {"role": "user", "content": f"Summary of what came before:\n{summary}"}]

    return manage
