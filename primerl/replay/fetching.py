"""From references to the rows that a rank forces: read while the batch before computes."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int16, Int64
from torch import Tensor

from primerl.replay.counts import RouteCounts
from primerl.replay.inline import decode_inline, is_inline, parse_inline
from primerl.replay.reading import read
from primerl.replay.recordings import RecordedRoutes

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
    references: dict[str, list[str]] = json.loads(batch.routes)
    inline = _inline_routes(references)
    sample_ids = batch.sample_ids.numpy(force=True)
    position_ids = batch.position_ids.numpy(force=True)
    rows: np.ndarray | None = None
    for first, end in _runs(sample_ids, position_ids):
        own = references.get(str(sample_ids[first]))
        if own is None:
            continue  # it fills up, or nothing was recorded
        token = int(position_ids[first])
        try:
            found = recorded_routes(own, span=(token, token + end - first), inline=inline)
            if rows is None:
                rows = np.full((len(sample_ids), *found[0].rows.shape[1:]), -1, np.int16)
            fill_rows(rows[first:end], found, start=token)
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


def recorded_routes(
    references: Sequence[str],
    *,
    span: tuple[int, int],
    inline: Mapping[str, RecordedRoutes] | None = None,
) -> list[RecordedRoutes]:
    """The routes of tokens ``span[0]`` to ``span[1] - 1``, in the order of their references.

    Args:
        references: to them, in the order in which they were recorded.
        span: of tokens.
        inline: what some of the references hold, where it was decoded before.

    Raises:
        ValueError: a reference is not one, its data are damaged, two are of different models, or
            there are none.
        OSError: the data are gone, or their server can't be reached.
    """
    if not references:
        raise ValueError("a sample has no references to its routes")
    found = []
    for reference in references:
        known = None if inline is None else inline.get(reference)
        found.append(read(reference, span=span) if known is None else known.within(span))
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


def _runs(sample_ids: np.ndarray, position_ids: np.ndarray) -> list[tuple[int, int]]:
    """The first row, and the one after the last, of each run of a sample's successive tokens."""
    following = (np.diff(sample_ids) == 0) & (np.diff(position_ids) == 1)
    bounds = [0, *(1 + np.flatnonzero(~following)).tolist(), len(sample_ids)]
    return list(pairwise(bounds))


def _inline_routes(references: Mapping[str, Sequence[str]]) -> dict[str, RecordedRoutes]:
    """What the inline ones of a batch's references hold, decoded together; none if one is bad.

    Each is then read on its own, where the bad one is a lost sample.
    """
    inline = [one for own in references.values() for one in own if is_inline(one)]
    try:
        found = decode_inline([parse_inline(one) for one in inline])
    except ValueError:
        return {}
    return dict(zip(inline, found, strict=True))
