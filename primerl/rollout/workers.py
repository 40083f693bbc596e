"""The worker: collects rollouts while the trainer trains, within the staleness bound."""

import itertools
import logging
import math
import operator
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import Any, Literal

from primerl._common.progress import report
from primerl.rollout.collection.buffer import ON_STALE
from primerl.rollout.collection.concurrency import AdaptiveConcurrency
from primerl.rollout.collection.counters import default_limit
from primerl.rollout.collection.plan import CollectionPlan
from primerl.rollout.collection.staleness import check_schedule
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.environments.environment import Environment, Task
from primerl.rollout.processes.background_loop import BackgroundLoop
from primerl.rollout.processes.hosts import BLOCKED_S, InProcess, InThread
from primerl.rollout.processes.pickling import pickle_arguments
from primerl.rollout.tasks.streams import TaskStream, as_task_stream
from primerl.types import Group, Played, PolicyVersion, Rollout, SamplingParams

JOIN_S = 45.0
log = logging.getLogger(__name__)


def worker(
    engine: Engine | None,
    environment: Environment,
    tasks: Iterable[Task] | TaskStream,
    *,
    params: SamplingParams,
    group_size: int,
    groups_per_step: int,
    max_staleness: int,
    on_stale: Literal["drop", "wait", "mask_tokens"] = "drop",
    publish_every: int = 1,
    keep: Sequence[Callable[[Group], bool]] = (),
    min_group: int | None = None,
    retries: int = 1,
    quarantine_after: int = 3,
    max_refused: int | None = None,
    group_timeout_s: float = 1800.0,
    timeout_s: float = 600.0,
    start_timeout_s: float = 600.0,
    await_verification: bool | None = None,
    concurrency: AdaptiveConcurrency | None = None,
    state: bytes | None = None,
    isolation: Literal["process", "thread"] = "process",
    threads: int = 1,
) -> "Worker":
    """A worker that plays ``tasks`` in the background; use it as a context manager.

        with rollout.worker(engine, environment, tasks, params=params, group_size=8,
                            groups_per_step=16, max_staleness=2) as rollouts:
            groups = rollouts.take(version=step)

    Args:
        engine: samples; its ``version`` says which weights it serves. It stays in this process and
            is called from the worker's, unless it is ``portable``: a client of a server elsewhere.
            None, as on ranks other than 0, is for a worker that does nothing: ``take`` and
            ``evaluate`` return no rollouts.
        environment: ``async (task, engine, params) -> Rollout``.
        tasks: a stream (``Shuffled``, ``Mixture``, ``DifficultyPools``), or any iterable of
            mappings, iterated again from the start when it runs out.
        params: how training rollouts are sampled.
        group_size: rollouts per task, compared with each other.
        groups_per_step: groups that one ``take`` returns.
        max_staleness: the bound, in policy steps; 0 is the synchronous loop.
        on_stale: what becomes of a group beyond it: ``"drop"`` (and a group in flight that the
            next step could not use is cancelled), ``"wait"`` (a step waits for stragglers before
            they are too old) or ``"mask_tokens"`` (what is too old is not trained, the rest is).
        publish_every: how often the recipe publishes weights, in policy steps.
        keep: filters; a group that one refuses is counted under its name and replaced.
        min_group: a group closes with its survivors if they are at least so many; all of them by
            default.
        retries: how often a failed rollout is played again.
        quarantine_after: a task is not played any more when so many groups of it have failed and
            none has succeeded since.
        max_refused: a step that waits is an error once filters have refused so many groups in a
            row; by default ``32 * groups_per_step``, and at least 512. Raise it where few groups
            are kept: of tasks of which one in 100 is kept, a row of 512 comes once in 170 kept
            groups.
        group_timeout_s: how long a group may take; its stragglers are then cancelled.
        timeout_s: how long a wait may see no further group that its step can use, and how long the
            engine may fail every request, before that is an error.
        start_timeout_s: how long its process may take to rebuild these arguments and to restore a
            ``state``, for which tasks without indices are generated again up to its position.
        await_verification: whether a version is provisional until ``Worker.mark_version`` has named
            it, the one that is served at the start included. None: from the first call of it on,
            which a transport that verifies makes (``weights.transport_to(..., worker=)``).
        concurrency: how many rollouts may be in flight within the staleness bound, by the load of
            the engine, which needs ``metrics()``, as ``VLLMEngine`` and ``TransformersEngine`` have
            it; by default, all.
        state: what ``Worker.state`` returned, to resume from there; refused where its groups or
            tasks are not what this worker would make (another ``group_size``, say).
        isolation: ``"process"``: in a process of its own, so that environments never take the
            trainer's interpreter lock; what crosses is pickled, lambdas and local functions
            included. ``"thread"``: in this process, for notebooks and tests.
        threads: of numerical libraries in the worker's process.

    Raises:
        ValueError: there are no tasks, a number is out of range, a completion cannot fit the
            engine's context, the sampler would not sample what is trained (``top_p``, ``top_k``,
            greedy), the schedule could only stand still, or an argument can't cross into the
            worker's process.
    """
    if engine is None:
        return IdleWorker()
    _check_parts(engine, environment, params, keep, threads, start_timeout_s)
    check_schedule(
        publish_every=publish_every, max_staleness=max_staleness, groups_per_step=groups_per_step
    )
    plan = CollectionPlan(
        params=params,
        group_size=group_size,
        min_group=group_size if min_group is None else min_group,
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        on_stale=on_stale,
        retries=retries,
        quarantine_after=quarantine_after,
        max_refused=default_limit(groups_per_step) if max_refused is None else max_refused,
        group_timeout_s=group_timeout_s,
        timeout_s=timeout_s,
        await_verification=await_verification,
        concurrency=concurrency,
    )
    _check(plan, engine, tasks, isolation)
    if concurrency is not None and not hasattr(engine, "metrics"):
        raise ValueError(
            f"concurrency follows the engine's load, and a {type(engine).__name__} has no "
            "metrics(); leave it out"
        )
    arguments: dict[str, Any] = {
        "environment": environment,
        "tasks": as_task_stream(tasks),
        "keep": tuple(keep),
        "plan": plan,
        "state": state,
    }
    if isolation == "thread":
        return Worker(engine, InThread(engine, arguments), plan)
    pickle_arguments(params=params, tasks=tasks)  # under the names that the caller knows
    host = InProcess(
        engine, pickle_arguments(**arguments), threads=threads, start_timeout_s=start_timeout_s
    )
    return Worker(engine, host, plan)


