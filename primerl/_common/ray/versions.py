"""The versions of Python, primerl and packages of a host, which must agree with the worker's."""

import functools
import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path

import primerl

PACKAGES = ("cloudpickle", "msgspec", "numpy", "tokenizers", "transformers", "verifiers")
"""Packages whose objects are pickled, or that decide which tokens a rollout has."""


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of this process; that of primerl's code is a digest of its files."""
    found = {"Python": platform.python_version(), "primerl": primerl.__version__}
    folder = Path(primerl.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    found["primerl's code"] = digest.hexdigest()[:8]
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Describe the versions of another host that differ from ours; empty if none do."""
    return ", ".join(
        f"{name} {theirs.get(name, 'missing')} instead of {version}"
        for name, version in ours.items()
        if theirs.get(name) != version
    )
