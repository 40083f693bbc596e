"""Sandboxes that run untrusted code fast and locally: pools, sessions and graders.

See ``docs/sandbox.md``. Submodules are imported on first use, so that a pool's helper processes
import only ``primerl.sandbox.guest``, which needs nothing but the standard library.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from primerl.sandbox.errors import (
        BadReply,
        Probe,
        SandboxError,
        SandboxLost,
        SandboxNotStarted,
        SandboxUnavailable,
    )
    from primerl.sandbox.grading import Case, CaseVerdict, grade
    from primerl.sandbox.pool import SandboxPool
    from primerl.sandbox.repositories import (
        Executable,
        SymbolicLink,
        TestReport,
        grade_repository,
    )
    from primerl.sandbox.results import Isolation, Result, Root, SandboxLimits
    from primerl.sandbox.sessions import SandboxSession, SandboxSnapshot
    from primerl.sandbox.tiers import probe
    from primerl.sandbox.tiers.on_ray.hosts import RayHosts
    from primerl.sandbox.verifiers_adapter import SandboxEnv, SandboxEnvConfig, verifiers_runtime

_LAZY = {
    "BadReply": "errors",
    "Case": "grading",
    "Executable": "repositories",
    "Isolation": "results",
    "SandboxLimits": "results",
    "Probe": "errors",
    "Result": "results",
    "Root": "results",
    "SandboxEnv": "verifiers_adapter",
    "SandboxEnvConfig": "verifiers_adapter",
    "RayHosts": "tiers.on_ray.hosts",
    "SandboxError": "errors",
    "SandboxLost": "errors",
    "SandboxNotStarted": "errors",
    "SandboxPool": "pool",
    "SandboxUnavailable": "errors",
    "SandboxSession": "sessions",
    "SandboxSnapshot": "sessions",
    "SymbolicLink": "repositories",
    "TestReport": "repositories",
    "CaseVerdict": "grading",
    "grade": "grading",
    "grade_repository": "repositories",
    "probe": "tiers",
    "verifiers_runtime": "verifiers_adapter",
}

__all__ = [
    "BadReply",
    "Case",
    "Executable",
    "Isolation",
    "SandboxLimits",
    "Probe",
    "Result",
    "Root",
    "SandboxEnv",
    "SandboxEnvConfig",
    "RayHosts",
    "SandboxError",
    "SandboxLost",
    "SandboxNotStarted",
    "SandboxPool",
    "SandboxUnavailable",
    "SandboxSession",
    "SandboxSnapshot",
    "SymbolicLink",
    "TestReport",
    "CaseVerdict",
    "grade",
    "grade_repository",
    "probe",
    "verifiers_runtime",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'primerl.sandbox' has no attribute {name!r}")
    return getattr(importlib.import_module(f"primerl.sandbox.{_LAZY[name]}"), name)
