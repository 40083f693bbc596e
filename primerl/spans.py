"""Causal attention of spans: documents or parts of documents, in rows that lie end to end.

No mask over all rows is ever built: on a GPU spans attend in a kernel that knows where they begin,
elsewhere those of one length in one call.
"""

import inspect
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

# On a CPU, attention to fewer tokens than this is slower in bfloat16 than in float32.
WIDENED_LENGTH = 256


class Document(NamedTuple):
    """Rows ``begin .. end - 1``, after the rows of other documents that hold its first tokens."""

    begin: int
    end: int
    prefix: tuple[tuple[int, int], ...] = ()
    """Ranges of rows, in the order of the tokens that they hold; none of its own."""

    @property
    def shared(self) -> int:
        """How many of its tokens the rows of other documents hold."""
        return sum(end - begin for begin, end in self.prefix)

    @property
    def length(self) -> int:
        """Its tokens, shared ones included."""
        return self.shared + self.end - self.begin

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """The ranges of rows that hold its tokens."""
        return (*self.prefix, (self.begin, self.end))


class Span(NamedTuple):
    """Query rows ``begin .. end - 1``: the last sees all keys, and each one key less than the next.

    A part of a document, whose keys may lie in another tensor's rows than its queries.
    """

    begin: int
    end: int
    keys: tuple[tuple[int, int], ...]
    """Ranges of rows, which end with the tokens of the queries themselves."""

    @property
    def seen(self) -> int:
        """How many keys the last query sees."""
        return sum(end - begin for begin, end in self.keys)


Spans = tuple[Document, ...] | tuple[Span, ...]


def attend(
    query: Float[Tensor, "t heads d"],
    key: Float[Tensor, "s kv_heads d"],
    value: Float[Tensor, "s kv_heads dv"],
    spans: Spans,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "t heads dv"]:
    """Causal attention of each span's queries to its keys.

        y_i = sum_j softmax_j(scaling q_i . k_j) v_j    over the keys j that query i sees

    In bfloat16 and float16 on a GPU by ``torch.nn.attention.varlen``, elsewhere by
    ``scaled_dot_product_attention``.

    Args:
        query: row by row; every row is in one span.
        key: its heads divide those of the queries, which share them in order.
        value: as the keys, perhaps of another width.
        spans: in the order of their queries: documents, or parts of them.
        scaling: ``1 / sqrt(d)`` by default.
        dropout: the share of weights that are dropped.
    """
    widths = (query.shape[-1], value.shape[-1])
    fits = query.dtype in (torch.bfloat16, torch.float16) and not dropout
    fits = fits and max(widths) <= 256 and not any(width % 8 for width in widths)
    if fits and query.is_cuda and torch.cuda.get_device_capability(query.device) >= (8, 0):
        return _attend_end_to_end(query, key, value, spans, scaling)
    return _attend_by_length(query, key, value, spans, scaling, dropout)


