"""A linear layer that multiplies in FP8, with its gradients.

    y  = Q(x)  Q(W)^T          activations 1 x 128, weight 128 x 128
    dx = Q(dy) Q(W)            the same bytes of the weight, if its blocks are square
    dW = dy^T x                in bfloat16; or Q(dy^T) Q(x^T)^T, both 1 x 128 along tokens

The parameter is the master weight, in 32 or 16 bits. It is quantized again in the backward pass:
sharding (FSDP2) frees gathered weights in between, and the bytes come out the same.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from primerl.fp8.backends.choice import BackendName, require_backend
from primerl.fp8.backends.interface import Backend
from primerl.fp8.format import BLOCK_FP8, Format, Quantized
from primerl.fp8.quantization import activations, weight

WeightGradient = Literal["bf16", "fp8"]
WEIGHT_GRADIENTS = ("bf16", "fp8")


class Fp8Linear(nn.Linear):
    """``nn.Linear`` in FP8: forward pass and data gradient; see the module's formula.

    Args:
        linear: the layer whose parameters it takes over; they stay the same objects.
        form: of the blocks and scales.
        weight_gradient: ``"bf16"`` or ``"fp8"``.
        backend: that multiplies.
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
        """``input`` times the weight, in FP8, plus the bias; in the dtype of ``input``."""
        x: Tensor = input
        w: Tensor = self.weight
        bias: Tensor | None = self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, w = x.to(dtype), w.to(dtype)
            bias = bias if bias is None else bias.to(dtype)
        backend = require_backend(self.backend, self.form, x.device)
        y = linear(x, w, form=self.form, weight_gradient=self.weight_gradient, backend=backend)
        return y if bias is None else y + bias.to(y.dtype)

    def extra_repr(self) -> str:
        """What ``print`` shows in addition."""
        scale, block = self.form.scale, self.form.block
        return f"{super().extra_repr()}, fp8: {scale} scales of {block}, backend={self.backend}"


def linear(
    x: Float[Tensor, "*t i"],
    w: Float[Tensor, "o i"],
    *,
    form: Format,
    weight_gradient: WeightGradient,
    backend: Backend,
) -> Float[Tensor, "*t o"]:
    """``x W^T`` in FP8, in the dtype of ``x``; the formula of the gradients is the module's."""
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        rows, w, form, weight_gradient, backend
    )
    return y.view(*x.shape[:-1], w.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        form: Format,
        weight_gradient: WeightGradient,
        backend: Backend,
    ) -> Tensor:
        ctx.save_for_backward(
            kept_input(x, weight_gradient) if ctx.needs_input_grad[1] else None, w
        )
        ctx.form, ctx.weight_gradient, ctx.backend = form, weight_gradient, backend
        return backend.multiply(activations(x, form), weight(w, form), dtype=x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, w = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            operand = transposed_weight(w, ctx.form)
            dx = ctx.backend.multiply(activations(dy, ctx.form), operand, dtype=dy.dtype)
        if ctx.needs_input_grad[1]:
            if ctx.weight_gradient == "fp8":
                dw = ctx.backend.multiply(
                    activations(dy.t(), ctx.form), activations(x.t(), ctx.form), dtype=w.dtype
                )
            else:
                dw = product_of_16_bits(dy.t(), x, dtype=w.dtype)
        return dx, dw, None, None, None


def transposed_weight(w: Float[Tensor, "*e o i"], form: Format) -> Quantized:
    """A weight as the data gradient multiplies with it, ``[i, o]``.

    Square blocks: the bytes of the forward pass. Others are quantized anew, along ``o``.
    """
    if form.weight_rows == form.block:
        return weight(w, form).transposed()
    return weight(w.transpose(-1, -2), form)


def kept_input(x: Tensor, weight_gradient: WeightGradient) -> Tensor:
    """What is kept of the input for the gradient of the weight."""
    return x if weight_gradient == "fp8" else x.to(torch.bfloat16)


def product_of_16_bits(a: Tensor, b: Tensor, *, dtype: torch.dtype) -> Tensor:
    """``a b``, of operands rounded to bfloat16, summed in float32."""
    a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    with torch.autocast(a.device.type, enabled=False):
        if a.is_cuda:
            return a @ b if dtype == torch.bfloat16 else torch.mm(a, b, out_dtype=torch.float32)
        return (a.float() @ b.float()).to(dtype)


def check_weight_gradient(weight_gradient: str) -> None:
    """Refuse an unknown kind of gradient.

    Raises:
        ValueError: it is not ``"bf16"`` or ``"fp8"``.
    """
    if weight_gradient not in WEIGHT_GRADIENTS:
        raise ValueError(f'weight_gradient is {weight_gradient!r}; expected "bf16" or "fp8"')
