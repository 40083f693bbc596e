"""Environments that change shared state, hide processes and read secrets."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

KEY = "the-key-of-the-servers"
ENDS_S = 20.0
FILES = ("environ", "cmdline")

# What an environment may do to its process, and to the trainer's user, before it blocks.
SCRIPT = """
import asyncio, os, signal, subprocess, sys, time
from pathlib import Path
import primerl.rollout.processes.hosts
from primerl import rollout, testing
from primerl.types import SamplingParams

FOLDER, ISOLATION, WHAT = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
rollout.processes.hosts.BLOCKED_S = 1.0

def hide(kind):
    '''A process that leaves the session, and its parent.'''
    if os.fork() == 0:
        if kind != "a child of a dead parent":
            os.setsid()
        if kind == "in a session of its own" or os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            (FOLDER / f"pid-{os.getpid()}").touch()
            time.sleep(600)
        os._exit(0)

async def environment(task, engine, params):
    if not list(FOLDER.glob("pid-*")):
        for kind in ("a child of a dead parent", "in a session of its own", "a daemon"):
            hide(kind)
        while len(list(FOLDER.glob("pid-*"))) < 3:
            time.sleep(0.01)
    if WHAT != "hides":
        home = FOLDER / "home"
        os.chdir(home)
        for number in range(1, signal.NSIG):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        os.umask(0o777)
        os.environ.clear()
        os.environ.update(TMPDIR=str(home), HOME=str(home), TMP=str(home), TEMP=str(home))
        if task["id"] == "1":
            os.environ.clear()
    if WHAT == "blocks":
        (FOLDER / "blocked").touch()
        time.sleep(600)
    return await rollout.single_turn(
        testing.character_tokenizer("ab"), reward=lambda task, reply: 1.0
    )(task, engine, params)

played = rollout.isolated(environment, processes=1) if "isolated" in ISOLATION else environment
with rollout.worker(
    testing.ScriptedEngine([[0, 1]]), played, [{"id": str(n), "prompt": "a"} for n in range(2)],
    params=SamplingParams(max_tokens=2), group_size=2, groups_per_step=2, max_staleness=0,
    isolation="thread" if "thread" in ISOLATION else "process",
) as rollouts:
    if WHAT != "blocks":
        rollouts.take(version=0)
    if WHAT == "blocks":
        while not (FOLDER / "blocked").exists():
            time.sleep(0.01)
        time.sleep(1.2)  # until the event loop counts as blocked
    print(*[one["pid"] for one in rollouts._host.members()], flush=True)
    sys.stdin.readline()
"""


def gone(pids):
    deadline = time.monotonic() + ENDS_S
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def run(tmp_path):
    """Starts the script; returns the trainer's handle, the worker's id, and all others' ids."""
    (tmp_path / "home" / "papers").mkdir(parents=True)
    (tmp_path / "home" / "papers" / "thesis.tex").write_text("years of work")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    known = []

    def start(isolation, what="blocks"):
        trainer = subprocess.Popen(
            [sys.executable, tmp_path / "script.py", tmp_path, isolation, what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PRIMERL_API_KEY": KEY},
        )
        known.append(trainer.pid)
        line = trainer.stdout.readline()
        assert line, trainer.stderr.read()
        hidden = [int(path.name[4:]) for path in tmp_path.glob("pid-*")]
        family = [one.pid for one in psutil.Process(trainer.pid).children(recursive=True)]
        known.extend([*family, *hidden])
        assert len(hidden) == 3
        return trainer, [int(word) for word in line.split()], sorted({*family, *hidden})

    yield start
    for pid in filter(alive, known):
        os.kill(pid, signal.SIGKILL)
    # However the run ended: no file of the user is gone, and none of ours is left.
    assert (tmp_path / "home" / "papers" / "thesis.tex").read_text() == "years of work"
    assert os.listdir(tmp_path / "home") == ["papers"]
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.thorough
@pytest.mark.parametrize("isolation", ["plain", "isolated", "thread and isolated"])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_trainer_that_is_killed_leaves_nothing_and_loses_nothing_of_the_users(
    run, isolation, how
):
    trainer, _, pids = run(isolation)

    trainer.send_signal(how)
    trainer.communicate(timeout=60)

    gone(pids)


@pytest.mark.thorough
@pytest.mark.parametrize("isolation", ["plain", "isolated"])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_that_is_killed_leaves_nothing_and_loses_nothing_of_the_users(run, isolation, how):
    trainer, (worker,), pids = run(isolation)

    os.kill(worker, how)
    if isolation == "plain" and how == signal.SIGTERM:
        time.sleep(0.5)
        assert alive(worker), "the environment ignores it"
        os.kill(worker, signal.SIGKILL)
    trainer.communicate(timeout=60)

    gone(pids)


@pytest.mark.thorough
@pytest.mark.parametrize("isolation", ["plain", "isolated", "thread and isolated"])
@pytest.mark.parametrize("what", ["hides", "changes", "blocks"])
def test_a_clean_close_leaves_nothing_in_whatever_session(run, isolation, what):
    trainer, _, pids = run(isolation, what)

    _, errors = trainer.communicate("\n", timeout=60)

    assert trainer.returncode == 0, errors
    gone(pids)


def test_in_thread_isolation_nothing_of_the_users_is_lost(run):
    trainer, _, pids = run("thread", "changes")

    trainer.stdin.write("\n")
    trainer.stdin.flush()
    assert trainer.wait(60) == 0
    for pid in pids:
        os.kill(pid, signal.SIGKILL)  # they are the trainer's, which nothing supervises
    trainer.communicate(timeout=60)


@pytest.mark.thorough
@pytest.mark.parametrize("isolation", ["plain", "isolated"])
def test_no_process_below_the_trainer_is_given_the_servers_key(run, isolation):
    trainer, _, pids = run(isolation, "hides")

    shown = [Path(f"/proc/{pid}/{file}") for pid in filter(alive, pids) for file in FILES]
    assert len(shown) >= len(FILES) * 6  # two supervisors, the worker, three that hide
    assert not [path for path in shown if KEY in path.read_text()]
    assert KEY in Path(f"/proc/{trainer.pid}/environ").read_text(encoding="utf-8")
    _, errors = trainer.communicate("\n", timeout=60)
    assert KEY not in errors
