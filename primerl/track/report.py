"""The report of runs: one HTML file with their curves and rollouts, which needs no server.

A run's records are compressed into the page. Rollouts are compressed in chunks, which the page
unpacks when one of their rollouts is opened. ``report_page.html`` is the page itself;
``report_conversation.js`` is the part that shows an agent's rollout as a conversation.
"""

import base64
import gzip
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import attrs

from primerl._common.files import whole_or_nothing
from primerl.track.run_folder import (
    ARGS,
    METRICS,
    REPORT,
    ROLLOUTS,
    SUMMARY,
    TOKENS,
    complete_lines,
    read_json,
)

CHUNK_BYTES = 1 << 19
"""Approximate size of a chunk that the page unpacks at once, in bytes of recorded rollouts."""

# The arrays of a trained sequence in a chunk; its other values are in the list of rollouts.
ARRAYS = ("token_ids", "loss_mask", "behavior_logprobs", "versions", "advantages")
OF_TRAINER = ("logprobs", "entropy")  # present if the loop passed them to Run.log
ROUNDED = ("behavior_logprobs", "advantages", *OF_TRAINER)  # further digits are unreadable


@attrs.frozen
class _Line:
    """The location of a recorded sequence in its file, and its values in lists of rollouts."""

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


_Rollout = list[_Line]
"""The trained sequences of a rollout: several if it has branches."""


def write_report(
    runs: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str] | None = None,
    *,
    max_rollouts: int = 10_000,
    max_bytes: int = 1 << 28,
) -> Path:
    """Write the report of one run, or of several to compare, as one HTML file.

    The runs may be finished, running or dead: the report shows what has been recorded so far.

    Args:
        runs: the folders of the runs.
        path: the file to write; ``report.html`` in the first run's folder by default.
        max_rollouts: the most rollouts per run in the report. If there are more, whole groups are
            left out, evenly over the run, and the report says how many there were.
        max_bytes: the most bytes of a run's ``rollouts.jsonl`` in the report; enforced alike.

    Raises:
        ValueError: no folders are given, or a folder holds no run, or a record is invalid.
    """
    if not runs:
        raise ValueError("no run is given; expected the folder of at least one run")
    folders = [Path(run) for run in runs]
    parts: list[str] = []
    for number, folder in enumerate(folders):
        recorded = list(_rollouts(_recorded_lines(folder)))
        chunks = list(_chunks(_chosen(recorded, max_rollouts, max_bytes)))
        overview = _overview(folder, chunks, recorded=len(recorded))
        parts.append(_embedded(f"run-{number}", overview))
        for place, chunk in enumerate(chunks):
            parts.append(_embedded(f"run-{number}-chunk-{place}", _contents(folder, chunk)))
    page = _file("report_page.html").replace(
        "/* report_conversation.js */", _file("report_conversation.js")
    )
    to = folders[0] / REPORT if path is None else Path(path)
    with whole_or_nothing(to) as file:
        file.write(page.replace("<!-- data -->", "\n".join(parts)).encode())
    return to


def _file(name: str) -> str:
    return files("primerl.track").joinpath(name).read_text(encoding="utf-8")


def _overview(
    folder: Path, chunks: Sequence[Sequence[_Rollout]], *, recorded: int
) -> dict[str, Any]:
    """Return what the page shows of a run before a rollout is opened."""
    rollouts = [rollout for chunk in chunks for rollout in chunk]
    firsts = [rollout[0] for rollout in rollouts]
    names = sorted({name for line in firsts for name in line.metrics})
    path = folder / SUMMARY
    summary = read_json(path) if path.exists() else {}
    steps = [json.loads(line) for _, line in complete_lines(folder / METRICS)]
    return {
        "name": folder.resolve().name,
        "args": read_json(folder / ARGS),
        "summary": summary,
        "metrics": _by_name([*steps, *_last_evaluation(steps, summary)]),
        "tokens": dict(json.loads(line) for _, line in complete_lines(folder / TOKENS)),
        "recorded": recorded,
        "conversations": any(line.has_conversation for line in firsts),
        "rollouts": {
            "step": [line.step for line in firsts],
            "task": [line.task for line in firsts],
            "environment": [line.environment for line in firsts],
            "reward": [line.reward for line in firsts],
            "stop": [line.stop for line in firsts],
            "metrics": {name: [line.metrics.get(name) for line in firsts] for name in names},
            "tokens": [sum(line.tokens for line in rollout) for rollout in rollouts],
            "trained": [sum(line.trained for line in rollout) for rollout in rollouts],
            "chunk": [number for number, chunk in enumerate(chunks) for _ in chunk],
        },
    }


