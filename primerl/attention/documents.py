"""Find the documents in a pack from position ids, and lay them out for attention kernels.

A ``Layout`` stores their locations in tensors, so that a compiled model works for every pack.
"""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import attrs
import numpy as np
import torch
import torch._dynamo
from jaxtyping import Int
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from primerl._common.host_memory import on_host, to_device

T = TypeVar("T")
P = ParamSpec("P")


class Document(NamedTuple):
    """A document of a pack: tokens shared with other documents, then rows ``begin .. end - 1``."""

    begin: int
    end: int
    prefix: tuple[tuple[int, int], ...] = ()
    """Ranges of rows in other documents that hold this document's first tokens, in order."""

    @property
    def shared(self) -> int:
        """Number of the document's tokens that are stored in rows of other documents."""
        return sum(end - begin for begin, end in self.prefix)

    @property
    def length(self) -> int:
        """Number of the document's tokens, including shared tokens."""
        return self.shared + self.end - self.begin

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """All ranges of rows that hold the document's tokens, in order."""
        return (*self.prefix, (self.begin, self.end))


class Span(NamedTuple):
    """A part of a document: query rows ``begin .. end - 1`` and the key rows that they see.

    The last query sees all keys, and each earlier query sees one key less than the query after it.
    Queries and keys may be rows of different tensors.
    """

    begin: int
    end: int
    keys: tuple[tuple[int, int], ...]
    """Ranges of key rows. The last range ends with the tokens of the queries themselves."""

    @property
    def seen(self) -> int:
        """Number of keys that the last query sees."""
        return sum(end - begin for begin, end in self.keys)


Spans = tuple[Document, ...] | tuple[Span, ...]


# Not a tuple: FSDP, and other code that passes a layout on, must treat it as one value. A compiled
# model reads only the tensors, and does not specialize on their contents.
@attrs.frozen(eq=False)
class Layout:
    """Spans of a batch in the form that attention kernels need; ``lay_out`` makes it."""

    spans: tuple[Any, ...]
    """Documents, or parts of documents."""
    max_keys: int
    """The maximum number of keys that a query sees."""
    max_queries: int
    """The maximum number of queries in a span."""
    plan: Tensor
    """Groups of spans of equal lengths, encoded in a CPU tensor that ``kernels`` decodes."""
    query_ends: Tensor
    """``[spans + 1]``, int32: cumulative numbers of queries."""
    key_ends: Tensor
    """``[spans + 1]``, int32: cumulative numbers of keys."""
    gathered: Tensor | None
    """Rows of all keys, in the order of the spans; None if the keys already lie in that order."""


def lay_out(spans: Spans, device: torch.device | str = "cpu") -> Layout:
    """Make the layout of spans whose queries lie end to end.

    Args:
        spans: documents, or parts of documents, in order.
        device: the device of the queries.
    """
    begins = np.array([one.begin for one in spans], int)
    lengths = np.array([one.end for one in spans], int) - begins
    seen = np.array([sum(end - begin for begin, end in one.keys) for one in spans], int)
    ranges = np.array([some for one in spans for some in one.keys], int).reshape(-1, 2)
    keys = concatenated(ranges[:, 0], ranges[:, 1] - ranges[:, 0])
    alike, run_of = np.unique(np.stack([lengths, seen]), axis=1, return_inverse=True)
    run_of = run_of.reshape(-1)
    order = np.argsort(run_of, kind="stable")
    first_keys = np.cumsum(seen) - seen
    plan = [
        np.array([alike.shape[1]]),
        np.stack([np.bincount(run_of), *alike], axis=1).reshape(-1),
        concatenated(begins[order], lengths[order]),
        keys[concatenated(first_keys[order], seen[order])],
    ]
    ends = [np.concatenate([[0], np.cumsum(counts)]) for counts in (lengths, seen)]
    in_place = (keys == np.arange(len(keys))).all()
    return Layout(
        spans=spans,
        max_keys=int(seen.max(initial=0)),
        max_queries=int(lengths.max(initial=0)),
        plan=_dynamic_tensor(np.concatenate(plan)),
        query_ends=_dynamic_tensor(ends[0].astype(np.int32), device),
        key_ends=_dynamic_tensor(ends[1].astype(np.int32), device),
        gathered=None if in_place else _dynamic_tensor(keys, device),
    )


