"""From references to the rows that a rank forces: read while the batch before computes."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np
import torch
from jaxtyping import Int16, Int64
from torch import Tensor

from primerl.replay.forcing import RouteCounts
from primerl.replay.recordings import RecordedRoutes
from primerl.replay.references import decode_inline, is_inline, parse_inline, read

log = logging.getLogger(__name__)


@runtime_checkable
class RoutedBatch(Protocol):
    """The fields of ``packing.PackedBatch`` that say which rows it needs."""

    routes: str | None
    sample_ids: Int64[Tensor, " t"] | None
    position_ids: Int64[Tensor, " t"]


B = TypeVar("B", bound=RoutedBatch)


def fetch(
    batches: Iterable[B], *, counts: RouteCounts | None = None
) -> Iterator[tuple[B, Int16[Tensor, "t layers k"] | None]]:
    """Each batch with the recorded routes of its rows, which are read one batch ahead.

        for batch, rows in replay.fetch(batches, counts=counts):
            with replay.forced(model, rows, counts=counts):
                ...

    Every rank reads the rows of its own part of a batch, from where the sampler's side put them.
    What was recorded first for a token wins; -1 where nothing was, and for rows that fill up. A
    sample whose routes are gone or damaged by now has none: it is counted and logged, and the
    router chooses. (Samples without valid routes were refused earlier, as rollouts.)

    Args:
        batches: of ``parallel.scatter``, on any device.
        counts: where samples are counted whose routes are lost.

    Returns:
        An iterator over ``(batch, rows)``; the rows are None for a batch whose samples have no
        references, which ``forced`` leaves to the router.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="primerl-routes") as thread:
        waiting = None
        for batch in batches:
            following = batch, thread.submit(batch_rows, batch, counts)
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = following
        if waiting is not None:
            yield waiting[0], waiting[1].result()


def batch_rows(
    batch: RoutedBatch, counts: RouteCounts | None = None
) -> Int16[Tensor, "t layers k"] | None:
    """The recorded routes of a batch's rows, on its device; None if it has no references.

    Raises:
        ValueError: the batch has references, but no ``sample_ids``.
    """
    if batch.routes is None:
        return None
    if batch.sample_ids is None:
        raise ValueError("a batch has routes, but no sample_ids; expected one that pack returned")
    sample_ids = batch.sample_ids.numpy(force=True)
    position_ids = batch.position_ids.numpy(force=True)
    runs = _runs(sample_ids, position_ids, json.loads(batch.routes))
    rows = _inline_rows([run for run in runs if run.is_inline], len(sample_ids))
    rest = runs if rows is None else [run for run in runs if not run.is_inline]
    for run in rest:
        try:
            span = (run.token, run.token + run.end - run.first)
            found = recorded_routes(run.references, span=span)
            if rows is None:
                rows = np.full((len(sample_ids), *found[0].rows.shape[1:]), -1, np.int16)
            fill_rows(rows[run.first : run.end], found, start=run.token)
        except (OSError, ValueError, RuntimeError) as error:
            log.warning("the expert routes of a sample are lost: %s", error)
            if counts is not None:
                counts.add_lost()
    if rows is None:
        return None
    on_host = torch.from_numpy(rows)
    device = batch.position_ids.device
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)


def recorded_routes(references: Sequence[str], *, span: tuple[int, int]) -> list[RecordedRoutes]:
    """The routes of tokens ``span[0]`` to ``span[1] - 1``, in the order of their references.

    Args:
        references: to them, in the order in which they were recorded.
        span: of tokens.

    Raises:
        ValueError: a reference is not one, its data are damaged, two are of different models, or
            there are none.
        OSError: the data are gone, or their server can't be reached.
    """
    if not references:
        raise ValueError("a sample has no references to its routes")
    found = [read(reference, span=span) for reference in references]
    for one in found[1:]:
        _check_same_model(one.rows, found[0].rows)
    return found


def fill_rows(
    rows: Int16[np.ndarray, "t layers k"], found: Sequence[RecordedRoutes], *, start: int
) -> None:
    """Fill rows that are all -1, of tokens from ``start`` on; what is first for a token wins.

    Raises:
        ValueError: the routes are of another model than the rows.
    """
    for number, one in enumerate(found):
        _check_same_model(one.rows, rows)
        part = rows[one.start - start :][: len(one.rows)]
        if number == 0:  # most samples have no other, and a mask takes longer
            part[...] = one.rows
        else:
            gaps = part[..., 0] < 0
            part[gaps] = one.rows[gaps]


def _check_same_model(found: np.ndarray, rows: np.ndarray) -> None:
    if found.shape[1:] != rows.shape[1:]:
        raise ValueError(
            f"routes [t, {found.shape[1]}, {found.shape[2]}], expected "
            f"[t, {rows.shape[1]}, {rows.shape[2]}] as of what was recorded before"
        )


class _Run(msgspec.Struct):
    """Successive tokens of a sample that has references, in successive rows of a batch."""

    first: int
    """The first row."""
    end: int
    """The row after the last one."""
    token: int
    """The place in its sample of the token in the first row."""
    references: list[str]

    @property
    def is_inline(self) -> bool:
        """Whether its routes are in a single reference: those of most samples, if of any."""
        return len(self.references) == 1 and is_inline(self.references[0])


def _runs(
    sample_ids: np.ndarray, position_ids: np.ndarray, references: Mapping[str, list[str]]
) -> list[_Run]:
    """Rows that fill up, and samples of which nothing was recorded, are in none."""
    following = (np.diff(sample_ids) == 0) & (np.diff(position_ids) == 1)
    firsts = np.concatenate([[0], 1 + np.flatnonzero(~following)])
    bounds = pairwise([*firsts.tolist(), len(sample_ids)])
    samples = sample_ids[firsts].tolist()
    tokens = position_ids[firsts].tolist()
    return [
        _Run(first=first, end=end, token=token, references=references[str(sample)])
        for (first, end), sample, token in zip(bounds, samples, tokens, strict=True)
        if str(sample) in references
    ]


def _inline_rows(runs: Sequence[_Run], count: int) -> np.ndarray | None:
    """The rows of a batch, with the inline routes of some runs; None if one of them is bad.

    All are decoded together, which is faster. If that fails, each is read on its own, and only the
    bad one is a lost sample.
    """
    try:
        parts = [parse_inline(run.references[0]) for run in runs]
        if not parts:
            return None
        found, _ = decode_inline(parts)
    except ValueError:
        return None
    lengths = np.array([part.end - part.start for part in parts])
    firsts = np.array([run.first for run in runs])
    ends = np.array([run.end for run in runs])
    starts = firsts + [part.start - run.token for part, run in zip(parts, runs, strict=True)]
    place = np.arange(len(found)) + np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
    inside = (place >= np.repeat(firsts, lengths)) & (place < np.repeat(ends, lengths))
    rows = np.full((count, *found.shape[1:]), -1, np.int16)
    rows[place[inside]] = found[inside]
    return rows
