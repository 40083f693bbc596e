"""Reads the recorded rollouts of a run, also those of earlier versions, with arrays in JSON."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import numpy as np

from primerl.track.group_index import ENTRY, read_index
from primerl.track.run_folder import ARRAYS, INDEX, METRICS, ROLLOUTS, complete_lines
from primerl.track.token_arrays import unpacked

PROMPT_CHARACTERS = 80
"""The most characters of a prompt in a list of rollouts."""
# The markers of a user's message, and of its end, in the chat templates of common families.
_USER = re.compile(
    r"<[^<>]*\buser\b[^<>]*>|<[^<>]+>\s*user\b\s*(?:<[^<>]+>)?|\[INST\]", re.IGNORECASE
)
_END = re.compile(r"<\||<end_of_turn>|</s>|\[/INST\]")

EARLIER_ARRAYS = ("token_ids", "loss_mask", "behavior_logprobs", "versions", "advantages")


@attrs.frozen
class SequenceLine:
    """The location of a recorded sequence's line in its file, and its values in lists."""

    start: int
    length: int
    step: int
    task: str
    rollout: int | None  # index in the group; in older records None: one sequence
    sample: int
    environment: str
    reward: float
    stop: str
    metrics: dict[str, float]
    tokens: int
    trained: int
    has_conversation: bool
    prompt: str | None  # the first words of the first user's message