def _dynamic_tensor(x: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
    """Make a tensor on whose length a compiled model does not specialize."""
    with torch.inference_mode(False):  # backward passes can't save inference tensors
        tensor = to_device(torch.from_numpy(x), device)
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


def concatenated(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate the row indices of ranges, given by their begins and lengths."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(begins - before, lengths) + np.arange(lengths.sum())


def find_documents(position_ids: Int[Tensor, "*b t"]) -> tuple[Document, ...]:
    """Find the documents of a pack from the positions of its tokens.

    A document begins wherever a position does not follow the position before it. If it begins at
    position n > 0, it shares the first n tokens of the document before it, which may itself share
    tokens of an earlier document. So documents with a common beginning are the branches of a tree,
    laid out depth first. In a batch, each row is a pack, and packs lie end to end.

    Args:
        position_ids: the position of each token in its document.

    Raises:
        ValueError: there is no token, the first position is not 0, or a document shares more tokens
            than the document before it has.
    """
    if position_ids.numel() == 0:
        raise ValueError("position_ids is empty; expected the positions of at least one token")
    position_ids = on_host(position_ids)
    if position_ids[..., 0].any():
        raise ValueError(
            "position_ids must begin with 0, because documents are packed whole, one after another"
        )
    position_ids = position_ids.flatten()  # each row of a batch begins with 0
    jumps = position_ids[1:] != position_ids[:-1] + 1
    begins = [0, *((jumps.nonzero().flatten() + 1).tolist())]
    ends = [*begins[1:], position_ids.numel()]
    documents: list[Document] = []
    for begin, end, shared in zip(begins, ends, position_ids[begins].tolist(), strict=True):
        room = documents[-1].length if documents else 0
        if not 0 <= shared <= room:
            raise ValueError(
                f"position_ids[{begin}] is {shared}, the number of tokens shared with the document "
                f"before; expected 0 to {room}, the length of that document"
            )
        prefix = _first_rows(documents[-1].keys, shared) if shared else ()
        documents.append(Document(begin, end, prefix))
    return tuple(documents)


def _first_rows(ranges: tuple[tuple[int, int], ...], count: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges that hold the first ``count`` rows of ``ranges``."""
    first = []
    for begin, end in ranges:
        if count > 0:
            first.append((begin, min(end, begin + count)))
            count -= end - begin
    return tuple(first)


def once_per_tensor(
    find: Callable[Concatenate[Tensor, P], T],
) -> Callable[Concatenate[Tensor, P], T]:
    """Cache ``find(x, ...)`` for each tensor ``x``, until it is freed or modified in place."""
    known = WeakTensorKeyDictionary()

    @functools.wraps(find)
    def found(x: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if x.is_inference():  # no _version, so writes can't be detected
            return find(x, *args, **kwargs)
        key = (x._version, args, kwargs)
        last = known.get(x)  # type: ignore[no-untyped-call]
        if last is None or last[0] != key:
            last = key, find(x, *args, **kwargs)
            known[x] = last
        result: T = last[1]
        return result

    return found


@once_per_tensor
def token_positions(
    plan: Tensor,  # noqa: ARG001  for whose lifetime the result is cached
    spans: tuple[Any, ...],
    device: torch.device,
) -> Int[Tensor, " t"]:
    """Return the position of each query of spans in its document."""
    lengths = np.array([one.end - one.begin for one in spans], int)
    seen = np.array([sum(end - begin for begin, end in one.keys) for one in spans], int)
    return to_device(torch.from_numpy(concatenated(seen - lengths, lengths)), device)


@once_per_tensor
def batch_layout(
    position_ids: Int[Tensor, "_ t"], batch: int, device: torch.device | str
) -> Layout:
    """Make the layout of a batch's documents.

    ``position_ids`` has one row per row of the batch, or a single row that applies to all. If the
    positions within each row are consecutive, each row is one document, whatever its first
    position. Otherwise, ``find_documents`` finds the documents.
    """
    position_ids, length = on_host(position_ids), position_ids.shape[1]
    if length and bool((position_ids.diff() == 1).all()):
        begins = range(0, batch * length, length)
        return lay_out(tuple(Document(begin, begin + length) for begin in begins), device)
    return lay_out(find_documents(position_ids.expand(batch, -1)), device)


def spans_within(documents: tuple[Document, ...], first: int, rows: int) -> list[Span]:
    """Return the parts of documents in rows ``first .. first + rows - 1``.

    Query rows are counted from ``first``, key rows from the start of the pack.
    """
    parts = []
    for one in documents:
        begin, end = max(one.begin, first), min(one.end, first + rows)
        if begin < end:
            parts.append(Span(begin - first, end - first, (*one.prefix, (one.begin, end))))
    return parts
