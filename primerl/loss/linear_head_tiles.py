"""Tiles of logits ``[rows, columns]``: their sizes, products, softmax statistics and gradient.

On a CUDA device, Triton kernels compute the statistics and the gradient of a tile in one pass each
(``linear_head_triton``). Elsewhere, and in float64, the torch forms here do.
"""

import logging
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from primerl._common.forward_passes import has_values
from primerl._common.triton_failure import failure_of_triton

_log = logging.getLogger(__name__)
# Elements of a tile. A CPU's tile fits into its cache; an accelerator needs fewer, larger kernels:
# 256 MiB of logits in float32, and half of it for their gradient in 16 bits.
CPU_TILE, TILE = 2**21, 2**26
# Products add into the gradients of hidden states once per block of columns, and into those of a
# block of the weight once per chunk of rows: least often if tiles of TILE elements are square. On a
# CPU, 4,096 rows by 512 columns took 0.8 times as long as 8,192 by 256.
CHUNK_TOKENS, CPU_TOKENS = 8192, 4096
# exp(FLOOR) is 0 in every dtype, and so is FLOOR exp(FLOOR), where -inf would give NaN.
FLOOR = -1000.0


def add_statistics(
    z: Tensor,
    divisor: Tensor | None,
    labels: Tensor,
    start: int,
    highest: Tensor,
    total: Tensor,
    weighted: Tensor,
    chosen: Tensor,
) -> None:
    """Add a tile of logits, whose first column is ``start``, to the statistics of its rows.

    The statistics are written in place, and ``z`` may be overwritten.
    """
    if reason_against_triton(z) is None:
        from primerl.loss import linear_head_triton

        sums = highest, total, weighted, chosen
        linear_head_triton.add_statistics(z, divisor, labels, start, *sums)
        return
    if divisor is not None:
        z.div_(as_columns(divisor))
    place, inside = places(labels, start, z.shape[1])
    chosen += z.gather(1, place).where(inside, 0.0)
    top = torch.maximum(highest, z.amax(1))
    fall = (highest - top).clamp_(min=FLOOR)
    z.sub_(as_columns(top)).clamp_(min=FLOOR)
    e = z.exp()
    scale = fall.exp()
    weighted.add_(fall * total).mul_(scale).add_(z.mul_(e).sum(1))
    total.mul_(scale).add_(e.sum(1))
    highest.copy_(top)


def gradient(
    z: Tensor,
    divisor: Tensor | None,
    labels: Tensor,
    start: int,
    highest: Tensor,
    a: Tensor | None,
    b: Tensor,
    c: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of a tile of logits in ``dtype``, see ``_coefficients``; overwrites ``z``."""
    if reason_against_triton(z) is None:
        from primerl.loss import linear_head_triton

        return linear_head_triton.gradient(z, divisor, labels, start, highest, a, b, c, dtype)
    if divisor is not None:
        z.div_(as_columns(divisor))
    z.sub_(as_columns(highest))
    if c is None:
        g = z.exp_().mul_(as_columns(b))
    else:
        e = z.clamp_(min=FLOOR).exp()
        g = z.mul_(as_columns(c)).add_(as_columns(b)).mul_(e)
    if a is not None:
        place, inside = places(labels, start, z.shape[1])
        g.scatter_add_(1, place, a.where(inside, 0.0))
    return g.to(dtype)


def reason_against_triton(z: Tensor) -> str | None:
    """Return why Triton's kernels can't be used for a tile of logits, or None if they can."""
    if not z.is_cuda:
        return f"they run on CUDA devices, not on {z.device.type}"
    if z.dtype != torch.float32:
        return f"they compute in float32, not in {z.dtype}"
    if not has_values(z):
        return "the tile has no values"
    return _failure_of_triton(z.device)


@lru_cache
def _failure_of_triton(device: torch.device) -> str | None:
    consequence = "The LM head runs without its fused kernels, more slowly."
    return failure_of_triton(_run_once, device, consequence=consequence)


def _run_once(device: torch.device) -> None:
    from primerl.loss import linear_head_triton

    linear_head_triton.run_once(device)


def logits(hidden: Tensor, weight: Tensor, rows: slice, columns: slice) -> Tensor:
    """A tile of logits, before the division by temperatures."""
    return matmul(hidden[rows], weight[columns].t(), wide(hidden.dtype))


def places(labels: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """Column of each label in a block of the vocabulary, and a mask of those inside: ``[t, c]``."""
    place = labels.long() - start
    inside = (place >= 0) & (place < columns)
    return place.where(inside, 0), inside


def as_columns(x: Tensor) -> Tensor:
    """Reshape ``[t]`` to ``[t, 1]``; leave ``[t, c]`` unchanged."""
    return x.unsqueeze(1) if x.ndim == 1 else x


def tile_shape(hidden: Tensor, chunk_tokens: int) -> tuple[int, int]:
    """The numbers of rows and columns of a tile."""
    on_cpu = hidden.device.type == "cpu" and has_values(hidden)
    elements = CPU_TILE if on_cpu else TILE
    tokens = max(1, min(len(hidden), chunk_tokens, CPU_TOKENS if on_cpu else chunk_tokens))
    return tokens, max(128, elements // tokens // 128 * 128)


def slices(length: int, step: int) -> Iterator[slice]:
    """Divide a range into slices of ``step``, of which the last may be shorter."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of all that is not a product: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` in ``dtype``; if the device can't widen, it is rounded to a's dtype first."""
    if a.dtype != dtype and _widens(a, adding=False):
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Add ``a @ b`` to ``total`` in its dtype; the first product replaces what ``total`` holds."""
    beta = 0 if first else 1
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif _widens(a, adding=True):
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    elif first:
        total.copy_(matmul(a, b, total.dtype))
    else:
        total.add_(matmul(a, b, total.dtype))


def _widens(x: Tensor, *, adding: bool) -> bool:
    """Check whether a product can be in float32, without rounding to the dtype of its factors.

    ``adding``: and whether it can be added to a tensor in float32. torch allows both on CUDA
    devices only, the second since 2.10 (pytorch#167931). If it refuses there, this is logged once.
    """
    return not has_values(x) or _device_widens(x.device.type, x.dtype, adding)


@lru_cache
def _device_widens(device: str, dtype: torch.dtype, adding: bool) -> bool:
    x = torch.zeros(16, 16, device=device, dtype=dtype)
    total = torch.zeros(16, 16, device=device)
    try:
        if adding:
            torch.addmm(total, x, x, out_dtype=total.dtype, out=total)
        else:
            torch.mm(x, x, out_dtype=total.dtype)
    except (RuntimeError, TypeError) as error:  # NotImplementedError is a RuntimeError
        if device == "cuda":
            work = "sums of products" if adding else "products"
            _log.warning("The LM head rounds %s to %s, more slowly: %s", work, dtype, error)
        return False
    return True
