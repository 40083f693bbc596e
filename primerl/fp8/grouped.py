"""Grouped FP8 matrix products for a layer's experts.

Rows are sorted by expert. The forward pass and the data gradient multiply each group of rows by the
matrix of its expert. The gradient of a matrix sums over the rows of its group, so the blocks along
tokens restart with each group. Weights are quantized as in ``linear``: on one rank, once for both
passes.
"""

from typing import Any

import attrs
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from primerl.fp8.backends.choice import BackendName, require_backend
from primerl.fp8.backends.interface import Backend, Groups
from primerl.fp8.format import BLOCK_FP8, Format
from primerl.fp8.linear import (
    WeightGradient,
    check_weight_gradient,
    keeps_weights,
    product_of_16_bits,
)
from primerl.fp8.quantization import activations, layouts, operand


@attrs.frozen(kw_only=True)
class GroupedMatmul:
    """Multiply rows, sorted by expert, by each expert's matrix in FP8.

        parallel.shard(model, mesh, matmul=fp8.GroupedMatmul())

    The formulas are those of ``Fp8Linear``, applied to each group of rows.

    Raises:
        ValueError: ``weight_gradient`` is not ``"bf16"`` or ``"fp8"``.
    """

    form: Format = BLOCK_FP8
    """The format of blocks and scales."""
    weight_gradient: WeightGradient = "bf16"
    """Precision of the weight gradient: ``"bf16"`` or ``"fp8"``."""
    backend: BackendName = "auto"
    """The backend that multiplies."""

    def __attrs_post_init__(self) -> None:
        check_weight_gradient(self.weight_gradient)

    # Groups are found on the host, so a compiled layer has a break here.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        x: Float[Tensor, "n i"],
        weights: Float[Tensor, "e i o"],
        ends: Int[Tensor, " e"],
    ) -> Float[Tensor, "n o"]:
        """Multiply rows up to ``ends[0]`` by the first matrix, up to ``ends[1]`` by the second, ...

        The host waits for ``ends`` once; the backward pass doesn't wait.

        Raises:
            ValueError: ``ends`` decrease, or don't end at the last row.
        """
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weights = x.to(dtype), weights.to(dtype)
        backend = require_backend(self.backend, self.form, x.device, "grouped")
        of_gradient = None
        if self.weight_gradient == "fp8":
            of_gradient = require_backend(self.backend, self.form, x.device, "weight_gradient")
        # [e, o, i], as in checkpoints; the transpose has the same blocks if they are square.
        w = weights.transpose(1, 2)
        groups = Groups.read(ends, rows=x.shape[0])
        y: Tensor = _Grouped.apply(  # type: ignore[no-untyped-call]
            x, w, groups, self.form, backend, of_gradient, keeps_weights()
        )
        return y


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        groups: Groups,
        form: Format,
        backend: Backend,
        of_gradient: Backend | None,
        keep_weight: bool,
    ) -> Tensor:
        of_x, of_w = ctx.needs_input_grad[:2]
        b = layouts(w, form.weight_rows, form, transposed=of_x and keep_weight)
        kept_x = (x if of_gradient else x.to(torch.bfloat16)) if of_w else None
        ctx.save_for_backward(kept_x, *(b[2:] if keep_weight else (w, None)))
        ctx.groups, ctx.form, ctx.backend, ctx.of_gradient = groups, form, backend, of_gradient
        ctx.shape, ctx.dtype = w.shape, w.dtype
        right = operand(*b[:2], rows=form.weight_rows, block=form.block)
        return backend.multiply_grouped(activations(x, form), right, groups, dtype=x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, w_scales = ctx.saved_tensors
        of_x, of_w = ctx.needs_input_grad[:2]
        form, dx, dw = ctx.form, None, None
        if of_x:
            if w_scales is None:
                found = layouts(w, form.weight_rows, form, straight=False, transposed=True)
                w, w_scales = found[2:]
            right = operand(w, w_scales, rows=form.weight_rows, block=form.block)
            left = activations(dy, form)
            dx = ctx.backend.multiply_grouped(left, right, ctx.groups, dtype=dy.dtype)
        if of_w:
            dw = _weight_gradients(ctx, dy, x)
        return dx, dw, None, None, None, None, None


def _weight_gradients(ctx: Any, dy: Float[Tensor, "n o"], x: Float[Tensor, "n i"]) -> Tensor:
    """Compute ``dy^T x`` of each group of rows: ``[e, o, i]``.

    No backend has a grouped product of FP8 operands that sums over the rows of a group in blocks,
    so there is one product for each expert that has rows.
    """
    if ctx.of_gradient is None and has_grouped_gradient(dy, x, ctx.dtype):
        left = dy.to(torch.bfloat16).contiguous()
        return F.grouped_mm(left.t(), x.contiguous(), offs=ctx.groups.ends.int())
    dw = dy.new_zeros(ctx.shape, dtype=ctx.dtype)
    for expert, (begin, end) in enumerate(ctx.groups.bounds):
        if end == begin:
            continue
        of_y, of_x = dy[begin:end].t(), x[begin:end]
        if ctx.of_gradient is None:
            dw[expert] = product_of_16_bits(of_y, of_x, dtype=ctx.dtype)
        else:
            a, b = activations(of_y, ctx.form), activations(of_x.t(), ctx.form)
            dw[expert] = ctx.of_gradient.multiply(a, b, dtype=ctx.dtype)
    return dw


def has_grouped_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> bool:
    """Check whether torch has a grouped product for weight gradients in bfloat16.

    It is on SM90 and SM100, where the host doesn't wait for it. Operands and result are bfloat16,
    and rows are multiples of 16 bytes.
    """
    if not (dy.is_cuda and len(dy) and dtype == torch.bfloat16):
        return False
    aligned = dy.shape[1] % 8 == 0 and x.shape[1] % 8 == 0
    return aligned and torch.cuda.get_device_capability(dy.device)[0] in (9, 10)
