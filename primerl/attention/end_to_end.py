"""Attention of all spans of a pack by kernels for GPUs, behind one operator.

The choice of a kernel depends on the lengths in a pack, so the operator chooses when it runs, and a
compiled model has one graph for all lengths. They are read from the layout's plan, which is in host
memory, so nothing waits for the device but the first trial of a kernel. On a CPU, the operator
computes the same by ``span_kernels``, for tests.
"""

import functools
import importlib
import importlib.metadata
import inspect
import logging
import os
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from primerl._common.host_memory import to_device
from primerl.attention.documents import (
    Document,
    Layout,
    Span,
    concatenated,
    lay_out,
    once_per_tensor,
)
from primerl.attention.kernel_table import (
    END_TO_END,
    KERNELS,
    AttentionProblem,
    KernelName,
    choose,
    dense_calls,
    padded_length,
)
from primerl.attention.span_kernels import (
    attend_by_span,
    attend_by_span_gradients,
    groups_of,
    spans_of,
)

VARIABLE = "PRIMERL_ATTENTION"
"""The environment variable that forces a kernel."""
OLDEST_CUDNN = 91501  # older ones are wrong for some lengths, by torch's own check
FLASH4_MODULE = "flash_attn.cute.interface"
FLASH4_FORWARD = "flash_attn_varlen_func"
FLASH4_BACKWARD = "_flash_attn_bwd"  # the package exports no backward function under another name
_VARLEN = torch.ops.aten._flash_attention_forward
_VARLEN_GRADIENT = torch.ops.aten._flash_attention_backward
_CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention
_CUDNN_GRADIENT = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
_LARGEST_ERROR = 0.05  # in a trial; bfloat16 is below 0.01, and a wrong mask above 0.1

log = logging.getLogger(__name__)


