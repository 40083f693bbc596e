"""Context management: functions from a conversation to the one that the policy sees next.

``async (messages, ask) -> messages``, called before each turn; ``ask(messages)`` is the policy's
reply to other messages, as a sub-agent. What a function returns replaces the conversation, so each
time that it changes something a branch begins, which is exact as all branches are.
"""

from collections.abc import Awaitable, Callable, Sequence

from primerl.rollout.conversations.messages import Message

Ask = Callable[[Sequence[Message]], Awaitable[str]]
ManageContext = Callable[[Sequence[Message], Ask], Awaitable[Sequence[Message]]]

DROPPED = "[dropped to save space]"


def _characters(messages: Sequence[Message]) -> int:
    return sum(len(message.get("content") or "") for message in messages)


def drop_tool_results(*, over: int, to: int) -> ManageContext:
    """When the messages have more than ``over`` characters, empty the oldest results of tools.

    As many as it takes to have ``to`` characters; a lower ``to`` makes fewer branches.

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
    """When the messages have more than ``over`` characters, the policy summarises them.

    The system message and the first user's message stay; the summary replaces all others. It is
    sampled as the sub-agent ``"summary"``, and trained.
    """

    async def manage(messages: Sequence[Message], ask: Ask) -> Sequence[Message]:
        if _characters(messages) <= over:
            return messages
        summary = await ask([*messages, {"role": "user", "content": instruction}])
        users = [index for index, one in enumerate(messages) if one["role"] == "user"]
        head = list(messages[: users[0] + 1]) if users else []
        return [*head, {"role": "user", "content": f"Summary of what came before:\n{summary}"}]

    return manage
