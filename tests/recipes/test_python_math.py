"""The environment python-math: its problems, its scoring, and its expert."""

import asyncio
import itertools
import json
from fractions import Fraction

import pytest
from sandboxed import needed

pytest.importorskip("verifiers")
pytest.importorskip(
    "python_math", reason="pip install --no-deps -e recipes/environments/python-math"
)
needed()

from python_math.agent import Expert
from python_math.problems import LEVELS, problem
from python_math.tasks import answered

from primerl import rollout
from primerl.types import SamplingParams

PARAMS = SamplingParams(max_tokens=1)


def environment(**options):
    return rollout.verifiers("python-math", tokenizer=None, config={"taskset": options})


class Says(Expert):
    """Answers at once."""

    def __init__(self, task, reply):
        super().__init__(task)
        self.reply = reply

    async def chat(self, messages, params, *, tools=None):
        made = await super().chat([{"role": "tool", "content": ""}], params)
        made.message["content"] = self.reply
        return made


def play(played, pairs):
    async def run():
        try:
            return await asyncio.gather(*(played(*pair, PARAMS) for pair in pairs))
        finally:
            await played.aclose()

    return asyncio.run(run())


@pytest.mark.parametrize("level", LEVELS)
def test_expert_solves_and_others_do_not(level):
    played = environment(level=level, split="eval", held_out=8)
    tasks = list(played.tasks)
    assert len(tasks) == 8
    answer = tasks[0]["data"]["answer"]
    pairs = [(task, Expert(task)) for task in tasks]
    replies = ["", "Answer:", answer, "Answer: 0.123", f"Answer: {answer} or 17", "Answer: 9^9^9"]
    pairs += [(tasks[0], Says(tasks[0], reply)) for reply in replies]
    rewards = [one.reward for one in play(played, pairs)]
    assert rewards == [1.0] * 8 + [0.0] * len(replies)


def test_tasks_are_always_the_same_and_none_is_held_out_and_trained_on():
    first = list(itertools.islice(environment(level=1).tasks, 200))
    assert first == list(itertools.islice(environment(level=1).tasks, 200))
    assert json.loads(json.dumps(first)) == first
    assert len({task["prompt"] for task in first}) > 190
    held_out = {task["prompt"] for task in environment(level=1, split="eval").tasks}
    assert not held_out & {task["prompt"] for task in first}


def test_answers_by_hand():
    found = {problem(number, level=1).text: problem(number, level=1).answer for number in range(8)}
    for text, answer in found.items():
        numbers = [int(word) for word in text.replace(".", " ").split() if word.isdigit()]
        if "buys" in text:
            a, p, b, q = numbers
            assert answer == a * p + b * q
        if "share" in text:
            assert answer == numbers[1] % numbers[0]
        if "heads" in text:
            assert answer == (4 * numbers[0] - numbers[1]) / 2


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("Answer: 12", 12),
        ("so it is.\nanswer: **1,250**", 1250),
        ("Answer: -2.50 km/h", Fraction(-5, 2)),
        ("Answer: 5/2", Fraction(5, 2)),
        ("Answer: 1\nAnswer: 2", 2),
        ("12", None),
        ("Answer: 5/0", None),
        ("Answer: 1 2", None),
        ("Answer: twelve", None),
        ("Answer: " + "9" * 200_000, None),
        ("Answer: 1e999999999", None),
    ],
)
def test_answers_are_read(reply, number):
    found = answered(reply)
    if reply.startswith("Answer: 999"):
        assert found != number  # cut: no number that anybody asked for
    else:
        assert found == number


@pytest.mark.usefixtures("home")
def test_verifiers_own_checks_pass(tmp_path):
    from verifiers.v1.cli.validate import run_validate
    from verifiers.v1.configs.cli.validate import ValidateConfig

    config = ValidateConfig.model_validate(
        {
            "taskset": {"id": "python-math", "level": 2, "split": "eval", "held_out": 8},
            "runtime": {"type": "subprocess"},
            "rich": False,
            "only_gold": True,
            "output_dir": str(tmp_path),
        }
    )
    rows = asyncio.run(run_validate(config))
    assert [row["reason"] for row in rows] == ["valid"] * 8, rows