def _check_parts(
    engine: Any,
    environment: Any,
    params: Any,
    keep: Any,
    threads: int,
    start_timeout_s: float,
) -> None:
    if not isinstance(engine, Engine):
        raise ValueError(
            f"engine is a {type(engine).__name__}; expected one with generate(), version and "
            "context_length"
        )
    if hasattr(engine, "chat"):
        raise ValueError(
            f"engine is a {type(engine).__name__}, which has no tokens to train on; expected one "
            "such as serving.VLLMEngine (rollout.play_tasks evaluates with it)"
        )
    if not callable(environment) or isinstance(environment, type):
        raise ValueError(
            f"environment is {environment!r:.80}; expected a coroutine function "
            "(task, engine, params) -> Rollout"
        )
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params is a {type(params).__name__}, expected SamplingParams")
    if callable(keep) or not all(callable(one) for one in keep):
        raise ValueError(f"keep is {keep!r:.80}; expected a list of functions Group -> bool")
    if threads < 1:
        raise ValueError(f"threads is {threads}, expected at least 1")
    if not start_timeout_s > 0:
        raise ValueError(f"start_timeout_s is {start_timeout_s}, expected a positive time")


def _check(plan: CollectionPlan, engine: Engine, tasks: Any, isolation: str) -> None:
    if isolation not in ("process", "thread"):
        raise ValueError(f"isolation={isolation!r}; expected 'process' or 'thread'")
    if plan.on_stale not in ON_STALE:
        raise ValueError(f"on_stale={plan.on_stale!r}; expected one of {', '.join(ON_STALE)}")
    counts = ("group_size", "min_group", "groups_per_step", "max_staleness", "retries")
    for name in (*counts, "quarantine_after", "max_refused"):
        if not isinstance(getattr(plan, name), int):
            raise ValueError(f"{name} is {getattr(plan, name)!r}, expected a whole number")
    if plan.group_size < 1:
        raise ValueError(f"group_size is {plan.group_size}, expected at least 1 rollout per task")
    if not 1 <= plan.min_group <= plan.group_size:
        raise ValueError(f"min_group is {plan.min_group}, expected 1 to {plan.group_size}")
    for name, least in (("retries", 0), ("quarantine_after", 1), ("max_refused", 1)):
        if getattr(plan, name) < least:
            raise ValueError(f"{name} is {getattr(plan, name)}, expected at least {least}")
    for name in ("group_timeout_s", "timeout_s"):
        if not getattr(plan, name) > 0:
            raise ValueError(f"{name} is {getattr(plan, name)}, expected a positive time")
    params = plan.params
    if params.max_tokens >= engine.context_length:
        raise ValueError(
            f"max_tokens={params.max_tokens} leaves no room for a prompt in the engine's context "
            f"of {engine.context_length} tokens"
        )
    if params.temperature == 0 or params.top_p < 1 or params.top_k != -1:
        raise ValueError(
            f"temperature={params.temperature}, top_p={params.top_p}, top_k={params.top_k}: "
            "training needs temperature > 0 and the full distribution (top_p=1, top_k=-1), or "
            "the logprobs trained on are not those that were sampled"
        )
    if hasattr(tasks, "__len__") and len(tasks) == 0:
        raise ValueError("there are no tasks; pass at least one mapping with a 'prompt'")


