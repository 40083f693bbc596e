"""The rollout worker: collects rollouts while the trainer trains, within the staleness bound."""

import itertools
import logging
import math
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import Any, Literal

from primerl._common.openmp import release_threads
from primerl._common.progress import report
from primerl.rollout.collection.buffer import ON_STALE
from primerl.rollout.collection.concurrency import AdaptiveConcurrency
from primerl.rollout.collection.counters import default_limit
from primerl.rollout.collection.settings import CollectionSettings, EvaluationOptions
from primerl.rollout.collection.staleness import check_schedule
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.environments.environment import Environment, Task
from primerl.rollout.evaluations import Evaluation, TookTooLong, UncollectedEvaluations
from primerl.rollout.processes.background_loop import BackgroundLoop
from primerl.rollout.processes.hosts import BLOCKED_S, InProcess, InThread
from primerl.rollout.processes.pickling import pickle_arguments
from primerl.rollout.processes.running_clock import running_time
from primerl.rollout.tasks.streams import TaskStream, as_task_stream
from primerl.types import Group, PolicyVersion, Rollout, SamplingParams

JOIN_S = 45.0
STOPPED_S = 600.0  # how long to wait for a stopped process to be continued
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
    """Return a worker that plays ``tasks`` in the background; use it as a context manager.

        with rollout.worker(engine, environment, tasks, params=params, group_size=8,
                            groups_per_step=16, max_staleness=2) as rollouts:
            groups = rollouts.take(version=step)

    Args:
        engine: samples completions; its ``version`` is the policy version that it serves. The
            engine stays in this process and is called from the worker's process, unless it is
            ``portable``: a client of a server elsewhere. Pass None on ranks other than 0: that
            worker does nothing, and its ``take`` and ``evaluate`` return no rollouts.
        environment: ``async (task, engine, params) -> Rollout``.
        tasks: a stream (``Shuffled``, ``Mixture``, ``DifficultyPools``), or any iterable of
            mappings, which is iterated again from the start when it runs out.
        params: sampling parameters of training rollouts.
        group_size: rollouts per task, compared with each other.
        groups_per_step: groups that each ``take`` returns.
        max_staleness: the staleness bound, in policy steps; 0 is the synchronous loop.
        on_stale: what happens to a group beyond the bound. ``"drop"``: it is dropped, and a group
            in flight that the next step could not use is cancelled. ``"wait"``: a step waits for
            stragglers before they become too old. ``"mask_tokens"``: tokens that are too old are
            not trained, the others are.
        publish_every: policy steps between two publications of weights by the recipe.
        keep: filters, each ``Group -> bool``. A group that a filter refuses is counted under the
            filter's name and replaced.
        min_group: the fewest rollouts that must succeed for a group to be used; by default all.
        retries: how often a failed rollout is played again.
        quarantine_after: a task is no longer played after this many of its groups have failed
            without one success in between.
        max_refused: when filters have refused this many groups in a row, a step that is still
            waiting raises an error; by default ``32 * groups_per_step``, and at least 512. Raise
            it if few groups are kept: if filters keep one group in 100, a row of 512 refusals
            occurs once per 170 kept groups.
        group_timeout_s: how long a group may take; its stragglers are then cancelled.
        timeout_s: raise an error after waiting this long without one more group that the step can
            use, or after the engine has failed every request for this long.
        start_timeout_s: how long the worker's process may take to rebuild these arguments and to
            restore ``state``. Restoring generates tasks without indices again, up to the
            stream's position.
        await_verification: whether each version, including the one served at the start, is
            provisional until ``Worker.mark_version`` is called for it. None: from the first call
            of ``mark_version`` on; a transport that verifies makes that call
            (``weights.transport_to(..., worker=)``).
        concurrency: adapts the number of rollouts in flight, within the staleness bound, to the
            load of the engine. The engine must have ``metrics()``, as ``VLLMEngine`` and
            ``TransformersEngine`` do. By default, only the staleness bound limits it.
        state: what ``Worker.state`` returned, to resume from there. It is refused if this worker
            would have made other groups or tasks (for example, with another ``group_size``).
        isolation: ``"process"``: run in a child process, so that environments never hold the
            trainer's interpreter lock; everything that crosses is pickled, lambdas and local
            functions included. ``"thread"``: run in this process, for notebooks and tests.
        threads: threads of numerical libraries in the worker's process.

    Raises:
        ValueError: there are no tasks, a number is out of range, a completion cannot fit the
            engine's context, the sampling parameters would not sample the distribution that is
            trained (``top_p``, ``top_k``, greedy), the schedule would stall, or an argument can't
            be sent to the worker's process.
    """
    if engine is None:
        return IdleWorker()
    _check_parts(engine, environment, params, keep, threads, start_timeout_s)
    check_schedule(
        publish_every=publish_every, max_staleness=max_staleness, groups_per_step=groups_per_step
    )
    plan = CollectionSettings(
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
            f"concurrency= needs the engine's load, but {type(engine).__name__} has no metrics(); "
            "pass an engine with metrics(), or leave concurrency out"
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
    pickle_arguments(params=params, tasks=tasks)  # so that errors name the caller's arguments
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
            f"engine is a {type(engine).__name__}; expected an engine with generate(), version "
            "and context_length"
        )
    if hasattr(engine, "chat"):
        raise ValueError(
            f"engine is a {type(engine).__name__}, which has no tokens to train on; expected an "
            "engine such as serving.VLLMEngine (for evaluation only, use rollout.evaluate_tasks)"
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


def _check(plan: CollectionSettings, engine: Engine, tasks: Any, isolation: str) -> None:
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
    limited = params.top_p < 1 or params.top_k != -1 or params.min_p > 0
    if params.temperature == 0 or limited:
        raise ValueError(
            f"temperature={params.temperature}, top_p={params.top_p}, top_k={params.top_k}, "
            f"min_p={params.min_p}: training needs temperature > 0 and the full distribution "
            "(top_p=1, top_k=-1, min_p=0); "
            "otherwise the trained logprobs are not those of the sampled distribution"
        )
    if hasattr(tasks, "__len__") and len(tasks) == 0:
        raise ValueError("there are no tasks; pass at least one mapping with a 'prompt'")


class Worker:
    """A running rollout worker, created by ``worker``.

    Call ``take`` and ``evaluate`` from the trainer's thread; they block, with a deadline.
    """

    def __init__(
        self, engine: Engine, host: "InThread | InProcess", plan: CollectionSettings
    ) -> None:
        self._engine = engine
        self._host = host
        self._plan = plan
        self._loop: BackgroundLoop | None = None
        self._last_stats: dict[str, Any] | None = None
        self._taking = threading.Lock()
        self._deliveries = itertools.count(1)
        self._known_evaluations: UncollectedEvaluations | None = None

    def __enter__(self) -> "Worker":
        if self._loop is not None:
            raise RuntimeError(
                "this worker was entered before; create another worker, and resume it with "
                "rollout.worker(..., state=) from what state() returned"
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
            if self._known_evaluations is not None:
                self._known_evaluations.log_cancelled()
            self._last_stats = self._stop()
        if kind is KeyboardInterrupt and self._host.interrupted:
            raise RuntimeError(self._host.cause_of_death) from None  # nobody pressed Ctrl-C

    def take(self, version: PolicyVersion) -> list[Group]:
        """Return the groups of one policy step, oldest first; block until they are ready.

        Groups count as trained when this returns. If it raises, for whatever reason, they stay
        buffered and the next ``take`` returns them.

        Args:
            version: the version of the weights that the batch will be applied to. No token to be
                trained is older than version ``version - max_staleness``.

        Raises:
            RuntimeError: at once if no rollout could be used: the engine serves weights that are
                too old (nothing was published) or newer than ``version``, or more steps were
                taken than versions published. Also if rollouts keep failing; the reward function
                failed; filters refused ``max_refused`` groups in a row; no group that the step can
                use came for ``timeout_s`` (none finished, the filters refused them, or they were
                too old or too new); the worker died; or its event loop is blocked.
        """
        version = operator.index(version)  # a numpy integer could not be stored in a state
        with self._taking:
            delivery = next(self._deliveries)
            try:
                groups: list[Group] = self._wait("take", version, delivery)
            except BaseException:  # the groups may already be on their way
                self._notify("give_back", delivery)
                raise
            self._notify("deliver", delivery)
            return groups

    def ready(self, version: PolicyVersion) -> bool:
        """Return whether ``take(version)`` would return groups without waiting for rollouts."""
        found: bool = self._wait("ready", operator.index(version))
        return found

    def mark_version(self, version: PolicyVersion, *, verified: bool) -> None:
        """Report whether the engines were verified to serve the weights of ``version``.

        Until this is called, no ``take`` returns a group with a token that ``version`` sampled,
        trained or not. If the version is rejected, its finished groups are dropped as
        ``"unverified"`` and its groups in flight are cancelled. No group is started until the
        version, published again and repaired, or a later version is verified. A verified version
        may be rejected later.

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
        """Play each task once, while training rollouts continue, and return the rollouts in order.

        One version of the weights samples all rollouts. The trainer waits here, so nothing is
        published meanwhile; ``start_evaluation`` does not wait.

        Raises:
            RuntimeError: it took longer than ``timeout_s``, or weights were published meanwhile.
            Exception: the error of an environment whose retries are used up.
        """
        started = self.start_evaluation(tasks, params, engine=engine, one_version=True)
        return started.result(timeout_s)

    def start_evaluation(
        self,
        tasks: Iterable[Task],
        params: SamplingParams,
        *,
        version: PolicyVersion | None = None,
        samples: int = 1,
        keep_errors: bool = False,
        one_version: bool = False,
        engine: Engine | None = None,
    ) -> "Evaluation":
        """Begin an evaluation in the background; ``result`` or ``outcomes`` waits for it.

        Weights may be published meanwhile. A rollout then continues with the new ones, so later
        tokens may have later versions than the first ones. A rollout may take ``group_timeout_s``.

        Args:
            tasks: the tasks to play.
            params: sampling parameters, for example greedy.
            version: begin when the engine serves this version or a later one; by default, at once.
            samples: rollouts per task.
            keep_errors: an environment's error ends only its own rollout, not the evaluation.
            one_version: it is an error if weights are published meanwhile.
            engine: a second engine. If the recipe publishes to it only before evaluations, one
                version samples all rollouts.
        """
        other = None if engine is self._engine else engine
        played = [dict(task) for task in tasks]
        if samples < 1:
            raise ValueError(f"samples is {samples}, expected at least 1 rollout per task")
        options = EvaluationOptions(
            samples=samples,
            keep_errors=keep_errors,
            one_version=one_version,
            version=None if version is None else operator.index(version),
        )
        future = self._call("evaluate", played, params, other, options)
        return self._evaluations.add(Evaluation(self, future, version=options.version))

    def evaluation_due(self, step: int, *, every: int) -> bool:
        """Return whether the recipe should start an evaluation before ``step``.

        It should before every ``every``-th step; if ``every`` is 0, never. While two evaluations
        run, another one waits until one of them has ended, and then evaluates the version of that
        time, which a warning says. If the worker was resumed from a state in whose run an
        evaluation had not ended, one is due before the first step.
        """
        return self._evaluations.due(step, every)

    def ended_evaluations(self, timeout_s: float = 0.0) -> list["Evaluation"]:
        """Return the evaluations that have ended, in the order of their start, each of them once.

        Evaluations are left out if their ``result`` or ``outcomes`` was called before.

        Args:
            timeout_s: how long to wait for all evaluations. One that has not ended by then is
                cancelled and dropped, which a warning says.
        """
        return self._evaluations.take_ended(timeout_s)

    def stats(self) -> dict[str, Any]:
        """Return totals since the start of the run, including earlier parts of a resumed run.

        Groups: ``started == trained + dropped + in_flight + buffered``; ``dropped_by`` has the
        count for each reason. Tokens: ``rollout_tokens`` were sampled for groups that finished;
        ``tokens_by`` has those of trained groups, and of dropped groups for each reason. Rollouts:
        ``retried``, and ``errors`` by the error's name. ``engine_errors``: requests that the engine
        failed. Tasks: ``quarantined``, and ``skipped``, how often a quarantined task was drawn.
        ``environments``: for each name, the number of groups, rollouts, tokens and failed groups,
        and the sum of rewards. ``awaiting_verification``: for each provisional version, the
        finished groups that wait for it.

        Engines with ``metrics()``, read every 5 s: ``engine`` has the totals of all servers
        together, the fields of ``serving.EngineUsage``. ``servers`` has the rates of each server in
        the last interval, and, under ``ranks``, those of its data-parallel ranks.

        Times in seconds: ``trainer_wait_s`` in ``take``; ``evaluation_wait_s`` waiting for
        evaluations; ``rollout_wait_s`` while the staleness bound let no group run;
        ``loop_lag_p99_s`` and ``loop_lag_max_s``, the lag of the worker's event loop: its 99th
        percentile over the last two minutes, and its maximum since the worker was started;
        ``suspended_s``, how long the worker's process could not run at all (SIGSTOP).
        """
        if self._last_stats is not None:
            return self._last_stats
        stats: dict[str, Any] = self._wait("stats")
        return stats

    def state(self) -> bytes:
        """Return the state from which another worker resumes: ``worker(..., state=)``.

        It holds the position in the tasks, the finished groups, the counts, the curriculum's
        estimates and the tasks in quarantine. Tasks in flight are played again, so none is skipped.
        If the results of an evaluation were not collected, the other worker will make one due
        (``evaluation_due``).

        Raises:
            ValueError: a task holds a value that can't be stored.
        """
        state: bytes = self._wait("state", bool(self._evaluations))
        return state

    def members(self) -> list[dict[str, Any]]:
        """Return the running processes: ``name``, ``pid`` and whether each is ``alive``."""
        return [*self._host.members(), *self._wait("members")]

    @property
    def _evaluations(self) -> UncollectedEvaluations:
        if self._known_evaluations is None:
            self._known_evaluations = UncollectedEvaluations(owed=self._wait("was_evaluating"))
        return self._known_evaluations

    def _call(self, name: str, *args: Any) -> "Future[Any]":
        if self._loop is None or not self._loop.alive:
            raise RuntimeError("the worker is not running; use `with rollout.worker(...) as ...`")
        return self._loop.submit(self._host.call(name, *args))

    def _notify(self, name: str, *args: Any) -> None:
        """Call a method without waiting for it; calls keep their order."""
        if self._loop is not None and self._loop.alive:
            self._loop.call_soon(self._host.notify, name, *args)

    def _wait(self, name: str, *args: Any) -> Any:
        return self._finish(self._call(name, *args), f"{name!r} was not answered", None)

    def _finish(self, future: "Future[Any]", what: str, timeout_s: float | None) -> Any:
        """Return the future's result; raise if the event loop that should set it is blocked."""
        deadline = math.inf if timeout_s is None else running_time() + timeout_s
        progress: Future[Any] | None = None
        release_threads()  # an engine in this process computes meanwhile
        try:
            while not wait([future], max(0.0, min(1.0, deadline - running_time()))).done:
                if reason := self._silence():
                    raise RuntimeError(f"{what}: {reason}")
                if self._loop is None or not self._loop.alive:
                    raise RuntimeError(f"{what}: the worker's event loop has ended")
                if running_time() > deadline:
                    raise TookTooLong(
                        f"{what} took longer than {timeout_s:.1f} s, and was cancelled"
                    )
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

    def _silence(self) -> str:
        """Return why the worker's event loop has been silent for too long; empty if it has not."""
        silent_s, stopped_s = self._host.silence()
        if stopped_s > max(self._plan.timeout_s, STOPPED_S):
            return (
                f"the worker's process has been stopped for {stopped_s:.0f} s, by SIGSTOP or a "
                "debugger; continue it with kill -CONT"
            )
        if silent_s > max(self._plan.timeout_s, BLOCKED_S):
            culprit = self._host.held_by or "an environment, a reward or a filter"
            return (
                f"the worker's event loop has been blocked for {silent_s:.0f} s; {culprit} does "
                "blocking work; run the environment with rollout.isolated, or use await instead of "
                "blocking"
            )
        return ""

    def _stop(self) -> dict[str, Any] | None:
        assert self._loop is not None
        patience_s = 1.0 if self._host.silence()[0] > BLOCKED_S else JOIN_S
        stopping = self._loop.submit(self._host.stop())
        try:
            if not wait([stopping], timeout=patience_s).done:
                log.error("the rollout worker did not stop within %.0f s", patience_s)
        finally:
            if not stopping.done():  # timed out, or interrupted
                self._host.kill()
            self._loop.end(patience_s)
        return stopping.result() if stopping.done() else None


class IdleWorker(Worker):
    """The worker on ranks other than 0: does nothing, so a training loop need not test its rank."""

    def __init__(self) -> None:
        self._loop = None

    def __enter__(self) -> "IdleWorker":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def take(self, version: PolicyVersion) -> list[Group]:  # noqa: ARG002
        """Return no groups; only rank 0 receives them."""
        return []

    def ready(self, version: PolicyVersion) -> bool:  # noqa: ARG002
        """Return False; only rank 0 has groups."""
        return False

    def mark_version(self, version: PolicyVersion, *, verified: bool) -> None:
        """Do nothing."""

    def start_evaluation(
        self,
        tasks: Iterable[Task],  # noqa: ARG002
        params: SamplingParams,  # noqa: ARG002
        **options: Any,  # noqa: ARG002
    ) -> "Evaluation":
        """Return an evaluation without rollouts."""
        done: Future[Any] = Future()
        done.set_result([])
        return Evaluation(self, done)

    def evaluation_due(self, step: int, *, every: int) -> bool:  # noqa: ARG002
        """Return False; only rank 0 evaluates."""
        return False

    def ended_evaluations(self, timeout_s: float = 0.0) -> list["Evaluation"]:  # noqa: ARG002
        """Return no evaluations."""
        return []

    def stats(self) -> dict[str, Any]:
        """Return no counts."""
        return {}

    def state(self) -> bytes | None:  # type: ignore[override]
        """Return None; only rank 0 saves a state."""
        return None

    def members(self) -> list[dict[str, Any]]:
        """Return no processes."""
        return []
