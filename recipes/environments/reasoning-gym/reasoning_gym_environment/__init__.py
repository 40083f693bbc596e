"""A verifiers environment of the procedural generators of reasoning-gym."""

import difflib
import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any, Literal

import reasoning_gym
import verifiers.v1 as vf
from pydantic import Field
from reasoning_gym.factory import DATASETS

__all__ = ["ReasoningGym"]

CHUNK = 32  # tasks made at once: some generators make all tasks when they are created
STREAM = 1_000_000  # distance between the first tasks of two consecutive seeds
UNSCORED = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")


class Puzzle(vf.TaskData):
    """Data of a task: a generator's entry, as JSON that preserves tuples."""

    dataset: str
    entry: dict[str, Any]


class Solve(vf.Task[Puzzle]):
    """Task: solve the puzzle. The generator scores the reply."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """Score the text in the last ``<answer>`` tags, or else the whole reply."""
        reply = trace.last_reply
        if "<answer>" in reply:
            reply = reply.rsplit("<answer>", 1)[1].split("</answer>", 1)[0].strip()
        try:
            return float(scorer(self.data.dataset)(reply, restored(self.data.entry)))
        except Exception:  # the scorers of reasoning-gym may raise anything on a malformed answer
            return 0.0


class Options(vf.TasksetConfig):
    """Options: the generator, and the part of its task stream to use."""

    dataset: str = ""
    options: dict[str, Any] = Field(default_factory=dict)
    split: Literal["train", "eval"] = "train"
    held_out: int = 1024
    seed: int = 0
    instruction: str = "Write your final answer between <answer> and </answer>."


class ReasoningGym(vf.Taskset[Solve, Options]):
    """Taskset of numbered tasks: the first ``held_out`` for eval, the endless rest to train on."""

    def __init__(self, config: Options) -> None:
        super().__init__(config)
        check(config.dataset)
        self.INFINITE = config.split == "train"

    def load(self) -> Iterator[Solve]:
        """Yield the tasks of the split in order."""
        held_out = self.config.held_out
        if self.config.split == "eval":
            numbers: Any = range(held_out)
        else:
            numbers = itertools.count(held_out + self.config.seed * STREAM)
        chunk, entries = -1, None
        for number in numbers:
            if number // CHUNK != chunk:
                chunk = number // CHUNK
                entries = reasoning_gym.create_dataset(
                    self.config.dataset, size=CHUNK, seed=chunk * CHUNK, **self.config.options
                )
            yield self._task(number, drawn(entries, number))

    def _task(self, number: int, entry: dict[str, Any]) -> Solve:
        data = Puzzle(
            id=f"{self.config.dataset}-{number}",
            prompt=f"{entry['question']}\n\n{self.config.instruction}".rstrip(),
            dataset=self.config.dataset,
            entry=plain(entry),
        )
        return Solve(data, self.config.task)


def check(dataset: str) -> None:
    """Check that a generator exists and that its answers can be scored.

    Raises:
        ValueError: the generator is unknown or can't be scored.
    """
    if dataset in UNSCORED:
        raise ValueError(
            f"{dataset!r} stores no answer that its own scorer accepts, so its rewards can't be "
            f"checked; choose a generator other than {', '.join(UNSCORED)}"
        )
    known = [name for name in DATASETS if name != "composite" and name not in UNSCORED]
    if not dataset:
        raise ValueError(
            "name one of reasoning-gym's generators, as in 'reasoning-gym:chain_sum'; there are "
            f"{', '.join(sorted(known))}"
        )
    if dataset not in known:
        close = difflib.get_close_matches(dataset, known, n=5, cutoff=0.5)
        raise ValueError(
            f"reasoning-gym has no generator {dataset!r}; "
            + (f"similar: {', '.join(close)}" if close else f"there are {', '.join(sorted(known))}")
        )


def drawn(entries: Any, number: int) -> dict[str, Any]:
    """Return entry ``number`` of the chunk ``entries``, reproducibly.

    One generator (list_functions) also draws from Python's global random state. This function seeds
    that state for the entry and then restores it.
    """
    state = random.getstate()
    random.seed(number)
    try:
        entry: dict[str, Any] = entries[number % CHUNK]
    finally:
        random.setstate(state)
    return entry


@functools.cache
def scorer(dataset: str) -> Any:
    """Return the generator's own scorer: ``(answer, entry) -> number``."""
    return reasoning_gym.get_score_answer_fn(dataset)


def plain(value: Any) -> Any:
    """Encode ``value`` as JSON. ``restored`` recovers tuples, which some scorers compare."""
    if isinstance(value, tuple):
        return {"__tuple__": [plain(item) for item in value]}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: plain(item) for key, item in value.items()}
        return {"__items__": [[plain(key), plain(item)] for key, item in value.items()]}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def restored(value: Any) -> Any:
    """Decode the result of ``plain``. Objects that JSON can't represent stay text."""
    if isinstance(value, list):
        return [restored(item) for item in value]
    if isinstance(value, dict):
        if "__tuple__" in value:
            return tuple(restored(item) for item in value["__tuple__"])
        if "__items__" in value:
            return {restored(key): restored(item) for key, item in value["__items__"]}
        return {key: restored(item) for key, item in value.items()}
    return value