class Worker:
    """A running rollout worker: made by ``worker``.

    ``take`` and ``evaluate`` are called from the trainer's thread and block, with a deadline.
    """

    def __init__(self, engine: Engine, host: "InThread | InProcess", plan: CollectionPlan) -> None:
        self._engine = engine
        self._host = host
        self._plan = plan
        self._loop: BackgroundLoop | None = None
        self._last_stats: dict[str, Any] | None = None
        self._taking = threading.Lock()
        self._deliveries = itertools.count(1)

    def __enter__(self) -> "Worker":
        if self._loop is not None:
            raise RuntimeError(
                "this worker was entered before; make another: rollout.worker(..., state=) resumes "
                "from what state() returned"
            )
        self._loop = BackgroundLoop("primerl-rollouts")
        try:
            self._loop.submit(self._host.start()).result()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._loop is not None:
            self._last_stats = self._stop()
        if kind is KeyboardInterrupt and self._host.interrupted:
            raise RuntimeError(self._host.cause_of_death) from None  # nobody pressed Ctrl-C

    def take(self, version: PolicyVersion) -> list[Group]:
        """The groups of one policy step, oldest first; blocks until they are there.

        They count as trained once they are here. Where this raises, whatever raised, they stay
        buffered and the next ``take`` has them.

        Args:
            version: of the weights that the batch will be applied to. No returned token to be
                trained is staler than ``version - max_staleness``.

        Raises:
            RuntimeError: at once where no rollout could be used: the engine serves weights that
                are too old (nothing was published) or newer than ``version``, or more steps were
                taken than versions published. Rollouts keep failing; the reward function failed;
                filters refused ``max_refused`` groups in a row; no group came for ``timeout_s``
                that the step can use (none ended, the filters refused them, or they were too old
                or too new); the worker died, or its event loop is blocked.
        """
        version = operator.index(version)  # numpy's, say, could not be stored in a state
        with self._taking:
            delivery = next(self._deliveries)
            try:
                groups: list[Group] = self._wait("take", version, delivery)
            except BaseException:  # they may be on their way
                self._notify("give_back", delivery)
                raise
            self._notify("deliver", delivery)
            return groups

    def mark_version(self, version: PolicyVersion, *, verified: bool) -> None:
        """Say whether the engines were verified to serve the weights of ``version``.

        Until then no ``take`` returns a group with a token that it sampled, trained or not. When it
        is rejected, such groups are dropped as ``"unverified"``, those in flight are cancelled, and
        none is started until it, published again and repaired, or a later version is verified. A
        verified version may be rejected later.

        Raises:
            ValueError: the worker was made with ``await_verification=False``.
        """
        self._wait("mark_version", operator.index(version), verified)

    def evaluate(
        self,
        tasks: Iterable[Task],
        params: SamplingParams,
        *,
        engine: Engine | None = None,
        timeout_s: float = 600.0,
    ) -> list[Rollout]:
        """Play each task once, beside training, and return the rollouts in order.

        All are sampled by one version of the weights. The trainer waits here, so nothing is
        published meanwhile; ``start_evaluation`` does not wait.

        Raises:
            RuntimeError: it took longer than ``timeout_s``, or weights were published meanwhile.
                What an environment raises is raised, after its retries.
        """
        return self.start_evaluation(tasks, params, engine=engine).result(timeout_s)

    def start_evaluation(
        self,
        tasks: Iterable[Task],
        params: SamplingParams,
        *,
        samples: int = 1,
        keep_errors: bool = False,
        engine: Engine | None = None,
    ) -> "Evaluation":
        """Begin an evaluation beside training; ``result`` or ``plays`` waits for it.

        Args:
            tasks: what is played.
            params: greedy, say.
            samples: plays of each task.
            keep_errors: what an environment raises is the end of its play alone, and not of the
                evaluation.
            engine: whose weights stay as they are: a second engine that the recipe publishes to
                only before an evaluation. Training's own would move on under the evaluation,
                which is an error.
        """
        other = None if engine is self._engine else engine
        played = [dict(task) for task in tasks]
        if samples < 1:
            raise ValueError(f"samples is {samples}, expected at least 1 play of each task")
        return Evaluation(self, self._call("evaluate", played, params, other, samples, keep_errors))

    def stats(self) -> dict[str, Any]:
        """Totals since the start (of the run, where it went on from a ``state``).

        Groups: ``started == trained + dropped + in_flight + buffered``, with ``dropped_by`` the
        count for each reason. ``rollout_tokens`` were sampled for groups that ended well;
        ``tokens_by`` for trained groups and for each reason of dropped ones. Rollouts: ``retried``
        and, by the error's name, ``errors``; requests that the engine failed: ``engine_errors``.
        Tasks: ``quarantined``, and how often one was drawn and ``skipped``. ``environments``: by
        name, groups, rollouts, tokens, failed groups and the sum of rewards.
        ``awaiting_verification``: for each provisional version, the finished groups that wait for
        it. ``trainer_wait_s``: time in ``take``, and ``evaluation_wait_s``, for the results of
        evaluations. ``rollout_wait_s``: time in which the bound let no group run.
        ``loop_lag_p99_s``, ``loop_lag_max_s``: how late the worker's event loop was, in the last
        two minutes and ever.
        """
        if self._last_stats is not None:
            return self._last_stats
        stats: dict[str, Any] = self._wait("stats")
        return stats

    def state(self) -> bytes:
        """What another worker needs to resume from here: ``worker(..., state=)``.

        The tasks' position, the finished groups, the counts, the curriculum's estimates and the
        tasks in quarantine. Tasks in flight are played again, so none is skipped.

        Raises:
            ValueError: a task holds what can't be stored.
        """
        state: bytes = self._wait("state")
        return state

    def members(self) -> list[dict[str, Any]]:
        """The processes at work: ``name``, ``pid`` and whether each is ``alive``."""
        return [*self._host.members(), *self._wait("members")]

    def _call(self, name: str, *args: Any) -> "Future[Any]":
        if self._loop is None or not self._loop.alive:
            raise RuntimeError("the worker is not running; use `with rollout.worker(...) as ...`")
        return self._loop.submit(self._host.call(name, *args))

    def _notify(self, name: str, *args: Any) -> None:
        """Call a method without waiting for it; it comes before whatever is called next."""
        if self._loop is not None and self._loop.alive:
            self._loop.call_soon(self._host.notify, name, *args)

    def _wait(self, name: str, *args: Any) -> Any:
        return self._finish(self._call(name, *args), f"{name!r} was not answered", None)

    def _finish(self, future: "Future[Any]", what: str, timeout_s: float | None) -> Any:
        """The future's result; raises where the event loop that should set it is blocked."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        progress: Future[Any] | None = None
        try:
            while not wait([future], max(0.0, min(1.0, deadline - time.monotonic()))).done:
                silent = time.monotonic() - self._host.last_heartbeat
                if silent > max(self._plan.timeout_s, BLOCKED_S):
                    raise RuntimeError(
                        f"{what}: the worker's event loop has been blocked for {silent:.0f} s; "
                        "an environment, a reward or a filter does blocking work (run the "
                        "environment with rollout.isolated, or await what it waits for)"
                    )
                if self._loop is None or not self._loop.alive:
                    raise RuntimeError(f"{what}: the worker's event loop has ended")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{what} than {timeout_s:.0f} s")
                if progress is None:
                    progress = self._call("progress")
                elif progress.done() and progress.exception() is None:
                    report(*progress.result())
                    progress = None
            return future.result()
        except CancelledError:
            raise RuntimeError(f"{what}: the worker was closed") from None
        except BaseException:
            future.cancel()
            self._host.failure_seen()
            raise

    def _stop(self) -> dict[str, Any] | None:
        assert self._loop is not None
        blocked = time.monotonic() - self._host.last_heartbeat > BLOCKED_S
        patience_s = 1.0 if blocked else JOIN_S
        stopping = self._loop.submit(self._host.stop())
        try:
            if not wait([stopping], timeout=patience_s).done:
                log.error("the rollout worker did not stop within %.0f s", patience_s)
        finally:
            if not stopping.done():  # out of patience, or interrupted
                self._host.kill()
            self._loop.end(patience_s)
        return stopping.result() if stopping.done() else None


class IdleWorker(Worker):
    """The worker on ranks other than 0: does nothing, so that a loop needs no test of its rank."""

    def __init__(self) -> None:
        self._loop = None

    def __enter__(self) -> "IdleWorker":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def take(self, version: PolicyVersion) -> list[Group]:  # noqa: ARG002
        """No groups: rank 0 has them."""
        return []

    def mark_version(self, version: PolicyVersion, *, verified: bool) -> None:
        """Nothing to release or drop."""

    def start_evaluation(
        self,
        tasks: Iterable[Task],  # noqa: ARG002
        params: SamplingParams,  # noqa: ARG002
        *,
        samples: int = 1,  # noqa: ARG002
        keep_errors: bool = False,  # noqa: ARG002
        engine: Engine | None = None,  # noqa: ARG002
    ) -> "Evaluation":
        """An evaluation without rollouts."""
        done: Future[Any] = Future()
        done.set_result([])
        return Evaluation(self, done)

    def stats(self) -> dict[str, Any]:
        """No counts."""
        return {}

    def state(self) -> bytes | None:  # type: ignore[override]
        """Nothing: rank 0 saves."""
        return None

    def members(self) -> list[dict[str, Any]]:
        """No processes."""
        return []


class Evaluation:
    """An evaluation beside training."""

    def __init__(self, owner: Worker, future: "Future[Any]") -> None:
        self._owner = owner
        self._future = future

    def done(self) -> bool:
        """Whether ``result`` would return, or raise, at once."""
        return self._future.done()

    def result(self, timeout_s: float = 600.0) -> list[Rollout]:
        """The rollouts, in the order of the tasks; of plays that failed, none.

        Raises:
            RuntimeError: it took longer than ``timeout_s`` from now (it is then cancelled), or
                more than one version of the weights sampled.
            Exception: what an environment raised, without ``keep_errors``.
        """
        plays = self.plays(timeout_s)
        return [played.rollout for played in plays if played.rollout is not None]

    def plays(self, timeout_s: float = 600.0) -> list[Played]:
        """All plays, in the order of the tasks; raises as ``result``."""
        began = time.monotonic()
        plays: list[Played] = self._owner._finish(
            self._future, "the evaluation took longer", timeout_s
        )
        self._owner._notify("waited_for_evaluation", time.monotonic() - began)
        return plays
