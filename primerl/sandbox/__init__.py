"""Runs code that nobody trusts, fast and locally: pools of sandboxes, sessions, and graders.

See ``docs/sandbox.md``. Nothing loads before it is used: a pool's helper processes import only
``primerl.sandbox.engine``, which is of the standard library.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from primerl.sandbox.errors import BadReply, Probe, SandboxError, SandboxUnavailable
    from primerl.sandbox.grading import Case, Verdict, grade
    from primerl.sandbox.pool import SandboxPool
    from primerl.sandbox.repositories import TestReport, grade_repository
    from primerl.sandbox.results import Isolation, Limits, Result, Root
    from primerl.sandbox.sessions import SandboxSession, SandboxSnapshot
    from primerl.sandbox.tiers import probe
    from primerl.sandbox.verifiers_adapter import SandboxEnv, SandboxEnvConfig, verifiers_runtime

_LAZY = {
    "BadReply": "errors",
    "Case": "grading",
    "Isolation": "results",
    "Limits": "results",
    "Probe": "errors",
    "Result": "results",
    "Root": "results",
    "SandboxEnv": "verifiers_adapter",
    "SandboxEnvConfig": "verifiers_adapter",
    "SandboxError": "errors",
    "SandboxPool": "pool",
    "SandboxUnavailable": "errors",
    "SandboxSession": "sessions",
    "SandboxSnapshot": "sessions",
    "TestReport": "repositories",
    "Verdict": "grading",
    "grade": "grading",
    "grade_repository": "repositories",
    "probe": "tiers",
    "verifiers_runtime": "verifiers_adapter",
}

__all__ = [
    "BadReply",
    "Case",
    "Isolation",
    "Limits",
    "Probe",
    "Result",
    "Root",
    "SandboxEnv",
    "SandboxEnvConfig",
    "SandboxError",
    "SandboxPool",
    "SandboxUnavailable",
    "SandboxSession",
    "SandboxSnapshot",
    "TestReport",
    "Verdict",
    "grade",
    "grade_repository",
    "probe",
    "verifiers_runtime",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'primerl.sandbox' has no attribute {name!r}")
    return getattr(importlib.import_module(f"primerl.sandbox.{_LAZY[name]}"), name)
