"""The report of runs: one HTML file with their curves and rollouts, which needs no server.

A run's records are compressed into the page. Rollouts are compressed in chunks, which the page
unpacks when one of their rollouts is opened. ``report_page.html`` is the page itself;
``report_conversation.js`` is the part that shows an agent's rollout as a conversation.
"""

import base64
import gzip
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import attrs
import msgspec
import numpy as np

from primerl._common.files import whole_or_nothing
from primerl.track.rollout_files import RolloutFiles, SequenceLine, rollouts_of
from primerl.track.run_folder import (
    ARGS,
    EVALUATIONS,
    METRICS,
    REPORT,
    SUMMARY,
    TOKENS,
    complete_lines,
    read_json,
)
from primerl.track.verdict import OF_EVALUATION, verdict

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 19
"""Approximate size of a chunk that the page unpacks at once, in bytes of JSON."""

TOKEN_BYTES = 48  # approximate size of a token's entries of arrays in JSON

# The arrays of a trained sequence in a chunk; its other values are in the list of rollouts.
ARRAYS = ("token_ids", "loss_mask", "behavior_logprobs", "versions", "advantages")
OF_TRAINER = ("logprobs", "entropy")  # present if the loop passed them to Run.log
DIGITS = 5  # further digits are unreadable

_Converted = TypeVar("_Converted")
_Rollout = list[SequenceLine]
"""The trained sequences of a rollout: several if it has branches."""


def write_report(
    runs: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str] | None = None,
    *,
    max_rollouts: int = 10_000,
    max_bytes: int = 1 << 26,
) -> Path:
    """Write the report of one run, or of several to compare, as one HTML file.

    The runs may be finished, running or dead: the report shows what has been recorded so far. Only
    the rollouts that it shows are read. Damaged lines of metrics and evaluations are left out,
    which a warning says.

    Args:
        runs: the folders of the runs.
        path: the file to write; ``report.html`` in the first run's folder by default.
        max_rollouts: the most rollouts per run in the report. If there are more, whole groups are
            left out, evenly over the run, and the report says how many there were.
        max_bytes: the most bytes of a run's ``rollouts.jsonl`` and ``rollouts.bin`` in the report;
            enforced alike.

    Raises:
        ValueError: no folders are given, or a folder holds no run, or the record of a rollout is
            invalid.
    """
    if not runs:
        raise ValueError("no run is given; expected the folder of at least one run")
    folders = [Path(run) for run in runs]
    parts: list[str] = []
    for number, (folder, name) in enumerate(zip(folders, _names(folders), strict=True)):
        with RolloutFiles(folder) as recorded:
            groups = recorded.groups()
            shown = _chosen(groups, max_rollouts, max_bytes)
            lines = (recorded.lines(int(one["offset"]), int(one["bytes"])) for one in shown)
            chunks = list(_chunks([one for some in lines for one in rollouts_of(some)]))
            overview = _overview(folder, name, chunks, recorded=int(groups["rollouts"].sum()))
            parts.append(_embedded(f"run-{number}", json.dumps(overview).encode()))
            for place, chunk in enumerate(chunks):
                contents = msgspec.json.encode(_contents(recorded, chunk))  # NaN becomes null
                parts.append(_embedded(f"run-{number}-chunk-{place}", contents))
    page = _file("report_page.html").replace(
        "/* report_conversation.js */", _file("report_conversation.js")
    )
    to = folders[0] / REPORT if path is None else Path(path)
    with whole_or_nothing(to) as file:
        file.write(page.replace("<!-- data -->", "\n".join(parts)).encode())
    return to


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the name of each folder; if names repeat, the paths from the folder that has all."""
    paths = [folder.resolve() for folder in folders]
    names = [path.name for path in paths]
    if len(set(names)) == len(names):
        return names
    common = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(common)) for path in paths]


def _file(name: str) -> str:
    return files("primerl.track").joinpath(name).read_text(encoding="utf-8")


def _overview(
    folder: Path, name: str, chunks: Sequence[Sequence[_Rollout]], *, recorded: int
) -> dict[str, Any]:
    """Return what the page shows of a run before a rollout is opened."""
    rollouts = [rollout for chunk in chunks for rollout in chunk]
    firsts = [rollout[0] for rollout in rollouts]
    names = sorted({name for line in firsts for name in line.metrics})
    path = folder / SUMMARY
    summary = read_json(path) if path.exists() else {}
    args = read_json(folder / ARGS)
    steps = _with_evaluations(_readable(folder / METRICS, _step), folder)
    return {
        "name": name,
        "args": args,
        "summary": summary,
        "verdict": attrs.asdict(verdict(steps, args)),
        "metrics": _by_name(steps),
        "tokens": dict(_readable(folder / TOKENS, _token)),
        "recorded": recorded,
        "conversations": any(line.has_conversation for line in firsts),
        "rollouts": {
            "step": [line.step for line in firsts],
            "task": [line.task for line in firsts],
            "prompt": [line.prompt for line in firsts],
            "environment": [line.environment for line in firsts],
            "reward": [line.reward for line in firsts],
            "stop": [line.stop for line in firsts],
            "metrics": {name: [line.metrics.get(name) for line in firsts] for name in names},
            "tokens": [sum(line.tokens for line in rollout) for rollout in rollouts],
            "trained": [sum(line.trained for line in rollout) for rollout in rollouts],
            "chunk": [number for number, chunk in enumerate(chunks) for _ in chunk],
        },
    }


def _with_evaluations(steps: Iterable[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step, in order, with those of its evaluation.

    Most evaluations are written after later steps, and that of the final weights has no step.
    """
    by_step = {line["step"]: line for line in steps}
    for evaluation in _readable(folder / EVALUATIONS, _evaluation):
        step = evaluation["step"]
        by_step[step] = by_step.get(step, {}) | evaluation
    return [by_step[step] for step in sorted(by_step)]


