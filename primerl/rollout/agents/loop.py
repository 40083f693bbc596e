"""An agent in this process: the policy, its tools, and limits that end it."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs

from primerl.rollout.agents.context import ManageContext
from primerl.rollout.agents.limits import AgentLimits, Budget, LimitReached
from primerl.rollout.agents.tools import Tool, Toolbox
from primerl.rollout.conversations.calls import ContextFull
from primerl.rollout.conversations.history import History, Reply
from primerl.rollout.conversations.messages import Message
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.environments.environment import Environment, Task, reward_of
from primerl.rollout.renderers.loading import load_renderer
from primerl.types import Rollout, SamplingParams

AgentReward = Callable[[Task, "AgentRun"], float | Awaitable[float]]


@attrs.define(eq=False, kw_only=True)
class AgentRun:
    """What an agent did: its messages, why it stopped, and the engine calls that it made.

    ``state`` is what its tools left there.
    """

    messages: list[Message]
    history: History
    state: dict[str, Any]
    stop: str = "stop"
    metrics: dict[str, float] = attrs.field(factory=dict)

    @property
    def reply(self) -> str:
        """The text of the last reply; empty if there is none."""
        said = [one["content"] for one in self.messages if one["role"] == "assistant"]
        return str(said[-1] or "") if said else ""

    def rollout(self, *, reward: float, keep_conversation: bool = False) -> Rollout:
        """The run with its reward: one sample for each branch."""
        return history_rollout(
            self.history,
            reward=reward,
            stop=self.stop,
            metrics=self.metrics,
            keep_conversation=keep_conversation,
        )


def history_rollout(
    history: History,
    *,
    reward: float,
    stop: str,
    metrics: Mapping[str, float],
    agents: Sequence[str] | None = None,
    keep_conversation: bool = False,
) -> Rollout:
    """A rollout of all that was sampled, with counts of turns and branches as metrics."""
    samples = history.samples(agents)
    counts = {
        "turns": len(history.calls),
        "branches": len(samples),
        "edited": history.origins["edited"],
        "forks": history.origins["fork"],
        "unbridged": history.origins["unbridged"],
        "agents": len({call.agent for call in history.calls}),
    }
    return Rollout(
        samples=samples,
        reward=reward,
        metrics={**{name: float(count) for name, count in counts.items()}, **metrics},
        stop=stop,
        conversation=history.conversation(agents) if keep_conversation else None,
    )


def tool_agent(
    tokenizer: Any,
    *,
    reward: AgentReward,
    tools: Sequence[Tool] | Callable[[Task], Sequence[Tool]] = (),
    system: str | None = None,
    renderer: Any = None,
    limits: AgentLimits | None = None,
    tool_timeout_s: float = 60.0,
    manage_context: ManageContext | None = None,
    keep_conversation: bool = False,
) -> Environment:
    """An environment of an agent that calls tools until it answers without a call.

    Without tools it is a chat of one reply. A limit that is reached, a full context or a reply that
    is cut short ends the rollout, and ``Rollout.stop`` says which; what was sampled is kept.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        reward: ``(task, run) -> number``, of an ``AgentRun``; may be a coroutine function.
        tools: what the policy may call, shared by all rollouts, or a function of the task.
        system: the system message.
        renderer: as of ``rollout.verifiers``; by default the one that fits the tokenizer best.
        limits: of turns, tokens, time and output.
        tool_timeout_s: of one call; the policy is told when it has passed.
        manage_context: what the policy sees of a long conversation, such as ``drop_tool_results``.
        keep_conversation: whether rollouts have their ``conversation``.
    """
    chosen = load_renderer(tokenizer, renderer)

    async def environment(task: Task, engine: Engine, params: SamplingParams) -> Rollout:
        prompt = task["prompt"]
        opening = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        run = await run_agent(
            History(engine, chosen, params, session=secrets.token_hex(8)),
            [*opening, *prompt],
            tools=tools(task) if callable(tools) else tools,
            state={"task": task},
            limits=limits or AgentLimits(),
            tool_timeout_s=tool_timeout_s,
            manage_context=manage_context,
        )
        return run.rollout(
            reward=await reward_of(reward, task, run), keep_conversation=keep_conversation
        )

    return environment


async def run_agent(
    history: History,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] = (),
    state: dict[str, Any] | None = None,
    limits: AgentLimits,
    agent: str = "policy",
    tool_timeout_s: float = 60.0,
    manage_context: ManageContext | None = None,
) -> AgentRun:
    """Let the policy act from ``messages`` on; see ``tool_agent``.

    Several agents of one rollout share a ``history`` and differ in ``agent``.

    Raises:
        Exception: what the engine raises, or ``manage_context``.
    """
    shared = {} if state is None else state
    toolbox = Toolbox(tools, shared, timeout_s=tool_timeout_s, max_output=limits.max_output)
    run = AgentRun(messages=list(messages), history=history, state=shared)
    loop = _Loop(run, toolbox, Budget(limits), agent, manage_context)
    deadline = asyncio.timeout(limits.timeout_s)
    try:
        async with deadline:
            await loop.play()
    except LimitReached as limit:
        run.stop = limit.reason
    except ContextFull:
        run.stop = "context"
    except TimeoutError:
        if not deadline.expired():
            raise
        run.stop = "timeout"
    run.metrics = {
        "tool_calls": float(loop.calls),
        "tool_errors": float(toolbox.failed),
        "malformed_calls": float(loop.malformed),
        "clipped_results": float(toolbox.clipped),
    }
    return run


async def take_turns(
    messages: list[Any],
    *,
    reply: Callable[[], Awaitable[Any]],
    answers: Callable[[Any], AsyncIterator[Any]],
) -> None:
    """Append replies and their answers to ``messages``, until a reply has no answer or is None.

    ``reply`` returns the policy's next message; ``answers`` yields the results of its calls.
    """
    while (message := await reply()) is not None:
        messages.append(message)
        answered = False
        async for answer in answers(message):
            messages.append(answer)
            answered = True
        if not answered:
            return


class _Loop:
    """The turns of one agent."""

    def __init__(
        self,
        run: AgentRun,
        toolbox: Toolbox,
        budget: Budget,
        agent: str,
        manage_context: ManageContext | None,
    ) -> None:
        self.calls = 0
        self.malformed = 0
        self._run = run
        self._toolbox = toolbox
        self._budget = budget
        self._agent = agent
        self._manage = manage_context
        self._faults: list[str] = []  # in the calls of the last reply

    async def play(self) -> None:
        """Take turns until a reply calls no function, or is cut short."""
        await take_turns(self._run.messages, reply=self._reply, answers=self._answers)

    async def _reply(self) -> Message:
        messages = self._run.messages
        if self._manage is not None:
            messages[:] = await self._manage(messages, self._ask)
        reply = await self._turn(messages, self._toolbox.wire, self._agent)
        self._run.stop = reply.finish_reason
        self._faults = reply.malformed
        return reply.message

    async def _answers(self, message: Message) -> AsyncIterator[Message]:
        """The results of a reply's calls, and the faults of calls that can't be executed."""
        if self._run.stop != "stop":
            return
        for call in message.get("tool_calls", ()):
            yield await self._toolbox.answer(call)
            self.calls += 1
        if self._faults:
            self.malformed += len(self._faults)
            faults = "\n".join(f"error: {fault}" for fault in self._faults)
            yield {"role": "user", "content": faults}

    async def _turn(self, messages: Sequence[Message], tools: Any, agent: str) -> Reply:
        left = self._budget.begin_turn()
        reply = await self._run.history.reply(messages, tools=tools, agent=agent, max_tokens=left)
        self._budget.tokens += len(reply.call.completion.token_ids)
        return reply

    async def _ask(self, messages: Sequence[Message]) -> str:
        """The policy's reply to other messages, as a sub-agent without tools."""
        reply = await self._turn(list(messages), None, "summary")
        return str(reply.message["content"])