def _last_evaluation(
    steps: Sequence[dict[str, Any]], summary: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the evaluation of the final weights, which no step has; empty if there was none."""
    score = summary.get("eval_after")
    known = [line["evaluation"] for line in steps if line.get("evaluation") is not None]
    if not summary.get("finished") or score is None or known[-1:] == [score]:
        return []
    return [{"step": summary["steps"], "evaluation": score}]


def _by_name(steps: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return a column for each metric; None at the steps that lack it."""
    names = dict.fromkeys(name for line in steps for name in line)
    return {name: [line.get(name) for line in steps] for name in names}


def _recorded_lines(folder: Path) -> Iterator[_Line]:
    for number, (start, text) in enumerate(complete_lines(folder / ROLLOUTS), start=1):
        try:
            yield _line(start, text)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            where = f"{folder / ROLLOUTS}, line {number}"
            raise ValueError(f"{where}, is not a record of a rollout: {error!r}") from None


def _line(start: int, text: bytes) -> _Line:
    record = json.loads(text)
    return _Line(
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
        tokens=len(record["token_ids"]),
        trained=sum(record["loss_mask"]),
        has_conversation="conversation" in record,
    )


def _rollouts(lines: Iterable[_Line]) -> Iterator[_Rollout]:
    """Yield the lines of each rollout, which are adjacent."""
    rollout: _Rollout = []
    for line in lines:
        if rollout and not _continues(line, rollout[-1]):
            yield rollout
            rollout = []
        rollout.append(line)
    if rollout:
        yield rollout


def _continues(line: _Line, before: _Line) -> bool:
    """Return whether both lines belong to one rollout."""
    return (
        line.rollout is not None
        and (line.step, line.task, line.rollout) == (before.step, before.task, before.rollout)
        and line.sample > before.sample
    )


def _length(rollout: _Rollout) -> int:
    return sum(line.length for line in rollout)


def _chosen(rollouts: list[_Rollout], max_rollouts: int, max_bytes: int) -> list[_Rollout]:
    """Return as many groups as the limits allow, evenly over the run."""
    groups: dict[tuple[int, str], list[_Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout[0].step, rollout[0].task].append(rollout)
    number = max_rollouts / max(1, len(rollouts))
    size = max_bytes / max(1, sum(_length(rollout) for rollout in rollouts))
    share = min(1.0, number, size)
    chosen: list[_Rollout] = []
    seen = 0
    for group in groups.values():
        seen += len(group)
        if len(chosen) + len(group) <= seen * share:
            chosen += group
    return chosen


def _chunks(rollouts: Sequence[_Rollout]) -> Iterator[list[_Rollout]]:
    """Split the rollouts into chunks of about ``CHUNK_BYTES`` of neighbors."""
    ends = itertools.accumulate(_length(rollout) for rollout in rollouts)
    numbered = zip(ends, rollouts, strict=True)
    for _, some in itertools.groupby(numbered, key=lambda pair: pair[0] // CHUNK_BYTES):
        yield [rollout for _, rollout in some]


def _contents(folder: Path, rollouts: Sequence[_Rollout]) -> list[dict[str, Any]]:
    """Return the trained sequences of each rollout, and its conversation, if it has one."""
    found = []
    with (folder / ROLLOUTS).open("rb") as file:
        for rollout in rollouts:
            records = []
            for line in rollout:
                file.seek(line.start)
                records.append(json.loads(file.read(line.length)))
            found.append(
                {
                    "sequences": [_sequence(record) for record in records],
                    "conversation": records[0].get("conversation"),
                }
            )
    return found


def _sequence(record: dict[str, Any]) -> dict[str, Any]:
    arrays = {name: record[name] for name in ARRAYS}
    arrays |= {name: record[name] for name in OF_TRAINER if name in record}
    for name in arrays.keys() & ROUNDED:
        arrays[name] = [_rounded(number) for number in arrays[name]]
    return arrays | {"sample": record.get("sample", 0)}


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, ndigits=5)


def _embedded(name: str, value: Any) -> str:
    """Return data as an element that the browser does not run, in characters of base64 only."""
    packed = gzip.compress(json.dumps(value, separators=(",", ":")).encode(), compresslevel=6)
    text = base64.b64encode(packed).decode()
    return f'<script type="application/gzip" id="{name}">{text}</script>'
