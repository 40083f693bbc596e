"""Check that Triton can compile kernels on this machine and start them on a device."""

import logging
import subprocess
from collections.abc import Callable

import torch

_log = logging.getLogger(__name__)


def failure_of_triton(
    run_once: Callable[[torch.device], None], device: torch.device, *, consequence: str
) -> str | None:
    """Run kernels once, and return why they can't run on a device; None if they can.

    Triton may be installed and fail: it needs a C compiler and Python's C headers, for example. The
    reason is also logged as a warning, after a sentence that names the ``consequence``.
    """
    try:
        run_once(device)
    except _errors() as error:
        reason = f"Triton can't run on {device}: {error}"
        _log.warning("%s %s", consequence, reason)
        return reason
    return None


def _errors() -> tuple[type[Exception], ...]:
    """Return the errors with which kernels fail: Triton's own, too, if it can be imported."""
    expected = (ImportError, OSError, RuntimeError, subprocess.SubprocessError)
    try:
        from triton.errors import TritonError
    except expected:
        return expected
    return (*expected, TritonError)
