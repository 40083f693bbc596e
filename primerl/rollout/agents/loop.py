"""The in-process agent loop: the policy takes turns and calls tools until it is done."""

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
    """The result of running an agent: its messages, its engine calls, and why it stopped.

    ``state`` is the dict that the agent's tools shared.
    """

    messages: list[Message]
    history: History
    state: dict[str, Any]
    stop: str = "stop"
    metrics: dict[str, float] = attrs.field(factory=dict)

    @property
    def reply(self) -> str:
        """The text of the policy's last reply; empty if there is none."""
        said = [one["content"] for one in self.messages if one["role"] == "assistant"]
        return str(said[-1] or "") if said else ""

    def rollout(self, *, reward: float, keep_conversation: bool = False) -> Rollout:
        """Return the run as a ``Rollout`` with ``reward`` and one sample per branch."""
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
    side_jobs: bool = True,
    keep_conversation: bool = False,
) -> Rollout:
    """Return a ``Rollout`` of everything that ``agents`` (by default all) sampled.

    Its metrics include the numbers of turns, branches and side jobs; without ``side_jobs``, these
    are not trained.
    """
    samples = history.samples(agents, side_jobs=side_jobs)
    counts = {
        "turns": len(history.calls),
        "branches": len(samples),
        "edited": history.origins["edited"],
        "forks": history.origins["fork"],
        "unbridged": history.origins["unbridged"],
        "agents": len({call.agent for call in history.calls}),
        "side_jobs": len(history.side_jobs()),
    }
    return Rollout(
        samples=samples,
        reward=reward,
        metrics={**{name: float(count) for name, count in counts.items()}, **metrics},
        stop=stop,
        conversation=(
            history.conversation(agents, side_jobs=side_jobs) if keep_conversation else None
        ),
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
    """Return an environment whose agent calls tools until it replies without a tool call.

    Without tools, an episode is a single reply. A rollout also ends when it reaches a limit, when
    the context is full, or when a reply is cut short. ``Rollout.stop`` says why it ended, and all
    sampled tokens are kept.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        reward: ``(task, run) -> number``, where ``run`` is an ``AgentRun``; plain or coroutine
            function.
        tools: the tools that the policy may call, shared by all rollouts, or a function that
            returns the tools for a task.
        system: the system message.
        renderer: as in ``rollout.verifiers``; by default the renderer that fits the tokenizer best.
        limits: limits on turns, tokens, time and tool output.
        tool_timeout_s: timeout of one tool call; when it expires, the policy gets an error as the
            result.
        manage_context: a function that shortens long conversations, as returned by
            ``drop_tool_results`` or ``summarise``.
        keep_conversation: whether each rollout stores its messages in ``conversation``.
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
    """Run an agent that continues from ``messages``; see ``tool_agent``.

    If a rollout has several agents, they share its ``history`` and have different ``agent`` names.

    Raises:
        Exception: any error of the engine or of ``manage_context``.
    """
    shared = {} if state is None else state
    toolbox = Toolbox(tools, shared, timeout_s=tool_timeout_s, max_output=limits.max_output)
    run = AgentRun(messages=list(messages), history=history, state=shared)
    loop = _AgentTurns(run, toolbox, Budget(limits), agent, manage_context)
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
    """Run an agent's turns, and append the policy's messages and tool results to ``messages``.

    ``reply`` returns the policy's next message; ``answers`` yields the results of that message's
    tool calls. The loop ends when ``reply`` returns None, or when ``answers`` yields nothing.
    """
    while (message := await reply()) is not None:
        messages.append(message)
        answered = False
        async for answer in answers(message):
            messages.append(answer)
            answered = True
        if not answered:
            return


class _AgentTurns:
    """The turn loop of one agent."""

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
        self._faults: list[str] = []  # in the tool calls of the last reply

    async def play(self) -> None:
        """Take turns until a reply makes no tool call, or is cut short."""
        await take_turns(self._run.messages, reply=self._reply, answers=self._answers)

    async def _reply(self) -> Message:
        messages = self._run.messages
        if self._manage is not None:
            messages[:] = await self._manage(messages, self._ask)
        reply = await self._turn(messages, self._toolbox.wire, self._agent)
        self._run.stop = self._budget.stop_after(reply.finish_reason)
        self._faults = reply.malformed
        return reply.message

    async def _answers(self, message: Message) -> AsyncIterator[Message]:
        """Yield the results of a reply's tool calls, then the faults of its malformed calls."""
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
        self._budget.count(len(reply.call.completion.token_ids))
        return reply

    async def _ask(self, messages: Sequence[Message]) -> str:
        """Return the policy's reply to other messages, sampled as a sub-agent without tools."""
        reply = await self._turn(list(messages), None, "summary")
        return str(reply.message["content"])
