"""The matrices of a layer's experts in FP8: what ``parallel.divide_experts`` multiplies with.

Rows are sorted by expert. Forward pass and data gradient are products of groups of rows with one
matrix each; the gradient of a matrix sums over the rows of its group, so blocks along tokens begin
anew with each group.
"""

import itertools
from typing import Any

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from primerl._values import group_ends
from primerl.fp8.backends.choice import BackendName, require_backend
from primerl.fp8.backends.interface import Backend
from primerl.fp8.format import BLOCK_FP8, Format
from primerl.fp8.linear import (
    WeightGradient,
    check_weight_gradient,
    kept_input,
    product_of_16_bits,
    transposed_weight,
)
from primerl.fp8.quantization import activations, weight


@attrs.frozen(kw_only=True)
class GroupedMatmul:
    """Multiplies rows sorted by expert with each expert's matrix, in FP8.

        parallel.shard(model, mesh, matmul=fp8.GroupedMatmul())

    The formulas of ``Fp8Linear``, for each group of rows.

    Raises:
        ValueError: ``weight_gradient`` is neither.
    """

    form: Format = BLOCK_FP8
    weight_gradient: WeightGradient = "bf16"
    """``"bf16"`` or ``"fp8"``."""
    backend: BackendName = "auto"

    def __attrs_post_init__(self) -> None:
        check_weight_gradient(self.weight_gradient)

    def __call__(
        self,
        x: Float[Tensor, "n i"],
        weights: Float[Tensor, "e i o"],
        ends: Int[Tensor, " e"],
    ) -> Float[Tensor, "n o"]:
        """Rows up to ``ends[0]`` times the first matrix, from there to ``ends[1]`` the second..."""
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weights = x.to(dtype), weights.to(dtype)
        backend = require_backend(self.backend, self.form, x.device)
        # As checkpoints have them, [e, o, i]: blocks are the same either way round, if square.
        w = weights.transpose(1, 2)
        y: Tensor = _Grouped.apply(  # type: ignore[no-untyped-call]
            x, w, ends, self.form, self.weight_gradient, backend
        )
        return y


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        ends: Tensor,
        form: Format,
        weight_gradient: WeightGradient,
        backend: Backend,
    ) -> Tensor:
        kept = kept_input(x, weight_gradient) if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(kept, w, ends)
        ctx.form, ctx.weight_gradient, ctx.backend = form, weight_gradient, backend
        return backend.multiply_grouped(activations(x, form), weight(w, form), ends, dtype=x.dtype)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x, w, ends = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            operand = transposed_weight(w, ctx.form)
            dx = ctx.backend.multiply_grouped(
                activations(dy, ctx.form), operand, ends, dtype=dy.dtype
            )
        if ctx.needs_input_grad[1]:
            dw = torch.zeros_like(w)
            begins = [0, *group_ends(ends, len(dy))]
            for expert, (begin, end) in enumerate(itertools.pairwise(begins)):
                if end > begin:
                    dw[expert] = _weight_gradient(ctx, dy[begin:end], x[begin:end], w.dtype)
        return dx, dw, None, None, None, None


def _weight_gradient(ctx: Any, dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """``dy^T x`` of one expert's rows: ``[o, i]``."""
    if ctx.weight_gradient == "bf16":
        return product_of_16_bits(dy.t(), x, dtype=dtype)
    product: Tensor = ctx.backend.multiply(
        activations(dy.t(), ctx.form), activations(x.t(), ctx.form), dtype=dtype
    )
    return product
