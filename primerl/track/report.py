"""The report of runs: one HTML file with their curves and rollouts, which needs no server.

What a run has recorded is compressed into the page, the rollouts in chunks that the page unpacks
when one of them is opened. ``report_page.html`` is the page itself.
"""

import base64
import gzip
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import attrs

from primerl._files import whole_or_nothing
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
"""Of rollouts as they were recorded, that the page unpacks at once."""

# What a chunk has of a rollout; the list in front of it has the rest.
ARRAYS = ("token_ids", "loss_mask", "behavior_logprobs", "versions", "advantages")
OF_TRAINER = ("logprobs", "entropy")  # where the loop passes them to the run
ROUNDED = ("behavior_logprobs", "advantages", *OF_TRAINER)  # no more digits than can be read


@attrs.frozen
class _Line:
    """Where a rollout was recorded, and what a list of rollouts shows of it."""

    start: int
    length: int
    step: int
    task: str
    environment: str
    reward: float
    stop: str
    tokens: int
    trained: int


def write_report(
    runs: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str] | None = None,
    *,
    max_rollouts: int = 10_000,
    max_bytes: int = 1 << 28,
) -> Path:
    """Write the report of one run, or of several to compare, as one HTML file.

    The runs may be finished, running or dead: what is recorded so far is shown.

    Args:
        runs: their folders.
        path: of the file; ``report.html`` in the first run's folder by default.
        max_rollouts: the most rollouts of a run that the report has. Of more, whole groups are
            left out evenly over the run, and the report says how many there were.
        max_bytes: the most of a run's ``rollouts.jsonl`` that the report has, in the same way.

    Raises:
        ValueError: no folders are given, or one holds no run, or other records than a run's.
    """
    if not runs:
        raise ValueError("no run is given; expected the folder of at least one")
    folders = [Path(run) for run in runs]
    parts: list[str] = []
    for number, folder in enumerate(folders):
        lines = _chosen(_rollout_lines(folder), max_rollouts, max_bytes)
        chunks = list(_chunks(lines))
        parts.append(_embedded(f"run-{number}", _overview(folder, chunks)))
        for place, chunk in enumerate(chunks):
            parts.append(_embedded(f"run-{number}-chunk-{place}", _arrays(folder, chunk)))
    page = files("primerl.track").joinpath("report_page.html").read_text(encoding="utf-8")
    to = folders[0] / REPORT if path is None else Path(path)
    with whole_or_nothing(to) as file:
        file.write(page.replace("<!-- data -->", "\n".join(parts)).encode())
    return to


def _overview(folder: Path, chunks: Sequence[Sequence[_Line]]) -> dict[str, Any]:
    """What the page shows of a run before a rollout is opened."""
    lines = [line for chunk in chunks for line in chunk]
    chunk_of = [number for number, chunk in enumerate(chunks) for _ in chunk]
    path = folder / SUMMARY
    summary = read_json(path) if path.exists() else {}
    steps = [json.loads(line) for _, line in complete_lines(folder / METRICS)]
    return {
        "name": folder.resolve().name,
        "args": read_json(folder / ARGS),
        "summary": summary,
        "metrics": _by_name([*steps, *_last_evaluation(steps, summary)]),
        "tokens": dict(json.loads(line) for _, line in complete_lines(folder / TOKENS)),
        "recorded": sum(1 for _ in complete_lines(folder / ROLLOUTS)),
        "rollouts": {
            "step": [line.step for line in lines],
            "task": [line.task for line in lines],
            "environment": [line.environment for line in lines],
            "reward": [line.reward for line in lines],
            "stop": [line.stop for line in lines],
            "tokens": [line.tokens for line in lines],
            "trained": [line.trained for line in lines],
            "chunk": chunk_of,
        },
    }


def _last_evaluation(
    steps: Sequence[dict[str, Any]], summary: dict[str, Any]
) -> list[dict[str, Any]]:
    """The evaluation of the trained weights, which no step has; empty if there was none."""
    score = summary.get("eval_after")
    known = [line["evaluation"] for line in steps if line.get("evaluation") is not None]
    if not summary.get("finished") or score is None or known[-1:] == [score]:
        return []
    return [{"step": summary["steps"], "evaluation": score}]


def _by_name(steps: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """A column for each metric; None at the steps that lack it."""
    names = dict.fromkeys(name for line in steps for name in line)
    return {name: [line.get(name) for line in steps] for name in names}


def _rollout_lines(folder: Path) -> list[_Line]:
    lines = []
    for start, text in complete_lines(folder / ROLLOUTS):
        try:
            lines.append(_line(start, text))
        except (ValueError, KeyError, TypeError) as error:
            where = f"{folder / ROLLOUTS}, line {len(lines) + 1}"
            raise ValueError(f"{where}, is no record of a rollout: {error!r}") from None
    return lines


def _line(start: int, text: bytes) -> _Line:
    record = json.loads(text)
    return _Line(
        start=start,
        length=len(text),
        step=record["step"],
        task=record["task_id"],
        environment=record["environment"],
        reward=record["reward"],
        stop=record["stop"],
        tokens=len(record["token_ids"]),
        trained=sum(record["loss_mask"]),
    )


def _chosen(lines: list[_Line], max_rollouts: int, max_bytes: int) -> list[_Line]:
    """As many groups as the bounds allow, evenly over the run."""
    groups: dict[tuple[int, str], list[_Line]] = defaultdict(list)
    for line in lines:
        groups[line.step, line.task].append(line)
    rollouts = max_rollouts / max(1, len(lines))
    size = max_bytes / max(1, sum(line.length for line in lines))
    share = min(1.0, rollouts, size)
    chosen: list[_Line] = []
    seen = 0
    for group in groups.values():
        seen += len(group)
        if len(chosen) + len(group) <= seen * share:
            chosen += group
    return chosen


def _chunks(lines: Sequence[_Line]) -> Iterator[list[_Line]]:
    """Neighbors of about ``CHUNK_BYTES`` together."""
    ends = itertools.accumulate(line.length for line in lines)
    numbered = zip(ends, lines, strict=True)
    for _, some in itertools.groupby(numbered, key=lambda pair: pair[0] // CHUNK_BYTES):
        yield [line for _, line in some]


def _arrays(folder: Path, lines: Sequence[_Line]) -> list[dict[str, Any]]:
    found = []
    with (folder / ROLLOUTS).open("rb") as file:
        for line in lines:
            file.seek(line.start)
            record = json.loads(file.read(line.length))
            arrays = {name: record[name] for name in ARRAYS}
            arrays |= {name: record[name] for name in OF_TRAINER if name in record}
            for name in arrays.keys() & ROUNDED:
                arrays[name] = [_rounded(number) for number in arrays[name]]
            found.append(arrays)
    return found


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, ndigits=5)


def _embedded(name: str, value: Any) -> str:
    """Data as an element of the page that the browser does not run, in letters and digits only."""
    packed = gzip.compress(json.dumps(value, separators=(",", ":")).encode(), compresslevel=6)
    text = base64.b64encode(packed).decode()
    return f'<script type="application/gzip" id="{name}">{text}</script>'
