"""Division of a pack into short documents, whose queries see all keys, and longer ones."""

import attrs
import numpy as np
import torch
from torch import Tensor

from primerl._common.host_memory import to_device
from primerl.attention.documents import Layout, Span, concatenated, lay_out, once_per_tensor


@attrs.frozen(kw_only=True, eq=False)
class DividedSpans:
    """The spans of at most ``index_topk`` tokens, and the longer ones; rows are None for all."""

    short: Layout | None
    """Layout of the short spans, in which only the rows of these spans are counted."""
    short_rows: Tensor | None
    short_keys: Tensor | None
    long_rows: Tensor | None
    starts: Tensor | None
    """For each query of a long span, the place in ``table`` of its document's first key."""
    table: Tensor
    """Rows of the keys of all long spans."""
    inverse: Tensor
    """Where each query is in the concatenation of short and long spans."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
@once_per_tensor  # all layers have the same spans
def divide_spans(
    plan: Tensor,  # noqa: ARG001  for whose lifetime the result is cached
    spans: tuple[Span, ...],
    most: int,
    device: torch.device,
) -> DividedSpans:
    """Divide spans into those that see at most ``most`` keys (any number if 0), and the others."""
    short = [one for one in spans if not 0 < most < one.seen]
    long = [one for one in spans if 0 < most < one.seen]
    short_rows, long_rows = _query_rows(short), _query_rows(long)
    short_keys = np.unique(_key_rows(short))  # sorted
    table, seen = _key_rows(long), [one.seen for one in long]
    starts = np.repeat(np.cumsum([0, *seen])[:-1], [one.end - one.begin for one in long])
    order = np.concatenate([short_rows, long_rows])

    def tensor(x: np.ndarray) -> Tensor:
        with torch.inference_mode(False):  # backward passes can't save inference tensors
            return to_device(torch.from_numpy(x.astype(np.int32)), device)

    return DividedSpans(
        short=lay_out(_compacted(short, short_keys) if long else spans, device) if short else None,
        short_rows=tensor(short_rows) if long else None,
        short_keys=tensor(short_keys) if long else None,
        long_rows=tensor(long_rows) if short else None,
        starts=tensor(starts) if long else None,
        table=tensor(table),
        inverse=tensor(np.argsort(order)),
    )


def _query_rows(spans: list[Span]) -> np.ndarray:
    begins = np.array([one.begin for one in spans], int)
    return concatenated(begins, np.array([one.end for one in spans], int) - begins)


def _key_rows(spans: list[Span]) -> np.ndarray:
    ranges = np.array([some for one in spans for some in one.keys], int).reshape(-1, 2)
    return concatenated(ranges[:, 0], ranges[:, 1] - ranges[:, 0])


def _compacted(spans: list[Span], keys: np.ndarray) -> tuple[Span, ...]:
    """Number the queries of spans, and the ascending rows ``keys`` that they see, from 0 on."""
    compacted, begin = [], 0
    for one in spans:
        end = begin + one.end - one.begin
        firsts = np.searchsorted(keys, [first for first, _ in one.keys]).tolist()
        ranges = zip(firsts, one.keys, strict=True)
        moved = tuple((new, new + last - first) for new, (first, last) in ranges)
        compacted.append(Span(begin, end, moved))
        begin = end
    return tuple(compacted)
