"""Environments of the ``verifiers`` library, played with an engine, and their tasks."""

import asyncio
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from primerl.rollout.conversations.calls import EngineCall, stitch
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.environments.environment import Task
from primerl.rollout.environments.verifiers_adapter.loading import load
from primerl.rollout.environments.verifiers_adapter.running_environment import RunningEnvironment
from primerl.rollout.environments.verifiers_adapter.trace_calls import trace_calls
from primerl.rollout.errors import EnvironmentFailed
from primerl.rollout.renderers.loading import load_renderer
from primerl.types import Rollout, SamplingParams

# Verifiers' errors give the original error in their text: "task setup: KeyError: 'no such room'".
_ERROR = re.compile(r"\b([A-Z]\w*): ")


def verifiers(
    id: str,  # noqa: A002 - verifiers' own word
    *,
    tokenizer: Any,
    config: Mapping[str, Any] | None = None,
    renderer: Any = None,
    agent: str | None = None,
    max_turns: int | None = None,
    keep_conversation: bool = False,
    timeout_s: float = 600.0,
    tool_timeout_s: float = 60.0,
    startup_timeout_s: float = 180.0,
) -> "VerifiersEnvironment":
    """Return an environment of the ``verifiers`` library (0.4), which includes its tasks.

        environment = rollout.verifiers("reasoning-gym:chain_sum", tokenizer=tokenizer)
        with rollout.worker(engine, environment, environment.tasks, ...) as rollouts:

    Args:
        id: the name of an installed package, ``name`` or ``owner/name@version``, optionally
            followed by a colon and the choice of tasks: the taskset's option ``dataset``, ``game``,
            ``env`` or ``env_id``, or else its only required option.
        tokenizer: a Hugging Face tokenizer; None for an engine that takes messages.
        config: verifiers' environment config: ``{"taskset": {...}, "agent": {...}}``.
        renderer: the renderer that turns messages into tokens, or a config for the ``renderers``
            package. By default it is the model's own renderer if ``renderers`` knows the model's
            name, and otherwise one that uses the tokenizer's chat template.
        agent: the name of the agent to train, if several agents of the environment are trainable.
        max_turns: maximum number of model calls of one agent; a rollout that reaches it ends with
            ``stop="max_turns"``.
        keep_conversation: whether each rollout stores its last branch in ``conversation``.
        timeout_s: timeout of one rollout, including set-up and scoring.
        tool_timeout_s: timeout of one tool call; when it expires, the policy gets an error as the
            result.
        startup_timeout_s: timeout for the environment's shared tool servers to start.

    Raises:
        ImportError: verifiers or a package that the environment needs is not installed, or the
            version of verifiers is not supported.
        ValueError: there is no such environment, or it does not accept the choice or the config.
    """
    environment = VerifiersEnvironment(
        id=id,
        tokenizer=tokenizer,
        config=dict(config or {}),
        renderer=renderer,
        agent=agent,
        max_turns=max_turns,
        keep_conversation=keep_conversation,
        timeout_s=timeout_s,
        tool_timeout_s=tool_timeout_s,
        startup_timeout_s=startup_timeout_s,
    )
    environment.load()  # so that a wrong name or config raises an error here, not in a worker
    return environment


@attrs.define(kw_only=True, eq=False, slots=False)
class VerifiersEnvironment:
    """A verifiers environment as an ``async (task, engine, params) -> Rollout``.

    Made by ``verifiers``. It can be pickled: servers and agents are set up by the first call on
    each event loop, and closed by ``aclose`` or with the loop.
    """

    id: str
    tokenizer: Any
    config: Mapping[str, Any]
    renderer: Any
    agent: str | None
    max_turns: int | None
    keep_conversation: bool
    timeout_s: float
    tool_timeout_s: float
    startup_timeout_s: float
    _loaded: Any = attrs.field(init=False, default=None)
    _running: dict[asyncio.AbstractEventLoop, RunningEnvironment] = attrs.field(
        init=False, factory=dict
    )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loaded": None, "_running": {}}

    @property
    def tasks(self) -> "Tasks":
        """The environment's tasks, in its order; they can be iterated any number of times."""
        return Tasks(self)

    def load(self) -> Any:
        """Return verifiers' own environment object, which is loaded once per process."""
        if self._loaded is None:
            self._loaded = load(
                self.id,
                self.config,
                agent=self.agent,
                max_turns=self.max_turns,
                tool_timeout_s=self.tool_timeout_s,
            )
        return self._loaded

    async def __call__(self, task: Task, engine: Engine, params: SamplingParams) -> Rollout:
        """Play ``task``, which comes from ``tasks``.

        Raises:
            TimeoutError: the rollout or its scoring took too long.
            RuntimeError: the environment's own code failed; the message gives its error.
            ValueError: the episode does not have exactly one agent run to train.
            Exception: any error of the engine, unchanged.
        """
        from primerl.rollout.environments.verifiers_adapter.client import EngineClient
        from primerl.rollout.environments.verifiers_adapter.harness import CLIENT

        if self.tokenizer is None and not hasattr(engine, "chat"):
            raise ValueError(
                f"{self.id} was made without a tokenizer, but the engine takes tokens; pass "
                "tokenizer= to rollout.verifiers"
            )
        running = await self._set_up()
        client = EngineClient(engine, params, running.renderer)
        token = CLIENT.set(client)
        deadline = asyncio.timeout(self.timeout_s)
        try:
            async with deadline:
                traces = await running.play(_rebuild(self.load(), task))
        except TimeoutError:
            if deadline.expired():
                raise TimeoutError(
                    f"{self.id}, task {task['id']!r}: the rollout took longer than "
                    f"timeout_s={self.timeout_s}"
                ) from None
            raise
        except Exception as error:
            error.add_note(f"in the environment {self.id}, task {task['id']!r}")
            raise
        finally:
            CLIENT.reset(token)
        for trace in traces:
            self._check(trace, task, client)
        rollout = _rollout(self._trained(traces), params)
        if self.keep_conversation:
            rollout = attrs.evolve(rollout, conversation=_conversation(self._trained(traces)))
        return rollout

    async def aclose(self) -> None:
        """Close the tool servers of this event loop, if any were started."""
        running = self._running.pop(asyncio.get_running_loop(), None)
        if running is not None:
            await running.aclose()

    async def _set_up(self) -> RunningEnvironment:
        loop = asyncio.get_running_loop()
        running = self._running.get(loop)
        if running is None or running.failed:
            self._running = {k: v for k, v in self._running.items() if not k.is_closed()}
            running = self._running[loop] = RunningEnvironment(
                self.load(),
                load_renderer(self.tokenizer, self.renderer),
                startup_timeout_s=self.startup_timeout_s,
            )
        if not running.ready.done():
            await asyncio.shield(running.ready)  # shielded, because other rollouts wait for it, too
        running.ready.result()
        return running

    def _check(self, trace: Any, task: Task, client: Any) -> None:
        where = f"{self.id}, task {task['id']!r}"
        if not trace.ok:
            if client.error is not None:
                raise client.error
            error = trace.last_error
            own = _ERROR.search(error.message)
            failure = EnvironmentFailed(
                f"{where}: {error.type}: {error.message}",
                name=error.type if own is None else own[1],
            )
            if error.traceback:
                failure.add_note(error.traceback)
            raise failure
        if trace.is_timeout and trace.stop_condition != "agent_timeout":
            raise TimeoutError(f"{where}: {trace.stop_condition} (the environment's own limit)")

    def _trained(self, traces: list[Any]) -> Any:
        trained = [
            trace
            for trace in traces
            if trace.agent.trainable and self.agent in (None, trace.agent.name)
        ]
        if len(trained) != 1:
            raise ValueError(
                f"{self.id}: a rollout trains exactly one run of one agent, but the episode has "
                f"{[trace.agent.name for trace in trained]} to train among "
                f"{[trace.agent.name for trace in traces]}; name one with agent=..."
            )
        return trained[0]


