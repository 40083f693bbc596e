"""Causal attention of spans: documents or parts of documents, in rows that lie end to end.

No mask over all rows is ever built: on a GPU spans attend in a kernel that knows where they begin,
elsewhere those of one length in one call.

Where spans lie is data: a ``Layout`` holds it in tensors, so a compiled model serves every pack.
"""

import inspect
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
import torch._dynamo
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


# No tuple, so that what passes it on, such as FSDP, does not walk through it. What a compiled model
# reads of it are tensors, whose contents it doesn't depend on.
@attrs.frozen(eq=False)
class Layout:
    """Where spans lie, as attention needs it: made once per batch by ``lay_out``."""

    spans: tuple[Any, ...]
    """Documents, or parts of documents."""
    longest: int
    """The most keys that a query sees."""
    plan: Tensor
    """``_runs`` of spans alike, on the CPU."""
    query_ends: Tensor
    """``[spans + 1]``, int32: where queries begin and end that lie end to end."""
    key_ends: Tensor
    gathered: Tensor | None
    """The rows of all keys in the order of the spans; None if they lie so already."""
    longest_queries: int


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
        longest=int(seen.max(initial=0)),
        plan=_of_any_length(np.concatenate(plan)),
        query_ends=_of_any_length(ends[0].astype(np.int32), device),
        key_ends=_of_any_length(ends[1].astype(np.int32), device),
        gathered=None if in_place else _of_any_length(keys, device),
        longest_queries=int(lengths.max(initial=0)),
    )


