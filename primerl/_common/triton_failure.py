"""Check that Triton can compile kernels on this machine and start them on a device."""

import logging
import subprocess
from collections.abc import Callable

import torch

# Besides Triton's own errors.
_EXPECTED = (ImportError, OSError, RuntimeError, subprocess.SubprocessError)

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
    except (*_EXPECTED, *_own_errors()) as error:
        reason = f"Triton can't run on {device}: {error}"
        _log.warning("%s %s", consequence, reason)
        return reason
    return None


def _own_errors() -> tuple[type[Exception], ...]:
    """Return the base class of Triton's own errors, if Triton can be imported."""
    try:
        from triton.errors import TritonError
    except (ImportError, OSError, RuntimeError):
        return ()
    return (TritonError,)
