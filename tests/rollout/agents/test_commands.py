"""Command-line agents: programs that were given a base URL and a key."""

import asyncio
import contextlib
import os
import pickle
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import command_agents
import pytest
from chat_tokenizer import RecordingEngine, chat_tokenizer, trained

from primerl import rollout
from primerl.rollout import AgentLimits
from primerl.types import SamplingParams

TOKENIZER = chat_tokenizer()
PARAMS = SamplingParams(max_tokens=64)
TASK = {"id": "t", "prompt": "Write a file."}


def command(task, session):
    return [sys.executable, command_agents.__file__, task.get("kind", "shell")]


def prepare(task, folder):
    (folder / "task.txt").write_text(task["prompt"])


def wrote(task, run):
    return float((run.folder / "done").read_text() == "yes")


def play(environment, engine, *tasks):
    async def all_of_them():
        try:
            playing = [environment(task, engine, PARAMS) for task in tasks or [TASK]]
            return await asyncio.gather(*playing)
        finally:
            await environment.aclose()

    return asyncio.run(all_of_them())


def test_a_program_is_an_agent_and_its_folder_is_scored():
    def reply(prompt, number):
        return ["echo hello", "printf yes > done", "exit"][
            prompt.count("<|im_start|>assistant") - 1
        ]

    engine = RecordingEngine(TOKENIZER, reply)
    environment = rollout.command_agent(
        command, TOKENIZER, reward=wrote, prepare=prepare, keep_conversation=True
    )

    played = play(pickle.loads(pickle.dumps(environment)), engine, *[TASK] * 3)

    assert [one.reward for one in played] == [1.0] * 3
    assert [len(one.samples) for one in played] == [1] * 3
    assert trained([sample for one in played for sample in one.samples]) == engine.sampled
    said = [message["content"] for message in played[0].conversation["messages"]]
    assert said == ["Write a file.", "echo hello", "hello\n", "printf yes > done", "", "exit"]
    assert played[0].stop == "stop"


def outcome(kind, **limits):
    engine = RecordingEngine(TOKENIZER, lambda *_: "Hello.")
    runs = []

    def reward(task, run):
        runs.append(run)
        return 0.0

    environment = rollout.command_agent(
        command, TOKENIZER, reward=reward, limits=AgentLimits(**limits)
    )
    (played,) = play(environment, engine, {"id": "t", "prompt": "", "kind": kind})
    assert trained(played.samples) == engine.sampled
    return played, runs[0]


def test_programs_that_misbehave_are_outcomes_with_a_reason():
    played, run = outcome("crash")
    assert (played.stop, run.exit_code, len(played.samples)) == ("exit_code_3", 3, 1)

    played, run = outcome("endless", max_turns=3, timeout_s=4.0)
    assert (played.stop, run.exit_code) == ("timeout", None)
    assert played.metrics["turns"] == 3
    assert played.metrics["requests_limited"] > 1

    played, run = outcome("loud", max_output=1000)
    assert "99,999,000 bytes left out" in run.output
    assert len(run.output) < 1100
    assert "\ufffd" in run.output


def processes_in(folder):
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and _runs_in(pid, folder)]


def test_what_a_program_leaves_behind_is_ended_and_removed():
    _, run = outcome("orphan")

    assert not run.folder.exists()
    assert processes_in(run.folder) == []


def test_what_a_program_moves_to_another_session_is_ended_before_the_reward():
    left = []

    def reward(task, run):
        left.append(processes_in(run.folder))
        return float((run.folder / "started").exists())

    script = "setsid sh -c 'touch started; sleep 600' & until [ -e started ]; do :; done"
    environment = rollout.command_agent(
        lambda task, session: ["sh", "-c", script], TOKENIZER, reward=reward
    )
    (played,) = play(environment, RecordingEngine(TOKENIZER))

    assert played.reward == 1.0
    assert left == [[]]


@pytest.mark.parametrize("program", ["no-such-agent", "./no-such-agent"])
def test_a_program_that_is_not_there_is_an_error_and_no_outcome(program):
    environment = rollout.command_agent(
        lambda task, session: [program], TOKENIZER, reward=lambda task, run: 0.0
    )
    with pytest.raises(FileNotFoundError, match="no-such-agent"):
        play(environment, RecordingEngine(TOKENIZER))


def _runs_in(pid, folder):
    with contextlib.suppress(OSError):
        return str(folder) in os.readlink(f"/proc/{pid}/cwd")
    return False


def test_a_program_can_run_in_a_borrowed_runtime():
    ran = []

    class Box:
        async def run(self, argv, env):
            ran.append((argv, env))
            return SimpleNamespace(exit_code=0, stdout="done", stderr="")

    @contextlib.asynccontextmanager
    async def box(task):
        yield Box()
        ran.append("closed")

    environment = rollout.command_agent(
        lambda task, session: ["agent", task["id"]],
        TOKENIZER,
        reward=lambda task, run: float(run.output == "done" and ran[-1] != "closed"),
        runtime=box,
        variables={"MODE": "fast"},
    )
    (played,) = play(environment, RecordingEngine(TOKENIZER))

    (argv, env), closed = ran
    assert argv == ["agent", "t"]
    assert env["MODE"] == "fast"
    assert env["OPENAI_API_KEY"] == env["ANTHROPIC_API_KEY"]
    assert env["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
    assert (played.reward, played.samples, closed) == (1.0, (), "closed")


def test_a_rollout_that_is_cancelled_ends_its_program():
    engine = RecordingEngine(TOKENIZER, lambda *_: "sleep 600")
    environment = rollout.command_agent(command, TOKENIZER, reward=wrote, prepare=prepare)

    async def cancel():
        playing = asyncio.create_task(environment(TASK, engine, PARAMS))
        deadline = time.monotonic() + 60
        while not engine.requests:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await environment.aclose()

    before = set(Path("/tmp").glob("primerl-agent-*"))
    asyncio.run(cancel())
    assert set(Path("/tmp").glob("primerl-agent-*")) <= before


THINKS = (
    "import json, os, urllib.request\n"
    "messages = [{'role': 'user', 'content': 'Hi'}]\n"
    "for _ in range(2):\n"
    "    request = urllib.request.Request(\n"
    "        os.environ['OPENAI_BASE_URL'] + '/chat/completions',\n"
    "        data=json.dumps({'messages': messages}).encode(),\n"
    "        headers={'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']},\n"
    "    )\n"
    "    said = json.load(urllib.request.urlopen(request))['choices'][0]['message']\n"
    "    messages += [{'role': 'assistant', 'content': said['content']}]\n"
    "    messages += [{'role': 'user', 'content': 'More'}]\n"
    "open(os.path.join(os.environ['HOME'], 'settings'), 'w').write('x')\n"
    "print(os.environ['HOME'])\n"
)


@pytest.mark.parametrize(("keep", "samples"), [(True, 1), (False, 2)])
def test_a_program_has_a_home_of_its_own_and_its_reasoning_is_kept_if_told_so(keep, samples):
    runs = []

    def reward(task, run):
        runs.append(run)
        return 0.0

    environment = rollout.command_agent(
        lambda task, session: [sys.executable, "-c", THINKS],
        TOKENIZER,
        reward=reward,
        keep_reasoning=keep,
    )
    engine = RecordingEngine(TOKENIZER, lambda *_: "<think>\nHm.\n</think>\nHello.")
    (played,) = play(environment, engine)
    assert len(played.samples) == samples
    assert trained(played.samples) == engine.sampled
    home = Path(runs[0].output.strip())
    assert home != Path.home()
    assert home.parent == runs[0].folder.parent
    assert not home.exists()  # it is removed with the folder
