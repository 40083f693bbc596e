"""Choice of the backend that multiplies FP8 operands."""

import functools
import logging
from typing import Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from primerl.fp8.backends.deep_gemm import DeepGEMM
from primerl.fp8.backends.flashinfer import FlashInfer
from primerl.fp8.backends.interface import Backend
from primerl.fp8.backends.reference import Reference
from primerl.fp8.backends.scaled_mm import ScaledMM
from primerl.fp8.format import Format
from primerl.fp8.quantization import activations, weight

BackendName = Literal["auto", "reference", "torch", "deep_gemm", "flashinfer"]

BACKENDS: dict[str, Backend] = {
    one.name: one for one in (DeepGEMM(), FlashInfer(), ScaledMM(), Reference())
}
"""Backends in order of preference; the last, the reference, supports everything."""

_LARGEST_ERROR = 0.01

log = logging.getLogger(__name__)


def require_backend(name: BackendName, form: Format, device: torch.device) -> Backend:
    """Return the backend that multiplies in a format on a device.

    ``"auto"`` selects the first of deep_gemm, flashinfer, torch and reference that supports the
    format and device. It logs once which backend was selected, and why the preceding ones were not.
    A backend's library may be installed and still fail: it does not load with this torch, has other
    parameters, or computes wrong values. So each backend is used only after a small product is that
    of the reference.

    Raises:
        ValueError: there is no backend of this name, or it can't multiply here; the message says
            why.
    """
    if name == "auto":
        return _first_able(form, device)
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}; expected one of auto, {', '.join(BACKENDS)}")
    reason = _reason_against(name, form, device)
    if reason is not None:
        raise ValueError(f"backend {name!r} can't multiply here: {reason}; pass backend='auto'")
    return BACKENDS[name]


@functools.cache
def _first_able(form: Format, device: torch.device) -> Backend:
    reasons: list[str] = []
    for name, backend in BACKENDS.items():
        reason = _reason_against(name, form, device)
        if reason is None:
            log.info("FP8 on %s: backend %s (%s)", device, name, "; ".join(reasons) or "the first")
            return backend
        reasons.append(f"not {name}: {reason}")
    raise AssertionError("the reference multiplies everywhere")


@functools.cache
def _reason_against(name: str, form: Format, device: torch.device) -> str | None:
    backend = BACKENDS[name]
    reason = backend.refusal(form, device)
    if reason is not None or isinstance(backend, Reference):
        return reason
    failure: str | None = _failure(backend, form, device)
    if failure is not None:
        log.warning("FP8 backend %s is not used on %s: %s", name, device, failure)
    return failure


# With real tensors: with fake ones, every library would fail, and not be tried again.
@torch.compiler.disable  # type: ignore[untyped-decorator]
@_disable_current_modes()
def _failure(backend: Backend, form: Format, device: torch.device) -> str | None:
    """Compute a small product, and return why it failed; None if it is that of the reference."""
    entries = torch.arange(128 * 256, device=device).view(128, 256)
    a = activations((entries % 101 - 50).float(), form)
    b = weight((entries % 89 - 30).float(), form)
    try:
        found = backend.multiply(a, b, dtype=torch.bfloat16).float()
    except Exception as error:  # whatever a library raises while it is loaded or compiled
        return f"a small product raised {type(error).__name__}: {error}"
    expected = BACKENDS[Reference.name].multiply(a, b, dtype=torch.float32)
    # NaN fails the comparison; bfloat16's rounding and other orders of sums are below 0.005.
    off = ((found - expected).norm() / expected.norm()).item()
    return None if off < _LARGEST_ERROR else f"a small product has a relative error of {off}"