def _of_any_length(x: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
    """A tensor, marked so that what is compiled for one length of it serves all."""
    with torch.inference_mode(False):  # or a later call, in training, could not save it
        tensor = torch.from_numpy(x).to(device)
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


def _concatenated(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The ranges of ``lengths`` rows from ``begins`` on, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(begins - before, lengths) + np.arange(lengths.sum())


def attend(
    query: Float[Tensor, "t heads d"],
    key: Float[Tensor, "s kv_heads d"],
    value: Float[Tensor, "s kv_heads dv"],
    layout: Layout,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "t heads dv"]:
    """Causal attention of each span's queries to its keys.

        y_i = sum_j softmax_j(scaling q_i . k_j) v_j    over the keys j that query i sees

    In bfloat16 and float16 on a GPU by ``torch.nn.attention.varlen``, elsewhere by the kernels of
    ``scaled_dot_product_attention``. Compiled, it is traced once for all layouts (with dropout, or
    in float32 on a GPU, it is not traced).

    Args:
        query: row by row.
        key: its heads divide those of the queries, which share them in order.
        value: as the keys, perhaps of another width.
        layout: of the spans that attend, by ``lay_out``.
        scaling: ``1 / sqrt(d)`` by default.
        dropout: the share of weights that are dropped.
    """
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    widths = (query.shape[-1], value.shape[-1])
    fits = query.dtype in (torch.bfloat16, torch.float16) and not dropout
    fits = fits and max(widths) <= 256 and not any(width % 8 for width in widths)
    if fits and query.is_cuda and torch.cuda.get_device_capability(query.device) >= (8, 0):
        return _attend_end_to_end(query, key, value, layout, scaling)
    if query.device.type == "cpu" and not dropout:
        q, k, v = _equally_wide(query, key, value)
        attended: Tensor = _attend_on_cpu(q, k, v, layout.plan, scaling)[0]
    else:
        attended = _attend_by_length(query, key, value, layout, scaling, dropout)
    return attended[..., : widths[1]]


def _equally_wide(*tensors: Tensor) -> list[Tensor]:
    """With zeros at their ends: kernels have one width for queries, keys and values."""
    width = max(x.shape[-1] for x in tensors)
    return [F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors]


class _Run(NamedTuple):
    """Spans alike, which attend in one call."""

    size: int
    """How many."""
    length: int
    """Queries of each."""
    seen: int
    """Keys of each."""
    queries: Tensor
    """Their rows."""
    keys: Tensor


def _runs(plan: Tensor) -> list[_Run]:
    """A plan read: the number of runs, ``count, length, seen`` of each, and the rows of all queries
    and then of all keys, run by run.
    """
    runs = int(plan[0])
    alike, rows = plan[1 : 1 + 3 * runs].view(-1, 3).tolist(), plan[1 + 3 * runs :]
    start_k = sum(count * length for count, length, _ in alike)
    found, start = [], 0
    for count, length, seen in alike:
        end, end_k = start + count * length, start_k + count * seen
        found.append(_Run(count, length, seen, rows[start:end], rows[start_k:end_k]))
        start, start_k = end, end_k
    return found


def _stacked(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """Rows of ``[t, heads, d]``, as ``[spans, heads, length, d]``."""
    return x.index_select(0, rows).view(count, -1, *x.shape[1:]).transpose(1, 2)


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _kernel_inputs(run: _Run, q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Tensor], Any]:
    """What the kernel computes for a run, and its mask: None for plain causal attention."""
    inputs = [_stacked(q, run.queries, run.size)]
    inputs += [_stacked(x, run.keys, run.size) for x in (k, v)]
    if run.seen <= WIDENED_LENGTH:
        inputs = [_widen(x) for x in inputs]
    if run.length == run.seen:
        return inputs, None
    mask = inputs[0].new_full((run.length, run.seen), -torch.inf)
    return inputs, mask.triu(run.seen - run.length + 1)


# The kernel of scaled_dot_product_attention and its gradient, called by their names, because a
# compiled model must not look into what depends on the layout, and gradients need its logsumexp.
_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_GRADIENT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.library.custom_op("primerl::attend", mutates_args=())
def _attend_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """What is attended to, ``[t, heads, d]``, and the logsumexp of its scores, ``[t, heads]``."""
    out, logsumexp = _empty_outputs(q)
    for run in _runs(plan):
        inputs, mask = _kernel_inputs(run, q, k, v)
        of_run, sums = _KERNEL(*inputs, 0.0, mask is None, attn_mask=mask, scale=scaling)
        out.index_copy_(0, run.queries, of_run.transpose(1, 2).flatten(0, 1).to(q.dtype))
        logsumexp.index_copy_(0, run.queries, sums.transpose(1, 2).flatten(0, 1))
    return out, logsumexp


def _empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=wide)


@torch.library.custom_op("primerl::attend_backward", mutates_args=())
def _gradients_on_cpu(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    plan: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    to_q = q.new_empty(q.shape)
    # Spans that share a key add to its gradient.
    to_k, to_v = (torch.zeros_like(_widen(x)) for x in (k, v))
    for run in _runs(plan):
        inputs, mask = _kernel_inputs(run, q, k, v)
        of_run = [_stacked(x, run.queries, run.size) for x in (gradient, out)]
        above, attended = (x.to(inputs[0].dtype) for x in of_run)
        sums = logsumexp.index_select(0, run.queries).view(run.size, run.length, -1)
        to_inputs = _KERNEL_GRADIENT(
            *(above, *inputs, attended, sums.transpose(1, 2), 0.0, mask is None),
            attn_mask=mask,
            scale=scaling,
        )
        mine, *others = (x.transpose(1, 2).flatten(0, 1) for x in to_inputs)
        to_q.index_copy_(0, run.queries, mine.to(q.dtype))
        for total, other in zip((to_k, to_v), others, strict=True):
            total.index_add_(0, run.keys, other.to(total.dtype))
    return to_q, to_k.to(k.dtype), to_v.to(v.dtype)


@_attend_on_cpu.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q)


@_gradients_on_cpu.register_fake
def _(_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, plan, ctx.scaling = inputs
    ctx.save_for_backward(q, k, v, *output, plan)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients_on_cpu(gradient, *ctx.saved_tensors, ctx.scaling), None, None


_attend_on_cpu.register_autograd(_backward, setup_context=_keep)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_by_length(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float, dropout: float
) -> Tensor:
    runs, outputs = _runs(layout.plan.to(query.device)), []
    for run in runs:
        q = _stacked(query, run.queries, run.size)
        k, v = (_stacked(x, run.keys, run.size) for x in (key, value))
        mask = causal_lower_right(run.length, run.seen) if run.length < run.seen else None
        of_run = F.scaled_dot_product_attention(
            *(q, k, v),
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(of_run.transpose(1, 2).flatten(0, 1))
    back = torch.cat([run.queries for run in runs]).argsort()
    return torch.cat(outputs).index_select(0, back)


_KNOWN_TO_KERNEL = frozenset(inspect.signature(varlen_attn).parameters)


def _attend_end_to_end(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float
) -> Tensor:
    kernel: Any = varlen_attn
    options: dict[str, Any] = {"scale": scaling}
    if "window_size" in _KNOWN_TO_KERNEL:
        options["window_size"] = (-1, 0)
    else:
        options["is_causal"] = True
    if key.shape[1] != query.shape[1]:
        if "enable_gqa" in _KNOWN_TO_KERNEL:  # not in torch 2.11
            options["enable_gqa"] = True
        else:
            copies = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    q, k, v = _equally_wide(query, key, value)
    if layout.gathered is not None:
        k, v = (x[layout.gathered] for x in (k, v))
    attended: Tensor = kernel(
        *(q, k, v, layout.query_ends, layout.key_ends, layout.longest_queries, layout.longest),
        **options,
    )
    return attended[..., : value.shape[-1]]
