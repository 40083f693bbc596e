"""Choice of the kernel, by what kernels can compute, this machine and trials.

``choose_kernel`` is for users. A model's attention calls ``choose_for`` before it knows the
lengths, and the operator calls ``kernel_for_pack``.
"""

import functools
import logging
import os

import torch
from torch import Tensor

from primerl.attention.documents import Layout
from primerl.attention.end_to_end import cudnn, flash4
from primerl.attention.end_to_end.interface import SpanInputs
from primerl.attention.end_to_end.trials import trial_failure
from primerl.attention.kernel_table import END_TO_END, AttentionProblem, KernelName, choose
from primerl.attention.span_kernels import groups_of

VARIABLE = "PRIMERL_ATTENTION"
"""The environment variable that forces a kernel."""

log = logging.getLogger(__name__)


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
    found = {"flash4": flash4.refusal(), "cudnn": cudnn.refusal()}
    return {name: why for name, why in found.items() if why is not None}


def kernel_for_pack(x: SpanInputs, *, sinks: bool, kernel: str) -> str:
    """Choose the kernel of the operator; the backward pass chooses as the forward pass."""
    if x.q.device.type == "cpu":
        return "spans"
    name, reason = choose_for(
        *(x.q.device, x.q.dtype, (x.q.shape[-1], x.v.shape[-1])),
        numbers=(x.q.shape[1], x.v.shape[1]),
        groups=groups_of(x.layout.plan),
        window=0 < x.window < x.layout.max_keys,
        softcap=x.cap,
        sinks=sinks,
        kernel=kernel or None,
    )
    if name == "sdpa":  # because trials failed; it is no part of the operator
        name = "spans"
    log_choice(name, reason, x.q.device.type)
    return name


@functools.cache
def log_choice(name: str, reason: str, device: str) -> None:
    """Log a choice once."""
    log.info("attention on %s: kernel %s, because %s", device, name, reason)