def _attend_by_length(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scaling: float | None, dropout: float
) -> Tensor:
    plan = _by_length(spans, query.device)
    q = query.index_select(0, plan.queries)
    k, v = (x.index_select(0, plan.keys) for x in (key, value))
    options: dict[str, Any] = {
        "dropout_p": dropout,
        "scale": scaling,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    outputs, start, start_k = [], 0, 0
    for count, length, seen in plan.runs:
        qd = _stacked(q, start, count, length)
        kd, vd = (_stacked(x, start_k, count, seen) for x in (k, v))
        if seen <= WIDENED_LENGTH and query.device.type == "cpu":
            qd, kd, vd = _widen(qd), _widen(kd), _widen(vd)
        mask = causal_lower_right(length, seen) if length < seen else None
        of_run = F.scaled_dot_product_attention(
            qd, kd, vd, attn_mask=mask, is_causal=mask is None, **options
        )
        outputs.append(of_run.transpose(1, 2).flatten(0, 1).to(query.dtype))
        start, start_k = start + count * length, start_k + count * seen
    return torch.cat(outputs).index_select(0, plan.back)


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _stacked(x: Tensor, start: int, count: int, length: int) -> Tensor:
    """Rows ``[t, heads, d]`` from ``start`` on, as ``[spans, heads, length, d]``."""
    rows = x[start : start + count * length]
    return rows.reshape(count, length, *x.shape[1:]).transpose(1, 2)


class _Plan(NamedTuple):
    """Rows reordered so that spans of one length lie together and attend in one call."""

    queries: Tensor
    keys: Tensor
    back: Tensor
    """The inverse of ``queries``."""
    runs: list[tuple[int, int, int]]
    """``(spans, rows of each, keys of each)``."""


@lru_cache(maxsize=8)  # once per batch, not once per layer
def _by_length(spans: Spans, device: torch.device) -> _Plan:
    alike: dict[tuple[int, ...], list[Any]] = {}
    for one in spans:
        lengths = (end - begin for begin, end in one.keys)
        alike.setdefault((one.end - one.begin, *lengths), []).append(one)
    own, seen, runs = [], [], []
    with torch.inference_mode(False):  # or a later call, in training, could not save them
        for (length, *ranges), run in alike.items():
            begins = torch.tensor([[one.begin, *(b for b, _ in one.keys)] for one in run])
            rows = [begins[:, i, None] + torch.arange(n) for i, n in enumerate((length, *ranges))]
            own.append(rows[0].flatten())
            seen.append(torch.cat(rows[1:], dim=1).flatten())
            runs.append((len(run), length, sum(ranges)))
        queries, keys = torch.cat(own), torch.cat(seen)
        return _Plan(queries.to(device), keys.to(device), queries.argsort().to(device), runs)


def _attend_end_to_end(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scaling: float | None
) -> Tensor:
    kernel: Any = varlen_attn
    known = inspect.signature(kernel).parameters  # torch 2.11 has no enable_gqa
    options: dict[str, Any] = {"scale": query.shape[-1] ** -0.5 if scaling is None else scaling}
    if "window_size" in known:
        options["window_size"] = (-1, 0)
    else:
        options["is_causal"] = True
    if key.shape[1] != query.shape[1]:
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        else:
            copies = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    width = max(query.shape[-1], value.shape[-1])  # the kernel has one for all three
    q, k, v = (
        F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
        for x in (query, key, value)
    )
    outputs: list[Tensor] = [
        kernel(
            q[run.begin : run.end],
            *(x[run.keys] for x in (k, v)),
            *(run.query_ends, run.key_ends, run.longest_queries, run.longest_keys),
            **options,
        )
        for run in _end_to_end(spans, query.device)
    ]
    attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return attended[..., : value.shape[-1]]


class _Run(NamedTuple):
    """Spans that attend in one call, the queries and the keys of each after those of another."""

    begin: int
    end: int
    keys: slice | Tensor
    query_ends: Tensor
    key_ends: Tensor
    longest_queries: int
    longest_keys: int


@lru_cache(maxsize=8)
def _end_to_end(spans: Spans, device: torch.device) -> list[_Run]:
    """Keys that lie end to end are not copied; those of several ranges are, in one run."""
    runs: list[list[Any]] = []
    for one in spans:
        if runs and _follows(runs[-1][-1].keys, one.keys):
            runs[-1].append(one)
        else:
            runs.append([one])
    with torch.inference_mode(False):
        return [_run(run, device) for run in runs]


def _follows(before: tuple[tuple[int, int], ...], after: tuple[tuple[int, int], ...]) -> bool:
    if len(before) == len(after) == 1:
        return before[0][1] == after[0][0]
    return len(before) > 1 and len(after) > 1


def _run(spans: list[Any], device: torch.device) -> _Run:
    ranges = [some for one in spans for some in one.keys]
    keys: slice | Tensor = slice(ranges[0][0], ranges[-1][1])
    if len(ranges) > len(spans):
        keys = torch.cat([torch.arange(*some) for some in ranges]).to(device)
    counts = [[one.end - one.begin for one in spans]]
    counts.append([sum(end - begin for begin, end in one.keys) for one in spans])
    ends = F.pad(torch.tensor(counts).cumsum(1), (1, 0)).to(device, torch.int32)
    return _Run(spans[0].begin, spans[-1].end, keys, ends[0], ends[1], *map(max, counts))
