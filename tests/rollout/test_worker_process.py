"""The worker in a process of its own: pickled arguments, deaths, and clean-up."""

import asyncio
import contextlib
import functools
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import attrs
import numpy as np
import psutil
import pytest
from conftest import CharacterCodes, FakeEngine
from recording_store import RecordingStore
from waiting import until

from primerl import evaluation as evaluation_package
from primerl import filters, rollout, testing
from primerl.rollout.errors import EnvironmentFailed
from primerl.rollout.processes import channel
from primerl.types import SamplingParams

PARAMS = SamplingParams(max_tokens=3)
TASKS = [{"id": str(n), "prompt": f"task {n}"} for n in range(5)]
ENDS_S = 30.0  # seconds; a few on an idle machine


def make_worker(engine=None, environment=None, tasks=TASKS, **change):
    settings = {
        "params": PARAMS,
        "group_size": 2,
        "groups_per_step": 3,
        "max_staleness": 1,
        "timeout_s": 30.0,
    } | change
    environment = environment or rollout.single_turn(
        CharacterCodes(), reward=lambda task, reply: len(set(reply))
    )
    return rollout.worker(engine or FakeEngine(), environment, tasks, **settings)


def balanced(stats):
    ended = stats["trained"] + stats["dropped"] + stats["buffered"]
    return stats["started"] == ended + stats["in_flight"]


def gone(pids, *, within_s=ENDS_S):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_groups_arrive_within_the_bound_while_weights_change():
    engine = testing.ScriptedEngine(latency=0.005)
    parent = os.getpid()

    async def environment(task, engine_, params):
        assert os.getpid() != parent
        return await rollout.single_turn(CharacterCodes(), reward=lambda t, r: 1.0)(
            task, engine_, params
        )

    with make_worker(engine, environment, max_staleness=2) as rollouts:
        for step in range(20):
            groups = rollouts.take(version=step)
            stale = np.concatenate([step - group.versions for group in groups])

            assert len(groups) == 3
            assert 0 <= stale.min()
            assert stale.max() <= 2
            engine.update_weights({}, version=step + 1)
        (member,) = rollouts.members()
        stats = rollouts.stats()

    assert stats["trained"] == 60
    assert stats["loop_lag_max_s"] >= 0
    assert member["pid"] != parent
    assert gone([member["pid"]])


def test_publishing_and_taking_at_once_never_sees_an_old_version():
    """The worker knows the served version when take() asks, not a poll later."""
    engine = FakeEngine(delay_s=0)
    with make_worker(engine, max_staleness=0) as rollouts:
        for step in range(30):
            assert all((g.versions == step).all() for g in rollouts.take(version=step))
            engine.version = step + 1


class Interrupted(Exception):
    pass


