"""The environment bugfix: its tasks, its expert, and agents that cheat."""

import asyncio
import collections
import json
import re

import pytest
import torch
from coding_cheats import CHEATS
from sandboxed import needed

pytest.importorskip("verifiers")
pytest.importorskip("bugfix", reason="pip install --no-deps -e recipes/environments/bugfix")
needed()

import verifiers.v1 as vf
from bugfix import corpus, generation, rehearsal, tasks
from bugfix.expert import Expert, as_text, calls, expert, without_calls
from bugfix.mutation import Mutation, mutations

from primerl import data, models, rollout, testing
from primerl.sandbox import SandboxPool, SandboxUnavailable
from primerl.types import Rollout, SamplingParams

PARAMS = SamplingParams(max_tokens=1)
ONCE = {"split": "all", "task": {"grading_timeout_s": 6.0}}


def play(played, **options):
    """Play pairs of a task and an engine in one environment; rollouts, or what they raised."""
    config = {
        "taskset": ONCE,
        "sandbox": {"memory_bytes": 256 << 20, "command_timeout_s": 15},
        **options,
    }
    environment = rollout.verifiers("bugfix", tokenizer=None, config=config, keep_conversation=True)

    async def run():
        gate = asyncio.Semaphore(4)

        async def one(task, engine):
            async with gate:
                return await environment(task, engine, PARAMS)

        try:
            pairs = played(list(environment.tasks))
            return await asyncio.gather(*(one(*pair) for pair in pairs), return_exceptions=True)
        finally:
            await environment.aclose()

    return asyncio.run(run())


def first_of_each(all_tasks, key):
    return list({key(task): task for task in reversed(all_tasks)}.values())[::-1]


def program_of(task):
    return task["data"]["program"]


@pytest.fixture(scope="module")
def all_tasks():
    return list(rollout.verifiers("bugfix", tokenizer=None, config={"taskset": ONCE}).tasks)


@pytest.fixture(scope="module")
def cheated():
    def pairs(all_tasks):
        task = next(task for task in all_tasks if program_of(task) == "absolute")
        number = int(re.search(r"absolute\((-?\d+)\)", task["prompt"])[1])
        shown = str({number: abs(number)})
        engines = [
            Expert([(name, _filled(arguments, shown)) for name, arguments in steps], last="Done.")
            for steps in CHEATS.values()
        ]
        return [(task, engine) for engine in [*engines, expert(task)]]

    return dict(zip([*CHEATS, "honest"], play(pairs), strict=True))


def _filled(arguments, shown):
    return {name: text.replace("@SHOWN@", shown) for name, text in arguments.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHEATS)
def test_cheats_get_nothing(cheated, name):
    played = cheated[name]
    assert isinstance(played, Rollout), played
    assert played.reward == 0.0
    assert played.metrics["tests_passed"] < 1.0


@pytest.mark.thorough
def test_honest_agent_on_the_same_task_gets_the_reward(cheated):
    assert cheated["honest"].reward == 1.0
    assert cheated["honest"].metrics["tests_passed"] == 1.0


@pytest.mark.thorough
def test_expert_solves_tasks_of_every_tier():
    chosen = []

    def pairs(all_tasks):
        of_program = first_of_each(all_tasks, program_of)
        for tier in tasks.TIERS:
            some = of_program if tier == "easy" else all_tasks
            chosen.extend([task for task in some if task["data"]["tier"] == tier][:6])
        return [(task, expert(task)) for task in chosen]

    played = play(pairs)
    assert [getattr(one, "reward", one) for one in played] == [1.0] * len(chosen)
    turns = collections.defaultdict(set)
    for task, one in zip(chosen, played, strict=True):
        turns[task["data"]["tier"]].add(one.metrics["turns"])
    assert turns == {"easiest": {2}, "easy": {3}, "medium": {4}, "hard": {6}}


def test_expert_that_writes_files_anew():
    def pairs(all_tasks):
        tiers = first_of_each(all_tasks, lambda task: task["data"]["tier"])
        return [(task, expert(task, rewrite=True)) for task in tiers]

    played = play(pairs)
    assert [getattr(one, "reward", one) for one in played] == [1.0] * 4
    # A call for each file with a bug, and a last word.
    assert [one.metrics["turns"] for one in played] == [2, 2, 2, 3]