class Tasks:
    """The tasks of a verifiers environment as mappings, in order; endless if the taskset is.

    Each has an ``"id"``, a ``"prompt"`` if there is one, and the data of verifiers' task as
    ``"data"``.
    """

    def __init__(self, environment: VerifiersEnvironment, first: int = 0) -> None:
        self._environment = environment
        self._first = first

    def __iter__(self) -> Iterator[Task]:
        for task in itertools.islice(self._environment.load().taskset, self._first, None):
            # Leave out defaults at the top level only: in a message, the role is a default.
            set_fields = task.data.model_dump(exclude_defaults=True)
            whole = task.data.model_dump(mode="json")
            data = {name: whole[name] for name in set_fields}
            own = "" if task.data.id is None else f"/{task.data.id}"
            plain = {"id": f"{self._environment.id}/{task.data.idx}{own}", "data": data}
            if "prompt" in data:
                plain["prompt"] = data["prompt"]
            yield plain

    def split(self, count: int) -> tuple[list[Task], "Tasks"]:
        """Return the first ``count`` tasks, to be held out, and the rest."""
        first = list(itertools.islice(self, count))
        return first, Tasks(self._environment, self._first + count)


def _rebuild(environment: Any, task: Task) -> Any:
    if "data" not in task:
        raise ValueError(
            f"the task has no 'data', its keys are {sorted(task)}; take tasks from .tasks"
        )
    taskset = environment.taskset
    kind = type(taskset).task_type()
    return kind(kind.data_type().model_validate(task["data"]), taskset.config.task)


def _rollout(trace: Any, params: SamplingParams) -> Rollout:
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    calls = trace_calls(trace)
    usage = {} if calls else _usage(trace)
    if not calls and not usage:
        raise ValueError(
            f"the policy sampled no token (stop: {trace.stop_condition}); is the prompt too long?"
        )
    return Rollout(
        samples=stitch(calls, temperature=params.temperature),
        reward=trace.reward,
        metrics={"turns": float(trace.num_turns), **usage, **scores, **metrics},
        stop=_stop(trace, calls),
        agent=trace.agent.name,
        episode_id=trace.id,
    )


def _stop(trace: Any, calls: list[EngineCall]) -> str:
    """Return why the episode ended: a stop condition, or how the last reply ended."""
    if trace.stop_condition not in (None, "agent_completed", "user_closed"):
        return str(trace.stop_condition)
    if calls:
        return calls[-1].stop
    cut = bool(trace.calls) and trace.calls[-1].finish_reason == "length"
    return "length" if cut else "stop"


def _usage(trace: Any) -> dict[str, float]:
    """Return the token counts that an endpoint reported, for rollouts without samples."""
    usages = [call.usage for call in trace.calls if call.usage is not None]
    if not usages:
        return {}
    return {
        "prompt_tokens": float(sum(usage.prompt_tokens for usage in usages)),
        "completion_tokens": float(sum(usage.completion_tokens for usage in usages)),
    }


def _conversation(trace: Any) -> dict[str, Any]:
    """Return the trace's last branch in the form of conversations that ``primerl.data`` reads."""
    from primerl.rollout.environments.verifiers_adapter.messages import wire_message, wire_tool

    branch = trace.branches[-1]
    conversation: dict[str, Any] = {"messages": [wire_message(one) for one in branch.messages]}
    if branch.tools:
        conversation["tools"] = [wire_tool(tool) for tool in branch.tools]
    return conversation