def read_rollouts(folder: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the record of each trained sequence of a run, with its arrays ``[t]`` by name.

        for record in track.read_rollouts("runs/async_grpo-001"):
            record["reward"], record["completion"], record["arrays"]["behavior_logprobs"]

    The run may be running; an incomplete last line is ignored.

    Args:
        folder: the run's folder.

    Raises:
        ValueError: the folder holds no run, or a record is damaged.
    """
    folder = Path(folder)
    if not (folder / METRICS).is_file():
        raise ValueError(f"{folder} holds no run: there is no {folder / METRICS}")
    with RolloutFiles(folder) as files:
        for start, text in complete_lines(folder / ROLLOUTS):
            yield files.parsed(start, text)


class RolloutFiles:
    """Opens the files with a run's recorded rollouts, to read single groups and sequences.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, BinaryIO] = {}

    def __enter__(self) -> "RolloutFiles":
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._open.values():
            file.close()

    def groups(self) -> np.ndarray:
        """Return an entry of ``group_index.ENTRY`` for each recorded group.

        Only lines of earlier versions, which wrote no index, are read for that.
        """
        path = self._folder / ROLLOUTS
        size = path.stat().st_size if path.is_file() else 0
        index = read_index(self._folder / INDEX)
        index = index[index["offset"] + index["bytes"] <= size]
        unindexed = int(index["offset"][0]) if len(index) else size
        earlier = np.array(list(self._scanned(unindexed)), ENTRY)
        return np.concatenate([earlier, index])

    def _scanned(self, end: int) -> Iterator[tuple[int, int, int, int]]:
        lines: list[SequenceLine] = []
        for start, text in complete_lines(self._folder / ROLLOUTS):
            if start >= end:
                break
            line = self._line(start, text)
            if lines and (line.step, line.task) != (lines[0].step, lines[0].task):
                yield _entry(lines)
                lines = []
            lines.append(line)
        if lines:
            yield _entry(lines)

    def lines(self, offset: int, length: int) -> Iterator[SequenceLine]:
        """Yield the lines of a group by its place in ``rollouts.jsonl``."""
        for text in self._read(ROLLOUTS, offset, length).splitlines(keepends=True):
            yield self._line(offset, text)
            offset += len(text)

    def record(self, line: SequenceLine) -> dict[str, Any]:
        """Return the record of a sequence, with its arrays."""
        return self.parsed(line.start, self._read(ROLLOUTS, line.start, line.length))

    def parsed(self, start: int, text: bytes) -> dict[str, Any]:
        """Return the record in a line, with its arrays."""
        record = self._json(start, text)
        try:
            if "arrays" in record:
                place = record["arrays"]
                block = self._read(ARRAYS, place["offset"], place["bytes"])
                record["arrays"] = unpacked(block, place["types"], record["tokens"])
            else:
                record["arrays"] = _earlier_arrays(record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(start, error) from None
        return record

    def _line(self, start: int, text: bytes) -> SequenceLine:
        record = self._json(start, text)
        try:
            return SequenceLine(
                start=start,
                length=len(text),
                step=record["step"],
                task=record["task_id"],
                rollout=record.get("rollout"),
                sample=record.get("sample", 0),
                environment=record["environment"],
                reward=record["reward"],
                stop=record["stop"],
                metrics=dict(record.get("metrics", {})),
                tokens=record["tokens"] if "tokens" in record else len(record["token_ids"]),
                trained=record["trained"] if "trained" in record else sum(record["loss_mask"]),
                has_conversation="conversation" in record,
                prompt=first_words(record.get("prompt")),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(start, error) from None

    def _json(self, start: int, text: bytes) -> dict[str, Any]:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._damaged(start, error) from None
        if not isinstance(record, dict):
            raise self._damaged(start, f"a {type(record).__name__}")
        return record

    def _damaged(self, start: int, reason: object) -> ValueError:
        where = f"{self._folder / ROLLOUTS}, at byte {start},"
        return ValueError(f"{where} is not a record of a rollout: {reason!r:.200}")

    def _read(self, name: str, offset: int, length: int) -> bytes:
        if length < 0:
            raise ValueError(f"a length is {length}, expected a number of bytes")
        if name not in self._open:
            self._open[name] = (self._folder / name).open("rb")
        file = self._open[name]
        file.seek(offset)
        return file.read(length)


def first_words(prompt: str | None) -> str | None:
    """Return the beginning of the user's first message in a prompt, on one line.

    A prompt without the markers of a known chat template is taken from its beginning. None stays
    None.
    """
    if prompt is None:
        return None
    user = _USER.search(prompt)
    text = prompt if user is None else _END.split(prompt[user.end() :], maxsplit=1)[0]
    words = " ".join(text[: 4 * PROMPT_CHARACTERS].split())
    if len(words) <= PROMPT_CHARACTERS:
        return words
    return words[: PROMPT_CHARACTERS - 1].rstrip() + "…"


def rollouts_of(lines: Iterable[SequenceLine]) -> Iterator[list[SequenceLine]]:
    """Yield the lines of each rollout, which are adjacent: several if it has branches."""
    rollout: list[SequenceLine] = []
    for line in lines:
        if rollout and not _continues(line, rollout[-1]):
            yield rollout
            rollout = []
        rollout.append(line)
    if rollout:
        yield rollout


def _continues(line: SequenceLine, before: SequenceLine) -> bool:
    """Return whether both lines belong to one rollout."""
    return (
        line.rollout is not None
        and (line.step, line.task, line.rollout) == (before.step, before.task, before.rollout)
        and line.sample > before.sample
    )


def _entry(lines: list[SequenceLine]) -> tuple[int, int, int, int]:
    end = lines[-1].start + lines[-1].length
    return lines[0].start, end - lines[0].start, 0, sum(1 for _ in rollouts_of(lines))


def _earlier_arrays(record: dict[str, Any]) -> dict[str, np.ndarray]:
    """Move the arrays out of a record of an earlier version; numbers that were not finite are NaN.

    ``logprobs`` and ``entropy`` were given by the loop, as may be further arrays.
    """
    size = len(record["token_ids"])
    names = [name for name, x in record.items() if isinstance(x, list) and len(x) == size]
    arrays = {name: record.pop(name) for name in names}
    whole = dict.fromkeys(("token_ids", "versions"), "<i4") | {"loss_mask": "|b1"}
    found = {name: np.array(x, whole.get(name, "<f4")) for name, x in arrays.items()}
    if missing := set(EARLIER_ARRAYS) - set(found):
        raise ValueError(f"{', '.join(sorted(missing))} is missing or of another length")
    return found
