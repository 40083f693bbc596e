"""Prefetching of recorded expert routes: reads the next batch's routes during the current batch."""

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

from primerl._common.host_memory import on_host, to_device
from primerl.replay.forcing import RouteCounts
from primerl.replay.recordings import RecordedRoutes
from primerl.replay.references import decode_inline, is_inline, parse_inline, read

log = logging.getLogger(__name__)


@runtime_checkable
class RoutedBatch(Protocol):
    """The fields of ``packing.PackedBatch`` that determine which routes it needs."""

    routes: str | None
    sample_ids: Int64[Tensor, " t"] | None
    position_ids: Int64[Tensor, " t"]


B = TypeVar("B", bound=RoutedBatch)


def fetch(
    batches: Iterable[B], *, counts: RouteCounts | None = None
) -> Iterator[tuple[B, Int16[Tensor, "t layers k"] | None]]:
    """Yield each batch with the recorded routes of its rows, which are read one batch ahead.

        for batch, rows in replay.fetch(batches, counts=counts):
            with replay.forced(model, rows, counts=counts):
                ...

    Every rank reads the rows of its own part of a batch, from the store that the sampler wrote to.
    If a token was recorded more than once, its first routes are used. Rows are -1 for tokens
    without recorded routes and for padding. If the routes of a sample are missing or damaged by
    now, the sample is counted and logged, and the router chooses its experts. (Rollouts with
    invalid routes were refused earlier.)

    Args:
        batches: the batches that ``parallel.scatter`` returned, on any device.
        counts: counts samples whose routes are lost.

    Returns:
        An iterator over ``(batch, rows)``; the rows are None for a batch whose samples have no
        references, so that ``forced`` lets the router choose.
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
    """Load the recorded routes of a batch's rows onto its device; return None if there are none.

    Raises:
        ValueError: the batch has references, but no ``sample_ids``.
    """
    if batch.routes is None:
        return None
    if batch.sample_ids is None:
        raise ValueError("a batch has routes, but no sample_ids; pass batches from packing.pack")
    sample_ids = on_host(batch.sample_ids).numpy()
    position_ids = on_host(batch.position_ids).numpy()
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
            log.warning(
                "a sample's routes are lost, so the router chooses its experts itself: %s", error
            )
            if counts is not None:
                counts.add_lost()
    if rows is None:
        return None
    return to_device(torch.from_numpy(rows), batch.position_ids.device)


def recorded_routes(references: Sequence[str], *, span: tuple[int, int]) -> list[RecordedRoutes]:
    """Read the routes of tokens ``span[0]`` to ``span[1] - 1``, in the order of the references.

    Args:
        references: references to routes, in the order in which they were recorded.
        span: the first token, and the one after the last.

    Raises:
        ValueError: there are no references, one is malformed, its data are damaged, or two are of
            different models.
        OSError: the data are missing, or their server can't be reached.
    """
    if not references:
        raise ValueError("a sample has no references to its routes; expected at least one")
    found = [read(reference, span=span) for reference in references]
    for one in found[1:]:
        _check_same_model(one.rows, found[0].rows)
    return found


def fill_rows(
    rows: Int16[np.ndarray, "t layers k"], found: Sequence[RecordedRoutes], *, start: int
) -> None:
    """Copy recorded routes into ``rows``, which begin at token ``start`` and are filled with -1.

    If several items of ``found`` have routes of the same token, those of the first are used.

    Raises:
        ValueError: the routes and ``rows`` have different layers or experts per token.
    """
    for number, one in enumerate(found):
        _check_same_model(one.rows, rows)
        part = rows[one.start - start :][: len(one.rows)]
        if number == 0:  # fast path: most samples have only one
            part[...] = one.rows
        else:
            gaps = part[..., 0] < 0
            part[gaps] = one.rows[gaps]


def _check_same_model(found: np.ndarray, rows: np.ndarray) -> None:
    if found.shape[1:] != rows.shape[1:]:
        raise ValueError(
            f"routes have shape [t, {found.shape[1]}, {found.shape[2]}], expected "
            f"[t, {rows.shape[1]}, {rows.shape[2]}] like the routes recorded before them"
        )


class _RowRun(msgspec.Struct):
    """Successive tokens of a sample with references, in successive rows of a batch."""

    first: int
    """The first row."""
    end: int
    """The row after the last one."""
    token: int
    """The index, within the sample, of the first row's token."""
    references: list[str]

    @property
    def is_inline(self) -> bool:
        """Whether a single inline reference holds the routes, as for most short samples."""
        return len(self.references) == 1 and is_inline(self.references[0])


def _runs(
    sample_ids: np.ndarray, position_ids: np.ndarray, references: Mapping[str, list[str]]
) -> list[_RowRun]:
    """Split a batch into runs; padding and samples without references are in no run."""
    following = (np.diff(sample_ids) == 0) & (np.diff(position_ids) == 1)
    firsts = np.concatenate([[0], 1 + np.flatnonzero(~following)])
    bounds = pairwise([*firsts.tolist(), len(sample_ids)])
    samples = sample_ids[firsts].tolist()
    tokens = position_ids[firsts].tolist()
    return [
        _RowRun(first=first, end=end, token=token, references=references[str(sample)])
        for (first, end), sample, token in zip(bounds, samples, tokens, strict=True)
        if str(sample) in references
    ]


def _inline_rows(runs: Sequence[_RowRun], count: int) -> np.ndarray | None:
    """Decode the inline routes of some runs into the rows of a batch; None if one is damaged.

    All are decoded together, which is faster. If that fails, the caller reads each run on its own,
    so that only the damaged sample is lost.
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
