"""The environment python-math: its problems, its scoring, and its expert."""

import asyncio
import itertools
import json
from fractions import Fraction

import pytest
from growth import assert_linear, repeated
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
        ("Answer: \u22125", -5),
        ("Answer: \u20135", -5),
        ("Answer: .5", Fraction(1, 2)),
        ("Answer: -.5", Fraction(-1, 2)),
        ("Answer: 12 (since 3 \u00d7 4 = 12)", 12),
        ("Answer: 12, because 3 * 4 is 12", 12),
        ("Answer: 12 (since there are 3 rows of 4 coins)", 12),
        ("Answer: 12 (since 3*4)", 12),
        ("Answer: 12 (since I counted them twice: 5 and 7)", 12),
        ("Answer: 12.", 12),
        ("Answer: 12.0", 12),
        ("Answer: 1,234.50", Fraction(2469, 2)),
        ("Answer: 1{,}234", 1234),
        ("Answer: 1\u202f234", 1234),
        ("Answer: $12$", 12),
        ("Answer: -$5", -5),
        (r"Answer: \boxed{\frac{1}{2}}", Fraction(1, 2)),
        (r"Answer: \(\dfrac{5}{2}\)", Fraction(5, 2)),
        ("Answer: 40 %", 40),
        ("Answer: 12 m^2", 12),
        ("Answer: x = 12 coins.", 12),
        ("Answer: 5/2 = 2.5", Fraction(5, 2)),
        ("Answer: 5/2 (2.5)", Fraction(5, 2)),
        ("The answer is 12.", 12),
        ("Answer: 12 \u2705", 12),
        ("Answer: {12}", 12),
        ("Answer: 2^3 = 8", 8),
        (r"Answer: \(3 \times 4 = 12\)", 12),
        ("Answer: The total is 12 coins", 12),
        ("Answer: It is 12 apples in total.", 12),
        ("Answer: Ana is 12 years old now", 12),
        ("Answer: hens = 12", 12),
        ("Answer: The number of hens is 12.", 12),
        ("Answer: 12 are left over", 12),
        ("Answer: 12 (i.e. 12.0)", 12),
        ("Answer: 12, since 24 / 2 is 12", 12),
        ("Answer: 50\u00b0", 50),
        ("Answer: 12 or 13", None),
        ("Answer: 12 (or 13)", None),
        ("Answer: 12, not 13", None),
        ("Answer: 12. No, 13", None),
        ("Answer: not 12", None),
        ("Answer: about 12", None),
        ("Answer: > 12", None),
        ("Answer: 3 * 4", None),
        ("Answer: 2^10", None),
        ("Answer: 1e3", None),
        ("Answer: 0x1F", None),
        ("Answer: 12!", None),
        ("Answer: 12k", None),
        ("Answer: 1.5 million", None),
        (r"Answer: \sqrt{4}", None),
        ("Answer: sqrt(4)", None),
        ("Answer: 2\u03c0", None),
        ("Answer: 9\u00b2", None),
        ("Answer: 1,23", None),
        ("Answer: 2 1/2", None),
        ("Answer: 10\u201312", None),
        ("Answer: -(5)", None),
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


@pytest.mark.parametrize(
    "answer",
    [
        "12x",
        "12 lakh",
        "12 crore",
        "12 mil",
        "12 bn",
        "12M",
        "12 gross",
        "12 fifths",
        "12 tenths",
        "12 septillion",
        "12 zillions",
        "ln 12",
        "tan 12",
        "log 12",
        "square of 12",
        "sum of digits of 12",
        "inverse of 12",
        "reciprocal of 12",
        "the opposite of 12",
        "any number except 12",
        "anything but 12",
        "never 12",
        "isn't 12",
        "perhaps 12",
        "unknown, maybe 12",
        "exceeds 12",
        "fewer 12",
        "up to 12",
        "over 12",
        "triples 12",
        "12 percent of x",
        "12 cents short of a dollar",
        "12 (wrong, it is thirteen)",
        "12 (i.e. thirteen)",
        "12 (13)",
        "12, as opposed to 13",
        "x = 12 = 13",
        "not = 12",
        "12 = 13",
        "12-fold",
        "12 and a half",
        "12 (mod 13)",
        "12 is wrong",
        "12 (or 12)",
    ],
)
def test_what_is_not_understood_is_not_read(answer):
    assert answered(f"Answer: {answer}") is None


@pytest.mark.parametrize(
    "part",
    [
        "answer",
        "answer ",
        "answer:",
        " ",
        "*",
        "\n",
        "1",
        "1 ",
        "1/",
        "(",
        "\\boxed{",
        "{,}",
        "1,",
        "a ",
    ],
)
def test_answers_are_read_in_linear_time(part):
    assert_linear(answered, repeated("answer", part, "\0"))
    assert_linear(answered, repeated("answer: 12 ", part, "\0"))
    assert_linear(answered, repeated("answer: total ", part, " = \0"))


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