class SpanInputs(NamedTuple):
    """Queries, keys and values of spans that lie end to end, ``[rows, heads, size]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Layout
    scaling: float
    window: int
    """The number of keys that a query sees at most; 0 for all."""
    cap: float

    @property
    def sizes(self) -> tuple[int, int]:
        """The maximum numbers of queries and of keys of a span."""
        return self.layout.max_queries, self.layout.max_keys


def choose_kernel(
    query: Tensor,
    value: Tensor,
    *,
    layout: Layout | None = None,
    window: int | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: bool = False,
    kernel: KernelName | None = None,
) -> tuple[KernelName, str]:
    """Choose the kernel of ``attend`` by device, dtype, lengths and what a model's attention does.

    A kernel for GPUs is chosen only if it computes a small call right, once in a process.

    Args:
        query: the queries, ``[t, heads, d]``.
        value: the values, ``[s, kv_heads, dv]``.
        layout: the layout of the spans; without it, the answer is for any lengths, and may be
            another one for some.
        window: the number of keys that a query sees at most.
        dropout: the probability that an attention weight is dropped.
        softcap: the bound of scores.
        sinks: whether there are attention sinks.
        kernel: the only kernel that may be chosen; by default, the environment variable
            ``PRIMERL_ATTENTION``, if it is set.

    Returns:
        The name of the kernel, and the reason: ``"flash4"`` (FlashAttention 4), ``"cudnn"``,
        ``"varlen"`` (torch's FlashAttention 2), ``"sdpa"`` (``scaled_dot_product_attention``, span
        by span) or ``"spans"`` (operators of torch, span by span).

    Raises:
        ValueError: dropout is combined with a soft cap or sinks, or the forced kernel can't compute
            this.
    """
    groups = None if layout is None else groups_of(layout.plan)
    longest = None if layout is None else layout.max_keys
    return choose_for(
        query.device,
        query.dtype,
        (query.shape[-1], value.shape[-1]),
        numbers=(query.shape[-2], value.shape[-2]),
        groups=groups,
        window=bool(window) and (longest is None or window < longest),  # type: ignore[operator]
        softcap=softcap or 0.0,
        sinks=sinks,
        dropout=bool(dropout),
        kernel=kernel,
    )


def choose_for(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int],
    *,
    numbers: tuple[int, int] | None = None,
    groups: tuple[tuple[int, int, int], ...] | None = None,
    window: bool = False,
    softcap: float = 0.0,
    sinks: bool = False,
    dropout: bool = False,
    kernel: str | None = None,
) -> tuple[KernelName, str]:
    """Choose a kernel for a problem on a device of this machine.

    With ``numbers``, the numbers of heads of queries and of keys, a kernel is chosen only if a
    trial of it succeeds. The host waits for the device in the first trial of each kernel.
    """
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    problem = AttentionProblem(
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if is_nvidia else None,
        dtype=dtype,
        heads=heads,
        groups=groups,
        window=window,
        softcap=bool(softcap),
        sinks=sinks,
        dropout=dropout,
    )
    forced = kernel or os.environ.get(VARIABLE) or None
    unusable = _unusable() if is_nvidia else {}
    while True:
        name, reason = choose(problem, unusable=unusable, forced=forced)
        if numbers is None or name not in END_TO_END:
            return name, reason
        failure = trial_failure(name, device, dtype, numbers, heads, window, softcap)
        if failure is None:
            return name, reason
        unusable = unusable | {name: failure}


def _unusable() -> dict[str, str]:
    """Return the kernels that this machine lacks, and why."""
    found = {"flash4": flash4_refusal(), "cudnn": _cudnn_refusal()}
    return {name: why for name, why in found.items() if why is not None}


def _cudnn_refusal() -> str | None:
    if torch.are_deterministic_algorithms_enabled():
        return "cuDNN's gradient is not deterministic"
    if not torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        return "torch.backends.cuda.enable_cudnn_sdp(False) was called"
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if version is None or version < OLDEST_CUDNN:
        return f"cuDNN is {version}, expected at least {OLDEST_CUDNN}"
    return None


# The arguments that are passed to FlashAttention 4 by name, and the order of the others.
_OF_BOTH = {"softmax_scale", "causal", "softcap", "deterministic"}
_OF_BOTH |= {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
_FLASH4_ARGUMENTS = {
    FLASH4_FORWARD: (["q", "k", "v"], {"window_size", "return_lse", *_OF_BOTH}),
    FLASH4_BACKWARD: (
        ["q", "k", "v", "out", "dout", "lse"],
        {"window_size_left", "window_size_right", *_OF_BOTH},
    ),
}


@functools.cache
def flash4_refusal() -> str | None:
    """Return why FlashAttention 4 can't be used; None if it can."""
    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return "flash-attn-4 is not installed"
    try:
        library = _flash4()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"flash-attn-4 {version} can't be loaded: {type(error).__name__}: {error}"
    return signature_refusal(library, version)


def signature_refusal(library: Any, version: str) -> str | None:
    """Return which function or argument a version of FlashAttention 4 lacks; None if it has all."""
    for name, (in_order, by_name) in _FLASH4_ARGUMENTS.items():
        function = getattr(library, name, None)
        if function is None:
            return f"flash-attn-4 {version} has no {name}"
        taken = list(inspect.signature(function).parameters)
        if taken[: len(in_order)] != in_order:
            return f"{name} of flash-attn-4 {version} does not take {', '.join(in_order)} first"
        missing = sorted(by_name - set(taken))
        if missing:
            return f"{name} of flash-attn-4 {version} does not take {', '.join(missing)}"
    return None


@functools.cache
def _flash4() -> ModuleType:
    return importlib.import_module(FLASH4_MODULE)


# FlashAttention 4 launches on the current device, which need not be that of the tensors.


def _flash4_forward(x: SpanInputs) -> tuple[Tensor, Tensor]:
    q, k, v = _for_flash4(x.q, x.k, x.v)
    longest, longest_keys = x.sizes
    with torch.no_grad(), torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        # Betas have returned two to five results.
        out, logsumexp, *_ = getattr(_flash4(), FLASH4_FORWARD)(
            *(q, k, v),
            cu_seqlens_q=x.layout.query_ends,
            cu_seqlens_k=x.layout.key_ends,
            max_seqlen_q=longest,
            max_seqlen_k=longest_keys,
            softmax_scale=x.scaling,
            causal=True,
            window_size=(x.window - 1, 0) if x.window else (None, None),
            softcap=x.cap,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            return_lse=True,
        )
    return out[..., : x.v.shape[-1]], logsumexp


