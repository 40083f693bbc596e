"""A linear layer that multiplies in FP8, with its gradients.

    y  = Q(x)  Q(W)^T          activations 1 x 128, weight 128 x 128
    dx = Q(dy) Q(W)            the forward pass's quantized weight, if its blocks are square
    dW = dy^T x                in bfloat16; or Q(dy^T) Q(x^T)^T, both 1 x 128 along tokens

The parameter is the master weight, in 32 or 16 bits. It is quantized again in the backward pass,
because sharding (FSDP2) frees gathered weights in between; the result is the same.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primerl.fp8.backends.choice import BackendName, require_backend
from primerl.fp8.backends.interface import Backend
from primerl.fp8.format import BLOCK_FP8, Format, Quantized
from primerl.fp8.quantization import activations, weight

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
) -> Float[Tensor, "*t o"]:
    """Compute ``x W^T`` in FP8, in the dtype of ``x``; gradients are as in the module docstring."""
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor = _product(
        rows, w, form.scale, form.block, form.weight_rows, weight_gradient, backend
    )
    return y.view(*x.shape[:-1], w.shape[0])


# Custom operators, because torch.compile can't trace the choice of a backend. Torch's operator
# schemas don't support Format, so its fields are passed separately.


@torch.library.custom_op("primerl::fp8_linear", mutates_args=())
def _product(
    x: Tensor,
    w: Tensor,
    scale: str,
    block: int,
    weight_rows: int,
    weight_gradient: str,  # noqa: ARG001  used by the backward pass
    backend: str,
) -> Tensor:
    """Compute ``Q(x) Q(W)^T``."""
    form, able = _chosen(scale, block, weight_rows, backend, x.device)
    return able.multiply(activations(x, form), weight(w, form), dtype=x.dtype).contiguous()


@torch.library.custom_op("primerl::fp8_data_gradient", mutates_args=())
def _data_gradient(
    dy: Tensor, w: Tensor, scale: str, block: int, weight_rows: int, backend: str
) -> Tensor:
    """Compute the data gradient ``Q(dy) Q(W)``."""
    form, able = _chosen(scale, block, weight_rows, backend, dy.device)
    dx = able.multiply(activations(dy, form), transposed_weight(w, form), dtype=dy.dtype)
    return dx.contiguous()


@torch.library.custom_op("primerl::fp8_weight_gradient", mutates_args=())
def _weight_gradient(
    dy: Tensor,
    x: Tensor,
    scale: str,
    block: int,
    weight_rows: int,
    backend: str,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the weight gradient ``Q(dy^T) Q(x^T)^T``."""
    form, able = _chosen(scale, block, weight_rows, backend, dy.device)
    dw = able.multiply(activations(dy.t(), form), activations(x.t(), form), dtype=dtype)
    return dw.contiguous()


def _chosen(
    scale: Any, block: int, weight_rows: int, backend: Any, device: torch.device
) -> tuple[Format, Backend]:
    form = Format(scale=scale, block=block, weight_rows=weight_rows)
    return form, require_backend(backend, form, device)


@_product.register_fake
def _(x: Tensor, w: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


@_data_gradient.register_fake
def _(dy: Tensor, w: Tensor, *_: Any) -> Tensor:
    return dy.new_empty(dy.shape[0], w.shape[1])


@_weight_gradient.register_fake
def _(dy: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return dy.new_empty(dy.shape[1], x.shape[1], dtype=rest[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, w, scale, block, weight_rows, weight_gradient, backend = inputs
    ctx.save_for_backward(kept_input(x, weight_gradient) if ctx.needs_input_grad[1] else None, w)
    ctx.form = scale, block, weight_rows, backend
    ctx.weight_gradient = weight_gradient


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = _data_gradient(dy, w, *ctx.form)
    if ctx.needs_input_grad[1]:
        if ctx.weight_gradient == "fp8":
            dw = _weight_gradient(dy, x, *ctx.form, w.dtype)
        else:
            dw = product_of_16_bits(dy.t(), x, dtype=w.dtype)
    return dx, dw, None, None, None, None, None


_product.register_autograd(_backward, setup_context=_keep)


def transposed_weight(w: Float[Tensor, "*e o i"], form: Format) -> Quantized:
    """Return the quantized weight ``[i, o]`` by which the data gradient multiplies.

    With square blocks, this is the transpose of the forward pass's quantized weight. Otherwise, the
    weight is quantized again, with blocks along ``o``.
    """
    if form.weight_rows == form.block:
        return weight(w, form).transposed()
    return weight(w.transpose(-1, -2), form)


def kept_input(x: Tensor, weight_gradient: WeightGradient) -> Tensor:
    """Return the input as saved for the weight gradient: in bfloat16, unless that is in FP8."""
    return x if weight_gradient == "fp8" else x.to(torch.bfloat16)


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
