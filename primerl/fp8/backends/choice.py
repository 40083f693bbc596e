"""Which backend multiplies."""

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
"""The first that can multiply is taken; the reference always can."""

log = logging.getLogger(__name__)


def require_backend(name: BackendName, form: Format, device: torch.device) -> Backend:
    """The backend that multiplies in a format on a device.

    With ``"auto"``, the first of deep_gemm, flashinfer, torch and reference that can; which one it
    is, and why not those before it, is logged once.

    Raises:
        ValueError: there is no such backend, or it can't; the message says why.
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