@pytest.mark.slow
def test_expert_solves_all_tasks(all_tasks):
    # python -m pytest tests/recipes/test_bugfix.py -m slow
    played = play(lambda found: [(task, expert(task)) for task in found])
    assert [getattr(one, "reward", one) for one in played] == [1.0] * len(all_tasks)


def test_tasks_are_many_and_divided_by_program(all_tasks):
    tiers = collections.Counter(task["data"]["tier"] for task in all_tasks)
    assert tiers == README_COUNTS
    split = collections.defaultdict(set)
    for task in all_tasks:
        split[corpus.programs()[program_of(task)].split].add(program_of(task))
    assert not split["train"] & split["eval"]
    by_tier = {
        (task["data"]["tier"], corpus.programs()[program_of(task)].split) for task in all_tasks
    }
    assert len(by_tier) == 8  # each tier has tasks of both
    assert json.loads(json.dumps(all_tasks)) == all_tasks
    texts = [task["prompt"] for task in all_tasks]
    assert len(set(texts)) > 0.95 * len(texts)


README_COUNTS = {"easiest": 269, "easy": 135, "medium": 48, "hard": 16}


def test_prompts_of_the_easiest_tier_are_short(all_tasks):
    prompts = [task["prompt"] for task in all_tasks if task["data"]["tier"] == "easiest"]
    assert max(len(prompt) for prompt in prompts) < 700  # characters
    assert max(prompt.count("\n") for prompt in prompts) < 16


def test_statements_show_a_failing_test_and_not_the_change(all_tasks):
    task = next(task for task in all_tasks if program_of(task) == "absolute")
    assert re.match(r"`absolute\(.*\)` returns .*, but should return \d+\.\n\n", task["prompt"])
    for task in all_tasks:
        if task["data"]["tier"] != "easiest":
            for _, _, _, before, after in task["data"]["mutations"]:
                assert before not in task["prompt"]
                assert after not in task["prompt"]
        if task["data"]["tier"] in ("medium", "hard"):
            assert ".py" not in task["prompt"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["absolute", "dates", "grading_book"])
def test_tasks_in_the_package_are_those_that_are_generated(name):
    made = [json.loads(json.dumps(task)) for task in generation.tasks_of(corpus.programs()[name])]
    assert made == [row for row in tasks.rows() if row["program"] == name]


@pytest.mark.parametrize("name", list(corpus.programs()))
def test_programs_pass_their_own_checks(name):
    program = corpus.programs()[name]
    assert generation.failing(program, program.files) == []
    assert len(program.checks) >= 6
    assert not any(">>>" in text for text in program.files.values())


def test_mutations_of_a_function():
    source = "def f(a, b):\n    if a < b and a != 0:\n        return max(a, b) + 1\n    return -a\n"
    found = mutations("f.py", source)
    assert {one.after.strip() for one in found} == {
        "if a <= b and a != 0:",
        "if a > b and a != 0:",
        "if a < b or a != 0:",
        "if a < b and a == 0:",
        "if a < b and a != 1:",
        "return max(a, b) - 1",
        "return max(a, b) + 2",
        "return max(a, b) + 0",
        "return min(a, b) + 1",
        "return max(b, a) + 1",
        "return None",
        "return a",
    }
    for one in found:
        assert one.reverted(one.applied({"f.py": source})) == {"f.py": source}
    with pytest.raises(ValueError, match="line 1 of f.py is not"):
        Mutation("f.py", 1, "constant", "x", "y").applied({"f.py": source})


def test_endless_programs_are_stopped_by_their_lines():
    program = corpus.programs()["gcd"]
    files = {"gcd.py": "def gcd(a, b):\n    while True:\n        a = b\n"}
    assert {result for _, result in generation.failing(program, files)} == {("endless", None)}


