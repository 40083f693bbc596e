"""The tasks, and their scoring."""

import itertools
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import Field

from python_math.problems import problem

SYSTEM = 'Compute with the python tool, then reply with "Answer: " and the number.'
STREAM = 1_000_000  # distance between the first tasks of two seeds
MOST_CHARACTERS = 100  # of an answer
_ANSWER = re.compile(r"answer\s*:\s*\**\s*([^\n]*)", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d[\d,]*)?")


class Question(vf.TaskData):
    """A problem; the agent sees the prompt only."""

    answer: str
    solution: str
    level: int


class Solve(vf.Task[Question]):
    """Answer with the right number."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 if the last reply's last answer is the number, compared on the host, else 0."""
        return float(answered(trace.last_reply) == Fraction(self.data.answer))

    async def validate(self, runtime: vf.Runtime) -> bool:
        """Whether the solution prints the answer."""
        done = await runtime.run(["python3", "-c", self.data.solution], {})
        return answered(f"Answer: {done.stdout}") == Fraction(self.data.answer)


class Options(vf.TasksetConfig):
    """``level`` 1 to 3; the first ``held_out`` problems are "eval", then there is no end."""

    level: Literal[1, 2, 3] = 1
    split: Literal["train", "eval"] = "train"
    held_out: int = Field(default=256, ge=1)
    seed: int = 0


class PythonMath(vf.Taskset[Solve, Options]):
    """Problems by number."""

    def __init__(self, config: Options) -> None:
        super().__init__(config)
        self.INFINITE = config.split == "train"

    def load(self) -> Iterator[Solve]:
        """The tasks of the split, in order."""
        held_out, level = self.config.held_out, self.config.level
        first = held_out + self.config.seed * STREAM
        numbers: Any = range(held_out) if self.config.split == "eval" else itertools.count(first)
        kept = set()
        if self.config.split == "train":
            kept = {problem(number, level=level).text for number in range(held_out)}
        for number in numbers:
            made = problem(number, level=level)
            if made.text in kept:
                continue  # by chance the same as one that is held out
            data = Question(
                id=f"level{level}-{number}",
                system_prompt=SYSTEM,
                prompt=made.text,
                answer=str(made.answer),
                solution=made.solution,
                level=level,
            )
            yield Solve(data, self.config.task)


def answered(reply: str) -> Fraction | None:
    """The number after the last "Answer:", exactly; None if there is none, or several.

    Whole numbers, decimals and fractions count, with commas between thousands. Nothing is
    evaluated, so no reply can take long.
    """
    found = _ANSWER.findall(reply)
    if not found:
        return None
    numbers = _NUMBER.findall(found[-1][:MOST_CHARACTERS])
    if len(numbers) != 1:
        return None
    try:
        return Fraction(re.sub(r"[,\s]", "", numbers[0]))
    except (ValueError, ZeroDivisionError):
        return None
