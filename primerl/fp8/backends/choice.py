"""Choice of the backend that multiplies FP8 operands."""

import functools
import logging
from typing import Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from primerl.fp8.backends.deep_gemm import DeepGEMM
from primerl.fp8.backends.flashinfer import FlashInfer
from primerl.fp8.backends.interface import Backend, Groups
from primerl.fp8.backends.reference import Reference
from primerl.fp8.backends.scaled_mm import ScaledMM
from primerl.fp8.format import Format
from primerl.fp8.quantization import activations, weight

BackendName = Literal["auto", "reference", "torch", "deep_gemm", "flashinfer"]

Product = Literal["weight", "weight_gradient", "grouped"]
"""A product with a weight; a weight gradient, whose operands both have blocks of one row; or a
product of each group of rows with its own weight."""

BACKENDS: dict[str, Backend] = {
    one.name: one for one in (DeepGEMM(), FlashInfer(), ScaledMM(), Reference())
}
"""Backends in order of preference; the last, the reference, supports everything."""

_LARGEST_ERROR = 0.01
_NAMES: dict[Product, str] = {
    "weight": "product with a weight",
    "weight_gradient": "weight gradient",
    "grouped": "grouped product",
}

log = logging.getLogger(__name__)


def require_backend(
    name: BackendName, form: Format, device: torch.device, product: Product = "weight"
) -> Backend:
    """Return the backend that computes a kind of product in a format on a device.

    ``"auto"`` selects the first of deep_gemm, flashinfer, torch and reference that supports the
    format and device. It logs once which backend was selected, and why the preceding ones were not.
    A backend's library may be installed and still fail: it does not load with this torch, has other
    parameters, or computes wrong values. So each backend is used only after a small product is that
    of the reference. Kernels differ between the kinds of products, so each kind is tried before its
    first use, and a backend that fails one is still used for the others.

    Raises:
        ValueError: there is no backend of this name, or it can't multiply here; the message says
            why.
    """
    if name == "auto":
        return _first_able(form, device, product)
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}; expected one of auto, {', '.join(BACKENDS)}")
    reason = reason_against(name, form, device, product)
    if reason is not None:
        raise ValueError(f"backend {name!r} can't multiply here: {reason}; pass backend='auto'")
    return BACKENDS[name]


@functools.cache
def _first_able(form: Format, device: torch.device, product: Product) -> Backend:
    reasons: list[str] = []
    for name, backend in BACKENDS.items():
        reason = reason_against(name, form, device, product)
        if reason is None:
            why = "; ".join(reasons) or "the first"
            log.info("FP8 on %s, %s: backend %s (%s)", device, _NAMES[product], name, why)
            return backend
        reasons.append(f"not {name}: {reason}")
    raise AssertionError("the reference multiplies everywhere")


@functools.cache
def reason_against(name: str, form: Format, device: torch.device, product: Product) -> str | None:
    """Return why a backend isn't used for a kind of product; None if it can be used.

    The first call tries the product. A failure is logged as a warning.
    """
    backend = BACKENDS[name]
    reason = backend.refusal(form, device)
    if reason is not None or isinstance(backend, Reference):
        return reason
    failure: str | None = _failure(backend, form, device, product)
    if failure is not None:
        log.warning("FP8 backend %s is not used on %s: %s", name, device, failure)
    return failure


# With real tensors: with fake ones, every library would fail, and not be tried again.
@torch.compiler.disable  # type: ignore[untyped-decorator]
@_disable_current_modes()
def _failure(backend: Backend, form: Format, device: torch.device, product: Product) -> str | None:
    """Compute a small product, and return why it failed; None if it is that of the reference."""
    entries = torch.arange(2 * 128 * 256, device=device).view(2, 128, 256)
    rows, matrices = (entries[0] % 101 - 50).float(), (entries % 89 - 30).float()
    a = activations(rows, form)

    def computed(by: Backend, dtype: torch.dtype) -> Tensor:
        if product == "grouped":
            ends = torch.tensor([40, len(rows)], dtype=torch.int32, device=device)
            groups = Groups.read(ends, rows=len(rows))
            return by.multiply_grouped(a, weight(matrices, form), groups, dtype=dtype)
        quantize = weight if product == "weight" else activations
        return by.multiply(a, quantize(matrices[0], form), dtype=dtype)

    expected = computed(BACKENDS[Reference.name], torch.float32)
    try:
        found = computed(backend, torch.bfloat16).float()
    except Exception as error:  # whatever a library raises while it is loaded or compiled
        return f"a small {_NAMES[product]} raised {type(error).__name__}: {error}"
    # NaN fails the comparison; bfloat16's rounding and other orders of sums are below 0.005.
    off = ((found - expected).norm() / expected.norm()).item()
    if off < _LARGEST_ERROR:
        return None
    return f"a small {_NAMES[product]} has a relative error of {off}"
