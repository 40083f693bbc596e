"""Quantization of tensors to block-scaled FP8, and dequantization."""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from primerl._common.forward_passes import has_values
from primerl._common.triton_failure import failure_of_triton
from primerl.fp8.format import (
    EPSILON,
    FP8,
    LARGEST,
    SCALE_DTYPES,
    Format,
    Quantized,
    ScaleType,
    scale_type,
)

KERNEL_BLOCKS = (16, 32, 64, 128)
_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1


def quantize(
    x: Float[Tensor, "*t h"], *, block: int = 128, scale: ScaleType = "float32"
) -> tuple[Float[Tensor, "*t h"], Shaped[Tensor, "*t blocks"]]:
    """Quantize activations to FP8, with one scale per ``block`` entries of a row.

        scale = max(amax, 1e-10) / 448,   q = cast(clamp(x / scale))

    The arithmetic is in float32, as in vLLM's ``per_token_group_quant_fp8``; see ``format``.

    Args:
        x: activations of 16 bits or more. The last block of a row may be shorter.
        block: number of entries that share a scale. MXFP8 is 32 with ``"ue8m0"``.
        scale: the scale type: ``"float32"``, or ``"ue8m0"`` for scales rounded up to a power of
            two.

    Returns:
        ``(q, scales)``. The dtype of the scales is ``torch.float32`` or ``torch.float8_e8m0fnu``,
        according to ``scale``.

    Raises:
        ValueError: ``x`` has an infinity or a NaN, is not a floating-point tensor of at least 16
            bits, or has no dimensions or empty rows; or ``block`` or ``scale`` is invalid.
    """
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected [..., h] with h at least 1")
    _require_finite(x)
    form = Format(scale=scale, block=block, weight_rows=block)
    found = activations(x.reshape(-1, x.shape[-1]), form)
    return found.values.view(x.shape), found.scales.reshape(*x.shape[:-1], -(-x.shape[-1] // block))


def quantize_weight(
    w: Float[Tensor, "*e o i"],
    *,
    block: int = 128,
    scale: ScaleType = "float32",
    rows: int | None = None,
) -> tuple[Float[Tensor, "*e o i"], Shaped[Tensor, "*e row_blocks column_blocks"]]:
    """Quantize a weight to FP8, with one scale per block; return ``(q, scales)``.

    The arithmetic is that of ``quantize``.

    Args:
        w: a matrix, or one per expert, of 16 bits or more. Blocks at its edges may be smaller.
        block: number of columns in a block.
        scale: the scale type: ``"float32"`` or ``"ue8m0"``.
        rows: number of rows in a block: ``block`` by default, 1 for MXFP8.

    Raises:
        ValueError: as for ``quantize``; or ``w`` has fewer than two dimensions, or is empty.
    """
    if w.ndim < 2 or min(w.shape[-2:]) < 1:
        raise ValueError(f"w has shape {tuple(w.shape)}; expected a nonempty matrix [..., o, i]")
    _require_finite(w)
    form = Format(scale=scale, block=block, weight_rows=block if rows is None else rows)
    found = weight(w, form)
    return found.values, found.scales


def dequantize(
    q: Float[Tensor, "*m k"],
    scales: Shaped[Tensor, "*m_blocks k_blocks"],
    *,
    block: int = 128,
    scale: ScaleType | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*m k"]:
    """Convert FP8 values back: ``q * scale`` in float32, then cast to ``dtype``.

    Args:
        q: FP8 values from ``quantize`` or ``quantize_weight``.
        scales: the scales returned with ``q``. Their shape determines whether blocks have one row
            or ``block`` rows.
        block: the block size with which ``q`` was quantized.
        scale: the scale type that ``scales`` must have; None accepts any.
        dtype: the dtype of the result.

    Raises:
        ValueError: the type of the scales is not ``scale``, or their shape does not fit ``q``.
    """
    if scale is not None and scale_type(scales) != scale:
        raise ValueError(
            f"scales are of type {scale_type(scales)!r}, expected {scale!r}; quantize again with "
            "the expected scale type: converting these scales would change every value"
        )
    rows = 1 if q.ndim < 2 or scales.shape[-2:-1] == q.shape[-2:-1] else block
    whole = Quantized(
        values=q if q.ndim > 1 else q[None],
        scales=scales if q.ndim > 1 else scales[None],
        rows=rows,
        block=block,
    )
    return values_of(whole).to(dtype).view(q.shape)


def activations(x: Float[Tensor, "m k"], form: Format) -> Quantized:
    """Quantize activations as an operand, without the check of ``quantize`` for infinities.

    Infinities become NaN in a product.
    """
    return operand(*layouts(x, 1, form)[:2], rows=1, block=form.block)


def weight(w: Float[Tensor, "*e o i"], form: Format) -> Quantized:
    """Quantize a weight as an operand, without the check of ``quantize_weight`` for infinities."""
    found = layouts(w, form.weight_rows, form)[:2]
    return operand(*found, rows=form.weight_rows, block=form.block)


def layouts(
    x: Float[Tensor, "*e m k"],
    rows: int,
    form: Format,
    *,
    straight: bool = True,
    transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize a matrix and its transpose, reading it once.

    Args:
        x: a matrix, or one per expert.
        rows: number of rows in a block: 1 or ``form.block``.
        form: the format of blocks and scales.
        straight: whether to quantize ``x``.
        transposed: whether to quantize the transpose of ``x``, in blocks of the same shape.

    Returns:
        Values and scales, then those of the transpose, for ``operand``. Results that were not asked
        for have no elements.
    """
    found: tuple[Tensor, Tensor, Tensor, Tensor] = _layouts(
        x.detach(), rows, form.block, form.scale, straight, transposed
    )
    return found


def operand(
    values: Float[Tensor, "*e m k"], scales: Shaped[Tensor, " n"], *, rows: int, block: int
) -> Quantized:
    """Return values and scales of ``layouts`` as an operand.

    There, scales have one dimension: with one for blocks, ``torch.compile`` would compile again for
    a pack of a single block. Scales of blocks with one row lie column by column, as the kernels
    that multiply read them; scales of square blocks lie row by row.
    """
    *experts, m, k = values.shape
    across = -(-k // block)
    if rows == 1:
        scales = scales.view(*experts, across, m).transpose(-1, -2)
    else:
        scales = scales.view(*experts, -(-m // rows), across)
    return Quantized(values=values, scales=scales, rows=rows, block=block)


# An operator, since torch.compile can't trace the choice between kernel and reference. Its name
# doesn't begin with ``primerl::``: selective recomputation saves the results of those operators.
@torch.library.custom_op("primerl_fp8::quantize", mutates_args=())
def _layouts(
    x: Tensor, rows: int, block: int, scale: str, straight: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results = _empty_results(x, rows, block, scale, straight, transposed)
    if reason_against_triton(x, block) is None:
        from primerl.fp8.quantization_triton import quantize_into

        pairs = results[:2] if straight else None, results[2:] if transposed else None
        quantize_into(x, *pairs, rows=rows, block=block)
        return results
    kind: Any = scale
    found = quantize_blocks(x, rows=rows, block=block, scale=kind) if straight else None
    if found is not None:
        _copy(found, results[:2])
    if transposed and found is not None and rows == block:
        _copy(found.transposed(), results[2:])
    elif transposed:
        other = quantize_blocks(x.transpose(-1, -2), rows=rows, block=block, scale=kind)
        _copy(other, results[2:])
    return results


def _copy(found: Quantized, pair: tuple[Tensor, Tensor]) -> None:
    into = operand(*pair, rows=found.rows, block=found.block)
    into.values.copy_(found.values)
    into.scales.copy_(found.scales)


def _empty_results(
    x: Tensor, rows: int, block: int, scale: Any, straight: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *experts, m, k = x.shape
    results = []
    for asked, height, width in ((straight, m, k), (transposed, k, m)):
        number = math.prod(experts) * -(-height // rows) * -(-width // block)
        values = (*experts, height, width) if asked else (0,)
        results.append(x.new_empty(values, dtype=FP8))
        results.append(x.new_empty(number if asked else 0, dtype=SCALE_DTYPES[scale]))
    first, first_scales, second, second_scales = results
    return first, first_scales, second, second_scales


_layouts.register_fake(_empty_results)


def reason_against_triton(x: Tensor, block: int) -> str | None:
    """Return why a tensor is quantized by ``quantize_blocks``; None if Triton's kernel does."""
    if not x.is_cuda or torch.version.hip is not None:
        return "the kernel is for Nvidia's GPUs"
    if block not in KERNEL_BLOCKS:
        return f"the kernel takes blocks of 16, 32, 64 or 128, not {block}"
    if not x.numel():
        return "the tensor is empty"
    return _failure_of_triton(x.device) if has_values(x) else None


@functools.cache
def _failure_of_triton(device: torch.device) -> str | None:
    consequence = "FP8 quantization runs without its fused kernel, more slowly."
    return failure_of_triton(_run_once, device, consequence=consequence)


def _run_once(device: torch.device) -> None:
    from primerl.fp8 import quantization_triton

    quantization_triton.run_once(device)


def quantize_blocks(
    x: Float[Tensor, "*e m k"], *, rows: int, block: int, scale: ScaleType
) -> Quantized:
    """Quantize blocks of ``rows`` x ``block``: the reference of all kernels (see ``format``)."""
    *experts, m, k = x.shape
    m_blocks, k_blocks = -(-m // rows), -(-k // block)
    padded = F.pad(x.detach().float(), (0, k_blocks * block - k, 0, m_blocks * rows - m))
    blocks = padded.reshape(*experts, m_blocks, rows, k_blocks, block)
    amax = blocks.abs().amax((-3, -1)).clamp(min=EPSILON)
    # Divide by a tensor: dividing by a number, CUDA multiplies by its reciprocal, which rounds
    # differently.
    scales = amax / torch.full_like(amax, LARGEST)
    if scale == "ue8m0":
        stored = _rounded_up_to_power_of_two(scales)
        scales = stored.float()
    else:
        stored = scales
    scaled = blocks / scales[..., :, None, :, None]
    q = scaled.clamp(-LARGEST, LARGEST).to(FP8).view(padded.shape)[..., :m, :k].contiguous()
    return Quantized(values=q, scales=stored, rows=rows, block=block)


def values_of(quantized: Quantized) -> Float[Tensor, "*e m k"]:
    """Dequantize an operand to float32."""
    rows, block = quantized.rows, quantized.block
    *experts, m, k = quantized.values.shape
    # Of scales by columns, the product would lie by columns too, and would have to be copied.
    values, scales = _decoded(quantized.values), quantized.scales.float().contiguous()
    if m % rows == 0 and k % block == 0:
        blocks = values.view(*experts, m // rows, rows, k // block, block)
        return (blocks * scales[..., :, None, :, None]).reshape(values.shape)
    scales = scales.repeat_interleave(rows, -2)[..., :m, :]
    scales = scales.repeat_interleave(block, -1)[..., :k]
    return values * scales


def _decoded(values: Float[Tensor, "*e m k"]) -> Float[Tensor, "*e m k"]:
    """Convert FP8 to float32; on a CPU, a lookup table is several times faster than a cast."""
    if values.device.type != "cpu":
        return values.float()
    codes = values.view(torch.uint8)
    return _table().index_select(0, codes.reshape(-1).int()).view(values.shape)


@functools.cache
def _table() -> Float[Tensor, " 256"]:
    """Return the float32 value of each FP8 code."""
    return torch.arange(256, dtype=torch.uint8).view(FP8).float()


def _rounded_up_to_power_of_two(scales: Float[Tensor, "*n"]) -> Shaped[Tensor, "*n"]:
    """Round positive float32 values up to powers of two, as float8_e8m0fnu.

    That dtype is the exponent field of float32. This is exact, whereas ``exp2(ceil(log2(x)))``
    rounds a number just above a power of two down to it.
    """
    bits = scales.contiguous().view(torch.int32)
    exponent = (bits >> _MANTISSA_BITS) + ((bits & _MANTISSA) != 0).int()
    return exponent.clamp(max=255).to(torch.uint8).view(torch.float8_e8m0fnu)  # 255 is NaN


def _require_finite(x: Tensor) -> None:
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise ValueError(f"cannot quantize {x.dtype}; expected a float dtype of 16 bits or more")
    if x.is_meta:
        return
    bad = ~torch.isfinite(x.detach().float())
    if bad.any():
        first = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{int(bad.sum())} of {x.numel()} values are infinite or NaN in float32, the first at "
            f"{first}; an FP8 block with one loses all its values. Find the step that produced them"
        )