def _readable(path: Path, convert: Callable[[Any], _Converted]) -> Iterator[_Converted]:
    """Yield each line of a JSON Lines file, converted; log which lines are damaged."""
    for number, (_, line) in enumerate(complete_lines(path), start=1):
        try:
            found = convert(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            text = "%s, line %d, is damaged, and is left out of the report: %r"
            logger.warning(text, path, number, error)
        else:
            yield found


def _step(line: dict[str, Any]) -> dict[str, Any]:
    if type(line["step"]) is not int:
        raise TypeError(f"its step is {line['step']!r:.80}, expected an integer")
    return line


def _evaluation(line: dict[str, Any]) -> dict[str, Any]:
    return {name: _step(line)[name] for name in OF_EVALUATION}


def _token(line: list[Any]) -> tuple[int, str]:
    token, text = line
    return int(token), str(text)


def _by_name(steps: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return a column for each metric; None at the steps that lack it."""
    names = dict.fromkeys(name for line in steps for name in line)
    return {name: [line.get(name) for line in steps] for name in names}


def _chosen(groups: np.ndarray, max_rollouts: int, max_bytes: int) -> np.ndarray:
    """Return as many groups as the limits allow, evenly over the run."""
    sizes = groups["bytes"] + groups["array_bytes"]
    counts = groups["rollouts"].tolist()
    number = max_rollouts / max(1, sum(counts))
    size = max_bytes / max(1, int(sizes.sum()))
    share = min(1.0, number, size)
    chosen = []
    seen = held = 0
    for place, count in enumerate(counts):
        seen += count
        if held + count <= seen * share:
            held += count
            chosen.append(place)
    return groups[chosen]


def _chunks(rollouts: Sequence[_Rollout]) -> Iterator[list[_Rollout]]:
    """Split the rollouts into chunks of about ``CHUNK_BYTES`` of neighbors."""
    sizes = (sum(line.length + TOKEN_BYTES * line.tokens for line in one) for one in rollouts)
    numbered = zip(itertools.accumulate(sizes), rollouts, strict=True)
    for _, some in itertools.groupby(numbered, key=lambda pair: pair[0] // CHUNK_BYTES):
        yield [rollout for _, rollout in some]


def _contents(recorded: RolloutFiles, rollouts: Sequence[_Rollout]) -> list[dict[str, Any]]:
    """Return the trained sequences of each rollout, and its conversation, if it has one."""
    found = []
    for rollout in rollouts:
        records = [recorded.record(line) for line in rollout]
        found.append(
            {
                "sequences": [_sequence(record) for record in records],
                "conversation": records[0].get("conversation"),
            }
        )
    return found


def _sequence(record: dict[str, Any]) -> dict[str, Any]:
    arrays = {name: record["arrays"][name] for name in ARRAYS}
    arrays |= {name: record["arrays"][name] for name in OF_TRAINER if name in record["arrays"]}
    return {name: _numbers(x) for name, x in arrays.items()} | {"sample": record.get("sample", 0)}


def _numbers(array: np.ndarray) -> list[Any]:
    if array.dtype.kind == "f":
        rounded: list[Any] = np.round(array.astype(np.float64), DIGITS).tolist()
        return rounded
    whole: list[Any] = array.astype(np.int64).tolist()
    return whole


def _embedded(name: str, data: bytes) -> str:
    """Return data as an element that the browser does not run, in characters of base64 only."""
    text = base64.b64encode(gzip.compress(data, compresslevel=4)).decode()
    return f'<script type="application/gzip" id="{name}">{text}</script>'