@contextlib.contextmanager
def interrupted(after_s):
    """Raise ``Interrupted`` in the body after a time, if it then waits for the worker."""

    def interrupt(_signal, frame):
        # Elsewhere Python itself may lose a lock, a coroutine or the exception.
        blocked = frame.f_code.co_qualname == "Condition.wait"
        while frame is not None and blocked:
            if frame.f_code.co_qualname == "Worker._wait":
                raise Interrupted
            frame = frame.f_back
        if inside:
            signal.setitimer(signal.ITIMER_REAL, 0.0001)

    inside = True
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_take_that_is_interrupted_at_any_moment_loses_no_group(isolation):
    """While rollouts run, while the step is sent in hundreds of small frames, and after."""
    draw = random.Random(0)

    async def environment(task, engine, params):
        if isolation == "process":
            channel.FRAME_BYTES = 1000  # the worker's own
        result = await rollout.single_turn(CharacterCodes(), reward=lambda t, r: 1.0)(
            task, engine, params
        )
        (sample,) = result.samples
        length = np.zeros(5_000, np.int32)  # padding, so that sending takes a while
        padded = attrs.evolve(
            sample,
            token_ids=np.concatenate([sample.token_ids, length]),
            loss_mask=np.concatenate([sample.loss_mask, length != 0]),
            behavior_logprobs=np.concatenate([sample.behavior_logprobs, length]),
            versions=np.concatenate([sample.versions, length - 1]),
        )
        return attrs.evolve(result, samples=[padded])

    tasks = [{"id": str(n), "prompt": "a"} for n in range(500)]
    plan = {"on_stale": "wait", "group_size": 1, "isolation": isolation}
    engine = testing.ScriptedEngine(latency=0.002)
    trained, interruptions, seconds = [], 0, 0.05
    with make_worker(engine, environment, tasks, **plan) as rollouts:
        for step in range(8):
            groups = None
            while groups is None:
                began = time.monotonic()
                try:
                    with interrupted(0.0002 + seconds * draw.random()):
                        groups = rollouts.take(version=step)
                    seconds = time.monotonic() - began  # of one that was not interrupted
                except Interrupted:
                    interruptions += 1
                    stats = rollouts.stats()
                    assert stats["trained"] == len(trained)
                    assert balanced(stats)
                    if interruptions % 10 == 0:  # one that may end
                        groups = rollouts.take(version=step)
            trained += groups
            engine.update_weights({}, version=step + 1)
            stats = rollouts.stats()
            assert stats["trained"] == len(trained) == 3 * (step + 1)
            assert balanced(stats)

    assert interruptions > 2
    assert stats["dropped"] == 0
    assert len({group.task_id for group in trained}) == 24
    assert max(int(group.task_id) for group in trained) < 24 + 6


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_worker_is_entered_once(isolation):
    """A second time would start a process that nobody ends."""
    rollouts = make_worker(isolation=isolation)
    with rollouts:
        members = rollouts.members()
        with pytest.raises(RuntimeError, match="entered before"):
            rollouts.__enter__()
        assert rollouts.members() == members
    with pytest.raises(RuntimeError, match="entered before"):
        rollouts.__enter__()
    assert gone([one["pid"] for one in members])


def test_lambdas_and_local_classes_are_pickled():
    class Threshold:
        __name__ = "threshold"

        def __call__(self, group):
            return group.rewards.max() > 1.5

    base = rollout.single_turn(CharacterCodes(), reward=lambda task, reply: len(reply) % 3)
    local = []

    async def environment(task, engine, params):
        local.append(task["id"])  # the worker's copy
        return await base(task, engine, params)

    lengths = testing.ScriptedEngine([[50], [51, 52]])
    params = SamplingParams(max_tokens=3, stop_token_ids=[1])
    keep = [filters.has_signal, lambda group: len(group.rollouts) == 2, Threshold()]
    with make_worker(lengths, environment, params=params, keep=keep) as rollouts:
        groups = rollouts.take(version=0)

    assert all(group.rewards.max() > 1.5 for group in groups)
    assert local == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"tasks": (row for row in TASKS)}, "tasks"),
        ({"keep": [functools.partial(isinstance, threading.Lock())]}, "keep"),
    ],
)
def test_an_argument_that_cannot_be_pickled_is_named_before_anything_starts(change, name):
    with pytest.raises(ValueError, match=f"the argument '{name}' .*can't be sent.*isolation='thr"):
        make_worker(**change)


def test_an_environment_that_cannot_be_pickled_is_named():
    lock = threading.Lock()

    async def environment(task, engine, params):
        lock.acquire()

    with pytest.raises(ValueError, match="the argument 'environment' .*can't be sent"):
        make_worker(environment=environment)


class Generated:
    """Tasks without indices, of which each takes its time."""

    def __init__(self, seconds_each):
        self.seconds_each = seconds_each

    def __iter__(self):
        for number in itertools.count():
            time.sleep(self.seconds_each)
            yield {"id": str(number), "prompt": "task"}


def test_restoring_a_state_has_a_deadline_of_its_own():
    with make_worker(tasks=Generated(0.0)) as rollouts:
        rollouts.take(version=0)
        state = rollouts.state()

    slow = Generated(0.2)
    with pytest.raises(RuntimeError, match=r"making its environment, tasks.* raise start_timeout"):
        with make_worker(tasks=slow, state=state, start_timeout_s=0.4):
            pass
    with make_worker(tasks=slow, state=state) as resumed:
        assert len(resumed.take(version=0)) == 3


def test_an_argument_that_cannot_be_rebuilt_is_named():
    class Breaks:
        def __reduce__(self):
            return int, ("not a number",)

        def __call__(self, group):
            return True

    with pytest.raises(ValueError, match="'keep' can't be rebuilt in the worker's process"):
        with make_worker(keep=[Breaks()]):
            pass


