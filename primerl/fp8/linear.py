"""A linear layer that multiplies in FP8, with its gradients.

    y  = Q(x)  Q(W)^T          activations 1 x 128, weight 128 x 128
    dx = Q(dy) Q(W)            the forward pass's quantized weight, if its blocks are square
    dW = dy^T x                in bfloat16; or Q(dy^T) Q(x^T)^T, both 1 x 128 along tokens

The parameter is the master weight, in 32 or 16 bits. On one rank, the forward pass quantizes it in
both layouts, in one read, and autograd keeps the transposed one for the backward pass. With several
ranks, it is quantized again there, because sharding (FSDP2) frees gathered weights in between, and
must not leave their FP8 copies behind; the result is the same. No copy outlives its backward pass:
neither fused optimizers nor FSDP2 change a parameter's version when they change its values, so
nothing would tell that a copy is out of date.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from primerl.fp8.backends.choice import BackendName, Product, require_backend
from primerl.fp8.format import BLOCK_FP8, Format, scale_type
from primerl.fp8.quantization import layouts, operand

WeightGradient = Literal["bf16", "fp8"]
WEIGHT_GRADIENTS = ("bf16", "fp8")


class Fp8Linear(nn.Linear):
    """Linear layer with forward pass and data gradient in FP8 (formulas: module docstring).

    Args:
        linear: the layer to replace; its parameter objects are reused.
        form: the format of blocks and scales.
        weight_gradient: precision of the weight gradient: ``"bf16"`` or ``"fp8"``.
        backend: the backend that multiplies.
    """

    def __init__(
        self,
        linear: nn.Linear,
        *,
        form: Format = BLOCK_FP8,
        weight_gradient: WeightGradient = "bf16",
        backend: BackendName = "auto",
    ) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)
        self.form = form
        self.weight_gradient: WeightGradient = weight_gradient
        self.backend: BackendName = backend

    def forward(self, input: Float[Tensor, "*t i"]) -> Float[Tensor, "*t o"]:  # noqa: A002
        """Multiply ``input`` by the weight in FP8 and add the bias, in the dtype of ``input``."""
        x: Tensor = input
        w: Tensor = self.weight
        bias: Tensor | None = self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, w = x.to(dtype), w.to(dtype)
            bias = bias if bias is None else bias.to(dtype)
        y = linear(x, w, form=self.form, weight_gradient=self.weight_gradient, backend=self.backend)
        return y if bias is None else y + bias.to(y.dtype)

    def extra_repr(self) -> str:
        """Return the layer's settings, for ``print``."""
        scale, block = self.form.scale, self.form.block
        return f"{super().extra_repr()}, fp8: {scale} scales of {block}, backend={self.backend}"


def linear(
    x: Float[Tensor, "*t i"],
    w: Float[Tensor, "o i"],
    *,
    form: Format,
    weight_gradient: WeightGradient,
    backend: BackendName,
    keep_weight: bool | None = None,
) -> Float[Tensor, "*t o"]:
    """Compute ``x W^T`` in FP8, in the dtype of ``x``; gradients are as in the module docstring.

    ``keep_weight`` chooses whether the quantized weight is kept for the backward pass: by default,
    if this process is the only rank.
    """
    if keep_weight is None:
        keep_weight = keeps_weights()
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        rows, w, form, weight_gradient, backend, keep_weight
    )
    return y.view(*x.shape[:-1], w.shape[0])


def keeps_weights() -> bool:
    """Check whether quantized weights are kept for the backward pass: this rank is the only one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        form: Format,
        weight_gradient: WeightGradient,
        backend: BackendName,
        keep_weight: bool,
    ) -> Tensor:
        of_x, of_w = ctx.needs_input_grad[:2]
        in_fp8 = weight_gradient == "fp8"
        a = layouts(x, 1, form, transposed=of_w and in_fp8)
        b = layouts(w, form.weight_rows, form, transposed=of_x and keep_weight)
        kept_x = a[2:] if in_fp8 else (x.to(torch.bfloat16), None)
        ctx.save_for_backward(
            *(kept_x if of_w else (None, None)), *(b[2:] if keep_weight else (w, None))
        )
        ctx.form, ctx.in_fp8, ctx.backend, ctx.dtype = form, in_fp8, backend, w.dtype
        y: Tensor = _multiply(
            *a[:2], *b[:2], form.weight_rows, form.block, form.weight_rows, backend, x.dtype
        )
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scales, w, w_scales = ctx.saved_tensors
        of_x, of_w = ctx.needs_input_grad[:2]
        form, dx, dw = ctx.form, None, None
        rest = (form.block, form.weight_rows, ctx.backend)
        gradient = layouts(dy, 1, form, straight=of_x, transposed=of_w and ctx.in_fp8)
        if of_x:
            if w_scales is None:
                found = layouts(w, form.weight_rows, form, straight=False, transposed=True)
                w, w_scales = found[2:]
            dx = _multiply(*gradient[:2], w, w_scales, form.weight_rows, *rest, dy.dtype)
        if of_w and ctx.in_fp8:
            dw = _multiply(*gradient[2:], x, x_scales, 1, *rest, ctx.dtype)
        elif of_w:
            dw = product_of_16_bits(dy.t(), x, dtype=ctx.dtype)
        return dx, dw, None, None, None, None


# A custom operator, because torch.compile can't trace the choice of a backend. Torch's operator
# schemas don't support Quantized, so its fields are passed separately.
@torch.library.custom_op("primerl::fp8_multiply", mutates_args=())
def _multiply(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    b_rows: int,
    block: int,
    weight_rows: int,
    backend: str,
    dtype: torch.dtype,
) -> Tensor:
    """Compute ``a b^T``, with blocks of 1 row in ``a`` and of ``b_rows`` rows in ``b``."""
    name: Any = backend
    form = Format(scale=scale_type(a_scales), block=block, weight_rows=weight_rows)
    product: Product = "weight" if b_rows == weight_rows else "weight_gradient"
    able = require_backend(name, form, a.device, product)
    left = operand(a, a_scales, rows=1, block=block)
    right = operand(b, b_scales, rows=b_rows, block=block)
    return able.multiply(left, right, dtype=dtype).contiguous()


@_multiply.register_fake
def _(a: Tensor, a_scales: Tensor, b: Tensor, *rest: Any) -> Tensor:  # noqa: ARG001
    return a.new_empty(a.shape[0], b.shape[0], dtype=rest[-1])


def product_of_16_bits(a: Tensor, b: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Compute ``a b`` from operands rounded to bfloat16, with sums in float32."""
    a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    with torch.autocast(a.device.type, enabled=False):
        if a.is_cuda:
            return a @ b if dtype == torch.bfloat16 else torch.mm(a, b, out_dtype=torch.float32)
        return (a.float() @ b.float()).to(dtype)


def check_weight_gradient(weight_gradient: str) -> None:
    """Check that the precision of the weight gradient is a known one.

    Raises:
        ValueError: ``weight_gradient`` is not ``"bf16"`` or ``"fp8"``.
    """
    if weight_gradient not in WEIGHT_GRADIENTS:
        raise ValueError(f'weight_gradient is {weight_gradient!r}; expected "bf16" or "fp8"')
