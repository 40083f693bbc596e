"""Documents of a pack: where they lie, found from position ids, and laid out for attention.

A ``Layout`` holds where they lie in tensors, so a compiled model serves every pack.
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

T = TypeVar("T")
P = ParamSpec("P")


class Document(NamedTuple):
    """Rows ``begin .. end - 1`` of a pack, preceded by tokens that it shares with others."""

    begin: int
    end: int
    prefix: tuple[tuple[int, int], ...] = ()
    """Ranges of rows of other documents, which hold its first tokens, in order."""

    @property
    def shared(self) -> int:
        """Number of its tokens that rows of other documents hold."""
        return sum(end - begin for begin, end in self.prefix)

    @property
    def length(self) -> int:
        """Number of its tokens, shared ones included."""
        return self.shared + self.end - self.begin

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """The ranges of rows that hold its tokens."""
        return (*self.prefix, (self.begin, self.end))


class Span(NamedTuple):
    """A part of a document: query rows ``begin .. end - 1`` and the key rows that they see.

    The last query sees all keys, and each query one key less than the next. Queries and keys may
    be rows of different tensors.
    """

    begin: int
    end: int
    keys: tuple[tuple[int, int], ...]
    """Ranges of key rows; the last ends with the tokens of the queries themselves."""

    @property
    def seen(self) -> int:
        """Number of keys that the last query sees."""
        return sum(end - begin for begin, end in self.keys)


Spans = tuple[Document, ...] | tuple[Span, ...]


# Not a tuple, so that FSDP and others that pass it on treat it as one value. A compiled model reads
# only its tensors, and does not depend on what they contain.
@attrs.frozen(eq=False)
class Layout:
    """Spans as the attention kernels take them: made once per batch by ``lay_out``."""

    spans: tuple[Any, ...]
    """Documents, or parts of documents."""
    max_keys: int
    """The most keys that a query sees."""
    max_queries: int
    """The most queries of a span."""
    plan: Tensor
    """Spans grouped by equal lengths, on the CPU: what ``kernels`` reads as runs."""
    query_ends: Tensor
    """``[spans + 1]``, int32: cumulative numbers of queries."""
    key_ends: Tensor
    """``[spans + 1]``, int32: cumulative numbers of keys."""
    gathered: Tensor | None
    """The rows of all keys in the order of the spans; None if they lie in that order already."""


def lay_out(spans: Spans, device: torch.device | str = "cpu") -> Layout:
    """The layout of spans whose queries lie end to end.

    Args:
        spans: documents, or parts of them, in order.
        device: of the queries.
    """
    begins = np.array([one.begin for one in spans], int)
    lengths = np.array([one.end for one in spans], int) - begins
    seen = np.array([sum(end - begin for begin, end in one.keys) for one in spans], int)
    ranges = np.array([some for one in spans for some in one.keys], int).reshape(-1, 2)
    keys = _concatenated(ranges[:, 0], ranges[:, 1] - ranges[:, 0])
    alike, run_of = np.unique(np.stack([lengths, seen]), axis=1, return_inverse=True)
    run_of = run_of.reshape(-1)
    order = np.argsort(run_of, kind="stable")
    first_keys = np.cumsum(seen) - seen
    plan = [
        np.array([alike.shape[1]]),
        np.stack([np.bincount(run_of), *alike], axis=1).reshape(-1),
        _concatenated(begins[order], lengths[order]),
        keys[_concatenated(first_keys[order], seen[order])],
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
    """A tensor whose length a compiled model does not specialize on."""
    with torch.inference_mode(False):  # otherwise a later backward pass could not save it
        tensor = torch.from_numpy(x).to(device)
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


def _concatenated(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The rows of all ranges, each of ``lengths`` rows from ``begins`` on."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(begins - before, lengths) + np.arange(lengths.sum())


def find_documents(position_ids: Int[Tensor, "*b t"]) -> tuple[Document, ...]:
    """The documents of a pack: one begins wherever a position does not follow the one before.

    One that begins at position n > 0 shares the first n tokens of the document before it, which
    may itself share those of an earlier one: documents with a common beginning are the branches of
    a tree, laid out depth first. In a batch each row is a pack, and packs lie end to end.

    Args:
        position_ids: the place of each token in its document.

    Raises:
        ValueError: the first position is not 0, or a document shares more tokens than there are.
    """
    if position_ids.numel() == 0 or position_ids[..., 0].any():
        raise ValueError(
            "position_ids must begin with 0: documents are packed whole, one after the other"
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
                f"position_ids[{begin}] is {shared}: a document that begins there continues the "
                f"one before it, which has {room} tokens"
            )
        prefix = _first_rows(documents[-1].keys, shared) if shared else ()
        documents.append(Document(begin, end, prefix))
    return tuple(documents)


def _first_rows(ranges: tuple[tuple[int, int], ...], count: int) -> tuple[tuple[int, int], ...]:
    """The ranges that hold the first ``count`` rows of ``ranges``."""
    first = []
    for begin, end in ranges:
        if count > 0:
            first.append((begin, min(end, begin + count)))
            count -= end - begin
    return tuple(first)


def once_per_tensor(
    find: Callable[Concatenate[Tensor, P], T],
) -> Callable[Concatenate[Tensor, P], T]:
    """``find(x, ...)``, computed once while ``x`` lives and is not written to."""
    known = WeakTensorKeyDictionary()

    @functools.wraps(find)
    def found(x: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if x.is_inference():  # it has no version that would show a write
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
def batch_layout(
    position_ids: Int[Tensor, "_ t"], batch: int, device: torch.device | str
) -> Layout:
    """The layout of the documents of a batch, whose rows may share one row of positions.

    As of ``find_documents``, but rows of successive positions are documents wherever they begin.
    """
    length = position_ids.shape[1]
    if length and bool((position_ids.diff() == 1).all()):
        begins = range(0, batch * length, length)
        return lay_out(tuple(Document(begin, begin + length) for begin in begins), device)
    return lay_out(find_documents(position_ids.expand(batch, -1)), device)


def spans_within(documents: tuple[Document, ...], first: int, rows: int) -> list[Span]:
    """The parts of documents in ``rows`` rows from ``first`` on, as queries counted from there."""
    parts = []
    for one in documents:
        begin, end = max(one.begin, first), min(one.end, first + rows)
        if begin < end:
            parts.append(Span(begin - first, end - first, (*one.prefix, (one.begin, end))))
    return parts