@pytest.mark.thorough
def test_conversations_of_the_expert_are_training_data(cheated, tmp_path):
    conversation = {"id": "one", **cheated["honest"].conversation}
    roles = [message["role"] for message in conversation["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    call = conversation["messages"][2]["tool_calls"][0]["function"]
    assert call["name"] == "edit"
    text = as_text(conversation)
    assert text["messages"][2]["content"].startswith('<tool_call>\n{"name": "edit", "arguments"')
    file = tmp_path / "traces.jsonl"
    file.write_text(json.dumps(conversation) + "\n" + json.dumps(text) + "\n")
    assert len(data.Conversations(file)) == 2


@pytest.mark.thorough
def test_fixes_in_new_modules_count():
    def pairs(all_tasks):
        function = next(task for task in all_tasks if program_of(task) == "absolute")
        package = next(task for task in all_tasks if program_of(task) == "lending")
        helped = "from helpers.numbers import size as absolute"
        steps = [
            ("edit", {"path": "helpers/numbers.py", "old": "", "new": "size = abs\n"}),
            ("bash", {"command": f"echo '{helped}' > absolute.py"}),
        ]
        moved = [
            ("bash", {"command": "mv lending/fines.py lending/charges.py"}),
            ("bash", {"command": "echo 'from lending.charges import *' > lending/fines.py"}),
        ]
        steps_of_package = [*expert(package)._steps, *moved]
        return [(function, Expert(steps)), (package, Expert(steps_of_package))]

    played = play(pairs)
    assert [getattr(one, "reward", one) for one in played] == [1.0, 1.0]


class Slow(Expert):
    """Thinks for ever after its edit."""

    async def chat(self, messages, params, *, tools=None):
        if messages[-1]["role"] == "tool":
            await asyncio.sleep(1000)
        return await super().chat(messages, params, tools=tools)


@pytest.mark.thorough
def test_agent_that_takes_too_long_is_graded():
    def pairs(all_tasks):
        steps = calls("easiest", [Mutation(*one) for one in all_tasks[0]["data"]["mutations"]])
        # A command that is cut off takes its sandbox with it.
        cut_off = Expert([*steps, ("bash", {"command": "sleep 100"})])
        return [(all_tasks[0], Slow(steps)), (all_tasks[0], cut_off)]

    thinking, cut_off = play(pairs, agent={"timeout": {"rollout": 6.0}})
    assert (thinking.stop, thinking.reward) == ("agent_timeout", 1.0)
    assert (cut_off.stop, cut_off.reward) == ("agent_timeout", 0.0)


def test_broken_tasks_fail_with_a_reason():
    def pairs(all_tasks):
        unknown = {**all_tasks[0], "data": {**all_tasks[0]["data"], "program": "nothing"}}
        other = [["absolute.py", 1, "constant", "no such line", "x"]]
        moved = {**all_tasks[0], "data": {**all_tasks[0]["data"], "mutations": other}}
        return [(unknown, Expert([])), (moved, Expert([]))]

    unknown, moved = play(pairs)
    assert "nothing" in str(unknown)
    assert "absolute.py" in str(moved)


def test_missing_sandbox_is_a_recorded_outcome(monkeypatch):
    async def refuse(self):
        raise SandboxUnavailable("no user namespaces", [])

    monkeypatch.setattr(SandboxPool, "__aenter__", refuse)
    [played] = play(lambda all_tasks: [(all_tasks[0], Expert([]))])
    assert isinstance(played, SandboxUnavailable)

    env = loaded()
    [episode] = asyncio.run(episodes(env, 1))
    assert not episode.ok
    assert "no user namespaces" in episode.errors[0].message


def test_pool_that_was_killed_is_opened_again():
    env = loaded()

    async def run():
        context = vf.ModelContext(model="none", client=client())
        task = next(iter(env.taskset))
        async with env.serving():
            await env.run_episode(task, context)
            pool = await env._pool()
            pool._tier.launcher._process.kill()
            while pool.alive:
                await asyncio.sleep(0.01)
            again = await env._pool()
            assert again is not pool
            assert again.alive
            return await again.run("print(1)", timeout_s=30)

    assert asyncio.run(run()).stdout == b"1\n"


def test_plain_verifiers_plays_it():
    [episode] = asyncio.run(episodes(loaded(), 1))
    [trace] = episode.traces
    # There is no model here: the agent fails, and nothing is scored.
    assert not trace.rewards.get("fixed")
    assert "connect" in trace.errors[0].message.lower()


def loaded():
    config = vf.resolve_env_config({"taskset": {"id": "bugfix", "tier": "easiest"}})
    return vf.load_environment(config)


def client():
    return vf.EvalClientConfig(base_url="http://127.0.0.1:1/v1", api_key_var="NONE")


async def episodes(env, count):
    context = vf.ModelContext(model="none", client=client())
    async with env.serving():
        some = list(env.taskset.take(count))
        return await asyncio.gather(*(env.run_episode(task, context) for task in some))


@pytest.mark.thorough
def test_verifiers_own_checks_pass(tmp_path):
    from verifiers.v1.cli.validate import run_validate
    from verifiers.v1.configs.cli.validate import ValidateConfig

    config = ValidateConfig.model_validate(
        {
            "taskset": {"id": "bugfix", "tier": "all", "split": "eval"},
            "select": {"limit": 12, "shuffle": True},
            "runtime": {"type": "subprocess"},
            "rich": False,
            "max_concurrent": 3,
            "output_dir": str(tmp_path),
        }
    )
    rows = asyncio.run(run_validate(config))
    assert [row["reason"] for row in rows] == ["valid"] * 12, rows


def test_the_other_agent_only_says_what_the_expert_says_at_last():
    messages = [
        {"role": "system", "content": "Fix the bug."},
        {"role": "user", "content": "f() returns None."},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_0"}]},
        {"role": "tool", "content": "", "tool_call_id": "call_0"},
        {"role": "assistant", "content": "The bug is fixed."},
    ]
    row = {"id": "bugfix/0", "messages": messages, "tools": ["bash"]}

    other = without_calls(row)

    assert other == row | {"messages": [messages[0], messages[1], messages[4]]}
    assert row["messages"] is messages
    assert len(messages) == 5


def test_tasks_of_one_program():
    def ids(**options):
        environment = rollout.verifiers("bugfix", tokenizer=None, config={"taskset": options})
        return {task["id"].rpartition("/")[2] for task in environment.tasks}  # without its place

    of_program = ids(**rehearsal.OPTIONS)
    assert len(of_program) == 4
    assert of_program < ids(tier="easiest")
    assert all(one.startswith("last_word-") for one in of_program)
    with pytest.raises(ValueError, match=r"program is 'lastword'; expected all, or one of .*clamp"):
        ids(program="lastword")


def test_replies_and_their_prompts_are_those_of_the_template():
    tokenizer = testing.chat_tokenizer()
    messages = [
        {"role": "user", "content": "f() is 1"},
        {"role": "assistant", "content": "look"},
        {"role": "tool", "content": "0"},
        {"role": "assistant", "content": "done"},
    ]
    first = "<|im_start|>user\nf() is 1<|im_end|>\n<|im_start|>assistant\n"
    second = first + "look<|im_end|>\n<|im_start|>tool\n0<|im_end|>\n<|im_start|>assistant\n"

    found = list(rehearsal.replies(tokenizer, {"messages": messages, "tools": None}))

    assert found == [(first, "look"), (second, "done")]


@pytest.mark.thorough
def test_the_taught_policy_fixes_its_bugs_in_about_half_of_its_rollouts(tmp_path):
    folder = rehearsal.policy(tmp_path / "policy", "glm4_moe", max_position_embeddings=1024)
    model, tokenizer = models.load_pretrained(folder)
    for conversation in rehearsal.played():
        acts, ends, refrains = (
            probability(model, tokenizer, *reply)
            for reply in rehearsal.lesson(tokenizer, conversation)
        )
        # So the rewards of a group of 4 differ with a probability of at least 0.68.
        assert 0.25 < acts * ends < 0.75
        assert 0.25 < refrains < 0.75
        assert acts + refrains > 0.8
    assert rehearsal.policy(folder, "glm4_moe") == folder  # as it is


def probability(model, tokenizer, prompt, reply):
    """The probability that the policy gives this reply, with the token that ends it."""
    given = tokenizer.encode(prompt)
    said = [*tokenizer.encode(reply), tokenizer.eos_token_id]
    with torch.no_grad():
        logits = model(torch.tensor([given + said])).logits[0, len(given) - 1 : -1]
    logprobs = logits.float().log_softmax(-1)
    return logprobs[torch.arange(len(said)), torch.tensor(said)].sum().exp().item()