def test_publishing_and_evaluating_at_once_is_of_the_published_version():
    engine = testing.ScriptedEngine()
    greedy = SamplingParams(max_tokens=3, temperature=0)
    with make_worker(engine) as rollouts:
        for step in range(5):
            rollouts.take(version=step)
            engine.update_weights({}, version=step + 1)
            (one, *_) = rollouts.evaluate(TASKS, greedy)
            assert (one.samples[0].versions[one.samples[0].loss_mask] == step + 1).all()


def test_the_death_of_a_worker_whose_fork_lives_on_is_noticed():
    async def forks(task, engine, params):
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,)).start()
        os.kill(os.getpid(), signal.SIGKILL)

    began = time.monotonic()
    with make_worker(environment=forks) as rollouts:
        with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
            rollouts.take(version=0)
    assert time.monotonic() - began < 100  # not when the fork ends


def test_errors_arrive_with_their_cause_and_the_workers_traceback():
    class NoSandbox(ConnectionError):
        def __init__(self, host, port):  # an exception that does not survive pickling
            super().__init__(f"no sandbox at {host}:{port}")

    async def finds_no_sandbox(task, engine, params):
        raise NoSandbox("localhost", 1)

    async def dead(task, engine, params):
        raise ConnectionError("no sandbox")

    with make_worker(environment=dead) as rollouts:
        with pytest.raises(RuntimeError, match="no sandbox") as caught:
            rollouts.take(version=0)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert "in dead" in "".join(caught.value.__cause__.__notes__)

    with make_worker(environment=finds_no_sandbox) as rollouts:
        with pytest.raises(RuntimeError, match="no sandbox at localhost:1"):
            rollouts.take(version=0)


def test_what_the_engine_raises_reaches_the_environment():
    async def environment(task, engine, params):
        try:
            await engine.generate([2] * 2000, params)
        except ValueError as error:
            raise RuntimeError(f"told: {error}") from None

    with make_worker(testing.ScriptedEngine(context_length=100), environment) as rollouts:
        with pytest.raises(RuntimeError, match="told: .*100"):
            rollouts.take(version=0)


def test_killing_the_worker_is_noticed_at_once_and_named():
    engine = testing.ScriptedEngine(latency=0.01)
    with make_worker(engine) as rollouts:
        rollouts.take(version=0)
        (member,) = rollouts.members()
        os.kill(member["pid"], signal.SIGKILL)
        began = time.monotonic()

        def train():
            for step in range(1, 1000):
                rollouts.take(version=step)
                engine.update_weights({}, version=step)

        with pytest.raises(RuntimeError, match=rf"the rollout worker \(process {member['pid']}\) "):
            train()

    assert time.monotonic() - began < ENDS_S
    assert gone([member["pid"]])