def _flash4_backward(
    x: SpanInputs, gradient: Tensor, out: Tensor, logsumexp: Tensor
) -> tuple[Tensor, ...]:
    q, k, v = _for_flash4(x.q, x.k, x.v)
    longest, longest_keys = x.sizes
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        found = getattr(_flash4(), FLASH4_BACKWARD)(
            *(q, k, v, _widened(out, v.shape[-1]), _widened(gradient, v.shape[-1]), logsumexp),
            softmax_scale=x.scaling,
            causal=True,
            softcap=x.cap,
            window_size_left=x.window - 1 if x.window else None,
            window_size_right=0 if x.window else None,
            cu_seqlens_q=x.layout.query_ends,
            cu_seqlens_k=x.layout.key_ends,
            max_seqlen_q=longest,
            max_seqlen_k=longest_keys,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    return _narrowed(found[:3], x)


def _for_flash4(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Make heads equally wide, but for the two sizes that the kernel computes as they are.

    Where several queries share a key, its gradient needs equal sizes, at least on Hopper.
    """
    as_they_are = (q.shape[-1], v.shape[-1]) == (192, 128)
    if as_they_are and (q.shape[1] == k.shape[1] or _is_blackwell(q.device)):
        return [q, k, v]
    return _equally_wide(q, k, v)


def _is_blackwell(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


def _varlen_forward(x: SpanInputs) -> tuple[Tensor, Tensor]:
    found = _VARLEN(
        *_equally_wide(x.q, x.k, x.v),
        *(x.layout.query_ends, x.layout.key_ends, *x.sizes, 0.0, not x.window, False),
        scale=x.scaling,
        window_size_left=x.window - 1 if x.window else -1,
        window_size_right=0,
    )
    return found[0][..., : x.v.shape[-1]], found[1]


def _varlen_backward(
    x: SpanInputs, gradient: Tensor, out: Tensor, logsumexp: Tensor
) -> tuple[Tensor, ...]:
    q, k, v = _equally_wide(x.q, x.k, x.v)
    random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # there is no dropout
    found = _VARLEN_GRADIENT(
        *(_widened(gradient, v.shape[-1]), q, k, v, _widened(out, v.shape[-1]), logsumexp),
        *(x.layout.query_ends, x.layout.key_ends, *x.sizes, 0.0, not x.window),
        *(random_state, torch.empty(0, device=q.device)),
        scale=x.scaling,
        window_size_left=x.window - 1 if x.window else -1,
        window_size_right=0,
    )
    return _narrowed(found, x)


class DenseRun(NamedTuple):
    """Documents of one padded length, for a single dense call."""

    size: int
    """Number of documents."""
    length: int
    """Their length, with padding at the end, which causal attention never sees."""
    rows: Tensor | slice
    """Rows of the documents' tokens in the pack: a slice if they lie side by side, not padded."""
    places: Tensor | None
    """The places of these tokens in the stacked documents; None with a slice."""

    def stack(self, x: Tensor) -> Tensor:
        """Return ``[documents, heads, length, d]`` of ``[t, heads, d]``, with zeros as padding."""
        if isinstance(self.rows, slice):
            x = x[self.rows]
        else:
            assert self.places is not None
            stacked = x.new_zeros(self.size * self.length, *x.shape[1:])
            x = stacked.index_copy_(0, self.places, x.index_select(0, self.rows))
        return x.view(self.size, self.length, *x.shape[1:]).transpose(1, 2)

    def unstack(self, found: Tensor) -> Tensor:
        """Return ``[t, heads, ...]`` of ``[documents, heads, length, ...]``, without padding."""
        flat = found.transpose(1, 2).flatten(0, 1)
        return flat if self.places is None else flat.index_select(0, self.places)

    def store(self, found: list[Tensor], rows: list[Tensor]) -> None:
        """Write each ``[documents, heads, length, ...]`` into the rows of a pack."""
        for one, into in zip(found, rows, strict=True):
            mine = self.unstack(one).to(into.dtype)
            if isinstance(self.rows, slice):
                into[self.rows] = mine
            else:
                into.index_copy_(0, self.rows, mine)


@once_per_tensor  # all layers have the same plan
def dense_runs(plan: Tensor, device: torch.device) -> list[DenseRun]:
    """Divide the documents of a plan among dense calls, by padded length."""
    by_length: dict[int, list[Span]] = {}
    for one in spans_of(plan):
        by_length.setdefault(padded_length(one.end - one.begin), []).append(one)
    found = []
    for length, alike in by_length.items():
        begins = np.array([one.begin for one in alike])
        lengths = np.array([one.end for one in alike]) - begins
        first = 0
        for size in dense_calls(len(alike), length):
            some = slice(first, first + size)
            found.append(_dense_run(begins[some], lengths[some], length, device))
            first += size
    return found


def _dense_run(
    begins: np.ndarray, lengths: np.ndarray, length: int, device: torch.device
) -> DenseRun:
    size, first = len(begins), int(begins[0])
    starts = np.arange(size) * length  # of the stacked documents
    if (lengths == length).all() and (begins == first + starts).all():
        return DenseRun(size, length, slice(first, first + size * length), None)
    rows, places = (concatenated(one, lengths) for one in (begins, starts))
    return DenseRun(
        size,
        length,
        to_device(torch.from_numpy(rows), device),
        to_device(torch.from_numpy(places), device),
    )


# The number of dimensions of cuDNN's statistics, which differs between versions of torch. The
# forward pass notes it for the backward pass.
_statistics_dimensions = [4]


def _cudnn_forward(x: SpanInputs) -> tuple[Tensor, Tensor]:
    runs = dense_runs(x.layout.plan, x.q.device)
    if len(runs) == 1 and runs[0].places is None:  # the whole pack
        attended, sums = (runs[0].unstack(one) for one in _dense_forward(runs[0], x))
        return attended, sums.T
    out, logsumexp = _empty_outputs(x.q, x.v)
    for run in runs:
        run.store(_dense_forward(run, x), [out, logsumexp.T])
    return out, logsumexp


def _cudnn_backward(
    x: SpanInputs, gradient: Tensor, out: Tensor, logsumexp: Tensor
) -> tuple[Tensor, ...]:
    runs = dense_runs(x.layout.plan, x.q.device)
    arriving = [gradient, out, logsumexp.T.unsqueeze(-1)]
    if len(runs) == 1 and runs[0].places is None:
        return tuple(runs[0].unstack(one) for one in _dense_backward(runs[0], x, arriving))
    gradients = [torch.empty_like(one) for one in (x.q, x.k, x.v)]
    for run in runs:
        run.store(_dense_backward(run, x, arriving), gradients)
    return tuple(gradients)


def _dense_forward(run: DenseRun, x: SpanInputs) -> list[Tensor]:
    """Return outputs and statistics, ``[documents, heads, length, ...]``."""
    inputs = [run.stack(one) for one in (x.q, x.k, x.v)]
    found = _CUDNN(*inputs, None, True, 0.0, True, False, scale=x.scaling)
    _statistics_dimensions[0] = found[1].dim()
    return [found[0], found[1].view(inputs[0].shape[:3])]


def _dense_backward(run: DenseRun, x: SpanInputs, arriving: list[Tensor]) -> list[Tensor]:
    """Return the gradients of queries, keys and values, ``[documents, heads, length, d]``."""
    inputs = [run.stack(one) for one in (x.q, x.k, x.v)]
    gradient, out, sums = (run.stack(one) for one in arriving)
    statistics = sums.contiguous()
    if _statistics_dimensions[0] == 3:
        statistics = statistics.squeeze(-1)
    unused = torch.zeros((), dtype=torch.int64, device=x.q.device)  # there is no dropout
    found = _CUDNN_GRADIENT(
        *(gradient, *inputs, out, statistics, unused, unused, None, None, None),
        *(run.length, run.length, 0.0, True),
        scale=x.scaling,
    )
    return list(found)


def _spans_forward(x: SpanInputs) -> tuple[Tensor, Tensor]:
    q, k, v = _equally_wide(x.q, x.k, x.v)
    options = (x.scaling, x.window, 0, x.cap)
    out, sums = attend_by_span(q, k, v, None, x.layout.plan, *options)
    return out[..., : x.v.shape[-1]], sums.T


def _spans_backward(
    x: SpanInputs, gradient: Tensor, out: Tensor, logsumexp: Tensor
) -> tuple[Tensor, ...]:
    q, k, v = _equally_wide(x.q, x.k, x.v)
    upstream, attended = (_widened(one, v.shape[-1]) for one in (gradient, out))
    options = (x.scaling, x.window, 0, x.cap)
    found = attend_by_span_gradients(
        upstream, q, k, v, attended, logsumexp.T.contiguous(), x.layout.plan, *options
    )
    return _narrowed(found, x)


def _equally_wide(*tensors: Tensor) -> list[Tensor]:
    """Pad queries, keys and values with zeros to the same width."""
    width = max(x.shape[-1] for x in tensors)
    return [_widened(x, width) for x in tensors]


def _widened(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _narrowed(found: Any, x: SpanInputs) -> tuple[Tensor, ...]:
    """Cut off the gradients of padding."""
    inputs = zip(found, (x.q, x.k, x.v), strict=True)
    return tuple(gradient[..., : one.shape[-1]] for gradient, one in inputs)


_FORWARD = {
    "flash4": _flash4_forward,
    "cudnn": _cudnn_forward,
    "varlen": _varlen_forward,
    "spans": _spans_forward,
}
_BACKWARD = {
    "flash4": _flash4_backward,
    "cudnn": _cudnn_backward,
    "varlen": _varlen_backward,
    "spans": _spans_backward,
}


@functools.cache
def trial_failure(
    name: KernelName,
    device: torch.device,
    dtype: torch.dtype,
    numbers: tuple[int, int],
    heads: tuple[int, int],
    window: bool,
    cap: float,
) -> str | None:
    """Try a kernel on two short documents, and return why it can't be used; None if it can.

    An installed kernel may not compile on this GPU, or compute wrong values. The failure is logged
    once.

    Args:
        name: a kernel of ``END_TO_END``.
        device: where it runs.
        dtype: of queries, keys and values.
        numbers: the numbers of heads of queries and of keys.
        heads: the sizes of the heads of keys and of values.
        window: whether there is a window.
        cap: the bound of scores; 0 for none.
    """
    failure: str | None = _trial_failure(name, device, dtype, numbers, heads, window, cap)
    if failure is not None:
        log.warning("the attention kernel %s is not used on %s: %s", name, device, failure)
    return failure


# With real tensors: with fake ones, every kernel would fail, and not be tried again.
@torch.compiler.disable  # type: ignore[untyped-decorator]
@_disable_current_modes()
@torch.no_grad()
def _trial_failure(
    name: KernelName,
    device: torch.device,
    dtype: torch.dtype,
    numbers: tuple[int, int],
    heads: tuple[int, int],
    window: bool,
    cap: float,
) -> str | None:
    prefixes = next(one.prefixes for one in KERNELS if one.name == name)
    last = Document(130, 200, ((0, 30),) if prefixes else ())
    options = (lay_out((Document(0, 130), last), device), heads[0] ** -0.5, 33 * window, cap)
    (query_heads, key_heads), (width, value_width) = numbers, heads
    shapes = [(query_heads, width), (key_heads, width), (key_heads, value_width)]
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(200, *shape, generator=generator, device="cpu").to(device, dtype)
        for shape in [*shapes, (query_heads, value_width)]
    ]
    try:
        computed = _forward_and_backward(name, inputs, *options)
        expected = _forward_and_backward("spans", [x.double() for x in inputs], *options)
        for what, ours, right in zip(_COMPUTED, computed, expected, strict=True):
            off = ((ours.double() - right).norm() / right.norm()).item()
            if not off < _LARGEST_ERROR:  # NaN, too
                return f"in a small call, {what} has a relative error of {off:.3g}"
    except torch.OutOfMemoryError:  # says nothing of the kernel
        raise
    except Exception as error:  # whatever a library raises while it is loaded or compiled
        return f"a small call raised {type(error).__name__}: {error}"
    return None


_COMPUTED = ("the output", "the logsumexp", *(f"the gradient of {x}" for x in "qkv"))


def _forward_and_backward(
    name: str, tensors: list[Tensor], layout: Layout, scaling: float, window: int, cap: float
) -> list[Tensor]:
    """Return what ``_COMPUTED`` names, of queries, keys, values and the output's gradient."""
    q, k, v, gradient = tensors
    x = _inputs(name, q, k, v, layout, scaling, window, cap)
    out, logsumexp = (found.contiguous() for found in _FORWARD[name](x))
    of_q, of_k, of_v = _BACKWARD[name](x, gradient, out, logsumexp)
    gathered = None if name == "spans" else layout.gathered
    rest = [_of_all_keys(*pair, gathered) for pair in ((of_k, k), (of_v, v))]
    return [out, logsumexp, of_q, *rest]


def _name_for(
    q: Tensor, v: Tensor, layout: Layout, window: int, cap: float, kernel: str, *, sinks: bool
) -> str:
    """Return the name of the kernel for a pack; the backward pass chooses as the forward pass."""
    if q.device.type == "cpu":
        return "spans"
    name, reason = choose_for(
        *(q.device, q.dtype, (q.shape[-1], v.shape[-1])),
        numbers=(q.shape[1], v.shape[1]),
        groups=groups_of(layout.plan),
        window=0 < window < layout.max_keys,
        softcap=cap,
        sinks=sinks,
        kernel=kernel or None,
    )
    if name == "sdpa":  # because trials failed; it is no part of the operator
        name = "spans"
    log_choice(name, reason, q.device.type)
    return name


@functools.cache
def log_choice(name: str, reason: str, device: str) -> None:
    """Log a choice once."""
    log.info("attention on %s: kernel %s, because %s", device, name, reason)


# The operator gets only the plan. Tensors that some layouts have and others have not would give
# compiled models a graph for each kind.


def _layout(plan: Tensor, chunk: int, device: torch.device) -> Layout:
    divided = 0 < chunk < max(keys for _, _, keys in groups_of(plan))
    found: Layout = _layout_of_chunks(plan, chunk, device) if divided else _whole(plan, device)
    return found


@once_per_tensor  # all layers have the same plan
def _whole(plan: Tensor, device: torch.device) -> Layout:
    return lay_out(spans_of(plan), device)


@once_per_tensor  # apart from the whole layout, because models have layers of both kinds
def _layout_of_chunks(plan: Tensor, chunk: int, device: torch.device) -> Layout:
    """Make the layout of the chunks of spans; documents are divided from their first token on."""
    parts = []
    for one in spans_of(plan):
        offset, begin = one.seen - one.end, one.begin  # from rows to positions
        while begin < one.end:
            first = (begin + offset) // chunk * chunk
            end = min(one.end, first + chunk - offset)
            parts.append(Span(begin, end, _slice(one.keys, first, end + offset)))
            begin = end
    return lay_out(tuple(parts), device)


def _slice(
    ranges: tuple[tuple[int, int], ...], first: int, last: int
) -> tuple[tuple[int, int], ...]:
    """Return the ranges of the rows ``first .. last - 1`` of ``ranges``."""
    kept = []
    for begin, end in ranges:
        low, high = max(first, 0), min(last, end - begin)
        if low < high:
            kept.append((begin + low, begin + high))
        first, last = first - (end - begin), last - (end - begin)
    return tuple(kept)


def _inputs(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    scaling: float,
    window: int,
    cap: float,
) -> SpanInputs:
    """Return the inputs of a kernel, with the keys of the spans end to end, if it needs that."""
    if name != "spans":  # it reads the keys' rows from the plan
        if layout.gathered is not None:
            k, v = (x.index_select(0, layout.gathered) for x in (k, v))
        else:
            seen = sum(number * keys for number, _, keys in groups_of(layout.plan))
            k, v = k[:seen], v[:seen]
    return SpanInputs(
        q=q.contiguous(),
        k=k.contiguous(),
        v=v.contiguous(),
        layout=layout,
        scaling=scaling,
        window=window if 0 < window < layout.max_keys else 0,
        cap=cap,
    )


def _of_all_keys(found: Tensor, like: Tensor, gathered: Tensor | None) -> Tensor:
    """Return the gradient of all keys from that of the keys that a kernel got."""
    if len(found) == len(like) and gathered is None:
        return found.contiguous()
    # In float32: the gradient of a key that several spans share is summed over the spans.
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    rows = torch.zeros(like.shape, dtype=wide, device=like.device)
    if gathered is None:
        rows[: len(found)] = found  # no span sees the others
    else:
        rows.index_add_(0, gathered, found.to(wide))
    return rows.to(like.dtype)


# A sink is a key with the same score for all queries, and a value of zero. It divides a query's
# output by a larger sum. With this sum, and with the output so divided, the gradient of attention
# without a sink is the gradient with one. So kernels that know no sinks have them.


@torch.library.custom_op("primerl::attend_end_to_end", mutates_args=())
def attend_end_to_end(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    plan: Tensor,
    scaling: float,
    window: int,
    chunk: int,
    cap: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Return the outputs, ``[t, heads, dv]``, and the logsumexp of the scores, ``[heads, t]``."""
    if not len(q):
        return _empty_outputs(q, v)
    layout = _layout(plan, chunk, q.device)
    name = _name_for(q, v, layout, window, cap, kernel, sinks=sinks is not None)
    out, logsumexp = _FORWARD[name](_inputs(name, q, k, v, layout, scaling, window, cap))
    if sinks is not None:
        column = sinks.to(logsumexp.dtype).unsqueeze(1)
        out = (out * torch.sigmoid(logsumexp - column).T.unsqueeze(-1)).to(out.dtype)
        logsumexp = torch.logaddexp(logsumexp, column)
    return out.contiguous(), logsumexp.contiguous()


@torch.library.custom_op("primerl::attend_end_to_end_backward", mutates_args=())
def attend_end_to_end_gradients(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    plan: Tensor,
    scaling: float,
    window: int,
    chunk: int,
    cap: float,
    kernel: str,
    sinks: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    if not len(q):
        return q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    layout = _layout(plan, chunk, q.device)
    name = _name_for(q, v, layout, window, cap, kernel, sinks=sinks)
    x = _inputs(name, q, k, v, layout, scaling, window, cap)
    of_q, of_k, of_v = _BACKWARD[name](x, gradient.contiguous(), out, logsumexp)
    gathered = None if name == "spans" else layout.gathered
    return of_q.contiguous(), _of_all_keys(of_k, k, gathered), _of_all_keys(of_v, v, gathered)


def _empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows, heads = q.shape[:2]
    return q.new_empty(rows, heads, v.shape[-1]), q.new_empty(heads, rows, dtype=wide)


@attend_end_to_end.register_fake
def _(q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q, v)


@attend_end_to_end_gradients.register_fake
def _(_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, plan, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, plan, sinks)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *saved, sinks = ctx.saved_tensors
    found = attend_end_to_end_gradients(gradient, *saved, *ctx.options, sinks is not None)
    of_sinks = None
    if sinks is not None:
        out, logsumexp = saved[3], saved[4]
        shares = (sinks.to(logsumexp.dtype).unsqueeze(1) - logsumexp).exp()
        arriving = (gradient * out).to(logsumexp.dtype).sum(-1).T
        of_sinks = -(shares * arriving).sum(1).to(sinks.dtype)
    return *found, of_sinks, *(None,) * 6


attend_end_to_end.register_autograd(_backward, setup_context=_save_inputs)
