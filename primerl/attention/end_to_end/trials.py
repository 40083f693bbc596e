"""Trials of kernels: whether a kernel computes a small call right on a device."""

import functools
import logging

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from primerl.attention.documents import Document, lay_out
from primerl.attention.end_to_end import calls
from primerl.attention.end_to_end.interface import SpanInputs
from primerl.attention.kernel_table import KERNELS, KernelName

_LARGEST_ERROR = 0.05  # in a trial; bfloat16 is below 0.01, and a wrong mask above 0.1

log = logging.getLogger(__name__)


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
    layout = lay_out((Document(0, 130), last), device)
    (query_heads, key_heads), (width, value_width) = numbers, heads
    shapes = [(query_heads, width), (key_heads, width), (key_heads, value_width)]
    generator = torch.Generator().manual_seed(0)
    q, k, v, gradient = (
        torch.randn(200, *shape, generator=generator, device="cpu").to(device, dtype)
        for shape in [*shapes, (query_heads, value_width)]
    )
    scaling = heads[0] ** -0.5
    x = SpanInputs(q=q, k=k, v=v, layout=layout, scaling=scaling, window=33 * window, cap=cap)
    exact = x._replace(q=q.double(), k=k.double(), v=v.double())
    try:
        computed = _forward_and_backward(name, x, gradient)
        expected = _forward_and_backward("spans", exact, gradient.double())
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


def _forward_and_backward(name: str, x: SpanInputs, gradient: Tensor) -> list[Tensor]:
    """Return what ``_COMPUTED`` names, from the gradient of the output."""
    out, logsumexp = (found.contiguous() for found in calls.forward(name, x))
    return [out, logsumexp, *calls.backward(name, x, gradient, out, logsumexp)]