def test_killing_the_worker_wakes_a_waiting_trainer_and_ends_its_subprocesses(tmp_path):
    async def hangs(task, engine, params):
        with open(tmp_path / "pids", "a", encoding="utf-8") as file:
            file.write(f"{(await asyncio.create_subprocess_exec('sleep', '3600')).pid}\n")
        await asyncio.sleep(3600)

    with make_worker(environment=hangs) as rollouts:
        (member,) = rollouts.members()
        while len(read_pids(tmp_path)) < 12:
            time.sleep(0.02)
        os.kill(member["pid"], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
            rollouts.take(version=0)

    assert gone(read_pids(tmp_path))


def read_pids(folder):
    file = folder / "pids"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def test_a_blocked_event_loop_is_an_error_that_names_the_cause(monkeypatch):
    for module in ("workers", "processes.hosts"):
        monkeypatch.setattr(f"primerl.rollout.{module}.BLOCKED_S", 1.0)

    async def blocks(task, engine, params):
        time.sleep(3600)

    with make_worker(environment=blocks, timeout_s=3.0) as rollouts:
        with pytest.raises(RuntimeError, match="event loop has been blocked for .* rollout.isol"):
            rollouts.take(version=0)
        (member,) = rollouts._host.members()

    assert gone([member["pid"]])


def test_a_stopped_worker_is_named_and_goes_on(monkeypatch, caplog):
    """Before, the environment was blamed and the run ended; time limits were over at once."""
    for module in ("workers", "processes.hosts"):
        monkeypatch.setattr(f"primerl.rollout.{module}.BLOCKED_S", 1.0)

    async def waits(task, engine, params):
        async with asyncio.timeout(3.0):
            await asyncio.sleep(1.5)
        chat = rollout.Conversation(engine, CharacterCodes(), params)
        await chat.turn(task["prompt"])
        return chat.rollout(reward=1.0)

    settings = {"timeout_s": 3.0, "group_timeout_s": 4.0, "groups_per_step": 1, "retries": 0}
    with make_worker(environment=waits, **settings) as rollouts:
        (member,) = rollouts._host.members()
        until(lambda: rollouts.stats()["in_flight"])
        os.kill(member["pid"], signal.SIGSTOP)
        timer = threading.Timer(6.0, os.kill, (member["pid"], signal.SIGCONT))
        timer.start()
        (group,) = rollouts.take(version=0)
        stats = rollouts.stats()
    assert len(group.rollouts) == 2
    assert stats["errors"] == {}
    assert stats["dropped"] == 0
    assert 4.5 < stats["suspended_s"] < 7.5
    assert stats["loop_lag_max_s"] < 3.0
    assert f"(pid {member['pid']}) is stopped, by SIGSTOP" in caplog.text


def test_a_worker_that_stays_stopped_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr("primerl.rollout.workers.STOPPED_S", 1.0)

    async def waits(task, engine, params):
        await asyncio.sleep(3600)

    with make_worker(environment=waits, timeout_s=1.0) as rollouts:
        (member,) = rollouts._host.members()
        until(lambda: rollouts.stats()["in_flight"])
        os.kill(member["pid"], signal.SIGSTOP)
        with pytest.raises(RuntimeError, match=r"has been stopped for .* s, by SIGSTOP"):
            rollouts.take(version=0)
    assert gone([member["pid"]])


def test_a_busy_event_loop_is_not_taken_for_a_blocked_one():
    """On a loaded computer a loop is late by more than a short deadline."""

    async def late(task, engine, params):
        time.sleep(1.5)
        await asyncio.sleep(3600)

    with make_worker(environment=late, timeout_s=0.2, groups_per_step=1, group_size=1) as rollouts:
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            in_flight = rollouts.stats()["in_flight"]

    assert in_flight > 0


def test_torchruns_variables_are_stripped_and_threads_are_budgeted(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    names = ("RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

    async def environment(task, engine, params):
        seen = {name: float(os.environ.get(name, -1)) for name in names}
        one = await rollout.single_turn(CharacterCodes(), reward=lambda t, r: 1.0)(
            task, engine, params
        )
        return type(one)(samples=one.samples, reward=1.0, metrics=seen)

    with make_worker(environment=environment, threads=3) as rollouts:
        metrics = rollouts.take(version=0)[0].rollouts[0].metrics

    assert [metrics[name] for name in names] == [-1, -1, -1, 3, 3]


def test_the_worker_loads_no_torch():
    async def environment(task, engine, params):
        one = await rollout.single_turn(CharacterCodes(), reward=lambda t, r: 1.0)(
            task, engine, params
        )
        return type(one)(samples=one.samples, reward=float("torch" in sys.modules))

    with make_worker(environment=environment) as rollouts:
        assert rollouts.take(version=0)[0].rewards.tolist() == [0.0, 0.0]


def test_collecting_resumes_from_a_state():
    engine = testing.ScriptedEngine(latency=0.002)
    with make_worker(engine) as rollouts:
        for step in range(3):
            rollouts.take(version=step)
            engine.update_weights({}, version=step + 1)
        state = rollouts.state()
    with make_worker(engine, state=state) as rollouts:
        rollouts.take(version=3)
        stats = rollouts.stats()

    assert stats["trained"] == 12
    assert stats["started"] == stats["trained"] + stats["dropped"] + (
        stats["in_flight"] + stats["buffered"]
    )


def test_an_evaluation_of_several_plays_keeps_what_failed_and_goes_on():
    async def environment(task, engine, params):
        if task["id"] == "1" and params.temperature == 0:
            raise EnvironmentFailed("faulty/1: it fell over", name="FellOver")
        return await one_turn(task, engine, params)

    greedy = SamplingParams(max_tokens=3, temperature=0)
    one_turn = rollout.single_turn(CharacterCodes(), reward=lambda task, reply: 1.0)
    tasks = [{"id": str(number), "prompt": "ab"} for number in range(3)]
    with make_worker(environment=environment) as rollouts:
        evaluation = rollouts.start_evaluation(tasks, greedy, samples=2, keep_errors=True)
        plays = evaluation.outcomes()
        with pytest.raises(EnvironmentFailed, match="it fell over") as failed:
            rollouts.start_evaluation(tasks, greedy).result()
        with pytest.raises(ValueError, match="samples is 0"):
            rollouts.start_evaluation(tasks, greedy, samples=0)

    assert [(one.task["id"], one.index) for one in plays] == [
        (str(number), index) for number in range(3) for index in range(2)
    ]
    assert [one.error for one in plays] == [None, None, "FellOver", "FellOver", None, None]
    assert "it fell over" in plays[2].message
    assert len(evaluation.result()) == 4
    assert failed.value.name == "FellOver"
    scores = evaluation_package.scores(map(evaluation_package.Record.of, plays))[""]
    assert (scores.rollouts, scores.errors) == (6, {"FellOver": 2})
    assert scores.reward.mean == pytest.approx(2 / 3)


def test_an_evaluation_with_an_engine_of_its_own_runs_beside_training():
    training, pinned = testing.ScriptedEngine(), testing.ScriptedEngine(latency=0.05)
    pinned.update_weights({}, version=7)
    greedy = SamplingParams(max_tokens=3, temperature=0)
    with make_worker(training) as rollouts:
        evaluation = rollouts.start_evaluation(TASKS, greedy, engine=pinned)
        for step in range(3):
            rollouts.take(version=step)
            training.update_weights({}, version=step + 1)
        results = evaluation.result()
        for _ in range(2):
            assert len(rollouts.evaluate(TASKS, greedy)) == 5

    assert len(results) == 5
    for one in results:
        assert (one.samples[0].versions[one.samples[0].loss_mask] == 7).all()


class PortableEngine(FakeEngine):
    """Stands for a client of a server elsewhere."""

    portable = True


def test_a_portable_engine_is_copied():
    engine = PortableEngine(delay_s=0)
    with make_worker(engine) as rollouts:
        rollouts.take(version=0)
        random_state = engine._random.getstate()
        rollouts.take(version=1)

    assert engine._random.getstate() == random_state  # it was not called here


class RecordsRoutes(FakeEngine):
    """Its completions have routes, but for every third."""

    def __init__(self, **options):
        super().__init__(delay_s=0, **options)
        self.routes = RecordingStore()
        self.portable = False
        self._count = itertools.count(1)

    async def generate(self, prompt_ids, params, *, session=None):
        completion = await super().generate(prompt_ids, params)
        count = next(self._count)
        return attrs.evolve(completion, routes=(f"fake:{count}",) if count % 3 else ())


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("isolated", [False, True])
def test_samples_without_the_routes_that_the_engine_records_are_bad(portable, isolated):
    engine = RecordsRoutes()
    engine.portable = portable
    environment = rollout.single_turn(CharacterCodes(), reward=lambda task, reply: 1.0)
    if isolated:
        environment = rollout.isolated(environment, processes=1)

    with make_worker(engine, environment, retries=3) as rollouts:
        groups = rollouts.take(version=0)
        until(lambda: rollouts.stats()["errors"])  # the group may still be in flight

    assert all(sample.routes for group in groups for sample in group.samples)
    assert set(rollouts.stats()["errors"]) == {"BadSample"}
    assert engine.routes.checked == []  # the copy in the worker's process was asked


def test_routes_are_checked_in_threads_and_only_of_what_is_trained():
    engine = RecordsRoutes()
    threads = []

    class Watches(RecordingStore):
        def check(self, sample):
            threads.append(threading.current_thread())
            super().check(sample)

    engine.routes = Watches()

    async def untrained(task, engine, params):
        played = await rollout.single_turn(CharacterCodes(), reward=lambda *_: 1.0)(
            task, engine, params
        )
        (sample,) = played.samples
        silent = np.zeros_like(sample.loss_mask)
        return attrs.evolve(played, samples=[sample, attrs.evolve(sample, loss_mask=silent)])

    with make_worker(engine, untrained, retries=3, isolation="thread") as rollouts:
        rollouts.take(version=0)

    assert all(sample.loss_mask.any() for sample in engine.routes.checked)
    assert engine.routes.checked
    assert threading.main_thread() not in threads
    assert not any("primerl" in thread.name for thread in threads), "not on an event loop"


SCRIPT = """
import asyncio, dataclasses, os, sys, time
sys.path.insert(0, {helpers!r})
from character_codes import CharacterCodes
from primerl import rollout, testing
from primerl.types import SamplingParams

async def heavy(task, engine, params):
    base = rollout.single_turn(CharacterCodes(), reward=lambda task, reply: 1.0)
    await asyncio.create_subprocess_exec("sleep", "3600")
    return await base(task, engine, params)

@dataclasses.dataclass
class Problem:
    text: str

engine = testing.ScriptedEngine(latency=0.05)
with rollout.worker(engine, rollout.isolated(heavy, processes=2), [{{"prompt": "a"}}],
                    params=SamplingParams(max_tokens=3), group_size=2, groups_per_step=2,
                    max_staleness=2) as rollouts:
    step = 0
    while True:
        rollouts.take(version=step)
        engine.update_weights({{}}, version=step + 1)
        step += 1
        held_out = [{{"prompt": "a", "problem": Problem("of a class of the script's own")}}]
        rollouts.evaluate(held_out, SamplingParams(max_tokens=3, temperature=0))
        print(*[one["pid"] for one in rollouts.members()], flush=True)
        {then}
"""


@pytest.fixture
def temporary(tmp_path):
    """Where a script and its child processes have their temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.fixture
def script(tmp_path, temporary):
    children = []

    def start(then):
        path = tmp_path / "recipe.py"
        path.write_text(
            SCRIPT.format(helpers=str(Path(__file__).parents[1] / "helpers"), then=then)
        )
        child = subprocess.Popen(
            [sys.executable, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            env=os.environ | {"TMPDIR": str(temporary)},
        )
        children.append(child)
        pids = []
        while len(pids) < 3:  # the worker and two environment processes
            line = child.stdout.readline()
            assert line, child.stderr.read()
            pids = [int(word) for word in line.split()]
        family = [one.pid for pid in pids for one in psutil.Process(pid).children(recursive=True)]
        return child, [*pids, *family]

    yield start
    for child in children:
        child.kill()
        child.wait()


EVALUATES = """rollouts.start_evaluation(
            held_out, SamplingParams(max_tokens=3), engine=testing.ScriptedEngine(latency=3600.0)
        )"""


@pytest.mark.thorough
@pytest.mark.parametrize("first", ["pass", EVALUATES], ids=["", "while it evaluates"])
def test_a_trainer_that_is_busy_elsewhere_learns_of_the_workers_death_too(script, first):
    child, pids = script(f"{first}; time.sleep(3600)")

    os.kill(pids[0], signal.SIGKILL)
    began = time.monotonic()
    _, errors = child.communicate(timeout=60)

    assert time.monotonic() - began < ENDS_S
    assert errors.splitlines()[-1].startswith(
        f"RuntimeError: the rollout worker (process {pids[0]}) was killed by SIGKILL"
    )
    assert gone(pids)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["ctrl-c", "exception", "kill the trainer", "kill the worker"])
def test_however_a_run_ends_nothing_is_left_behind(script, temporary, how):
    child, pids = script("sys.stdin.readline(); 1 / 0" if how == "exception" else "pass")
    assert len(pids) > 3, "the environment's subprocesses are counted too"
    if how == "ctrl-c":
        child.send_signal(signal.SIGINT)
    elif how == "kill the trainer":
        child.kill()
    elif how == "kill the worker":
        os.kill(pids[0], signal.SIGKILL)
    began = time.monotonic()
    _, errors = child.communicate(timeout=60)

    assert time.monotonic() - began < ENDS_S
    assert gone(pids)
    if how == "ctrl-c":
        assert "KeyboardInterrupt" in errors
    elif how == "exception":
        assert "ZeroDivisionError" in errors
    elif how == "kill the worker":
        assert f"the rollout worker (process {pids[0]}) was killed by SIGKILL" in errors
    assert list(temporary.iterdir()) == []
