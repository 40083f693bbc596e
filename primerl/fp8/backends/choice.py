"""Choice of the backend that multiplies FP8 operands."""

import functools
import logging
from typing import Literal

import torch

from primerl.fp8.backends.deep_gemm import DeepGEMM
from primerl.fp8.backends.flashinfer import FlashInfer
from primerl.fp8.backends.interface import Backend
from primerl.fp8.backends.reference import Reference
from primerl.fp8.backends.scaled_mm import ScaledMM
from primerl.fp8.format import Format

BackendName = Literal["auto", "reference", "torch", "deep_gemm", "flashinfer"]

BACKENDS: dict[str, Backend] = {
    one.name: one for one in (DeepGEMM(), FlashInfer(), ScaledMM(), Reference())
}
"""Backends in order of preference; the last, the reference, supports everything."""

log = logging.getLogger(__name__)


def require_backend(name: BackendName, form: Format, device: torch.device) -> Backend:
    """Return the backend that multiplies in a format on a device.

    ``"auto"`` selects the first of deep_gemm, flashinfer, torch and reference that supports the
    format and device. It logs once which backend was selected, and why the preceding ones were not.

    Raises:
        ValueError: there is no backend of this name, or it can't multiply here; the message says
            why.
    """
    if name == "auto":
        return _first_able(form, device)
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}; expected one of auto, {', '.join(BACKENDS)}")
    reason = BACKENDS[name].refusal(form, device)
    if reason is not None:
        raise ValueError(f"backend {name!r} can't multiply here: {reason}; pass backend='auto'")
    return BACKENDS[name]


@functools.cache
def _first_able(form: Format, device: torch.device) -> Backend:
    reasons: list[str] = []
    for name, backend in BACKENDS.items():
        reason = backend.refusal(form, device)
        if reason is None:
            log.info("FP8 on %s: backend %s (%s)", device, name, "; ".join(reasons) or "the first")
            return backend
        reasons.append(f"not {name}: {reason}")
    raise AssertionError("the reference multiplies everywhere")
