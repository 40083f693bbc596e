"""Grouped FP8 matrix products for a layer's experts.

Rows are sorted by expert. The forward pass and the data gradient multiply each group of rows by the
matrix of its expert. The gradient of a matrix sums over the rows of its group, so the blocks along
tokens restart with each group.
"""

from typing import Any

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from primerl.fp8.backends.choice import BackendName, require_backend
from primerl.fp8.backends.interface import Backend, groups
from primerl.fp8.format import BLOCK_FP8, Format
from primerl.fp8.linear import (
    WeightGradient,
    check_weight_gradient,
    kept_input,
    product_of_16_bits,
)
from primerl.fp8.quantization import activations, transposed_weight, weight


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

        Raises:
            ValueError: ``ends`` decrease, or don't end at the last row.
        """
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weights = x.to(dtype), weights.to(dtype)
        backend = require_backend(self.backend, self.form, x.device)
        # [e, o, i], as in checkpoints; the transpose has the same blocks if they are square.
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
            for expert, (begin, end) in enumerate(groups(ends, rows=dy.shape[0])):
                if end > begin:
                    dw[expert] = _weight_gradient(ctx, dy[begin:end], x[begin:end], w.dtype)
        return dx, dw, None, None, None, None


def _weight_gradient(ctx: Any, dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``dy^T x``, shape ``[o, i]``, from the rows of one expert."""
    if ctx.weight_gradient == "bf16":
        return product_of_16_bits(dy.t(), x, dtype=dtype)
    product: Tensor = ctx.backend.multiply(
        activations(dy.t(), ctx.form), activations(x.t(), ctx.form), dtype=dtype
    )
    return product
