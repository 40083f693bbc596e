"""Imports of optional dependencies, with errors that say how to install them."""

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import re
from collections.abc import Iterable
from types import ModuleType

TESTED = {
    "torch": ((2, 11), (2, 14)),
    "transformers": ((5, 17), (5, 24)),
    "verifiers": ((0, 4), (0, 4)),
}
"""The first and the last tested minor release per package, as in ``pyproject.toml``."""

MODULES = {
    "recipes": ("transformers", "psutil", "tyro", "rich"),
    "verifiers": ("verifiers",),
    "vllm": ("vllm",),
    "lora": ("peft",),
    "data": ("datasets",),
    "ray": ("ray",),
    "wandb": ("wandb",),
}
"""The modules of each optional dependency group that recipes need."""

ENVIRONMENTS = {
    "bugfix": "bugfix",
    "pivot": "pivot",
    "python-math": "python_math",
    "reasoning-gym": "reasoning_gym_environment",
    "reverse-words": "reverse_words",
    "swe-folder": "swe_folder",
}
"""The module of each environment in ``recipes/environments``."""

_log = logging.getLogger(__name__)


def require(module: str, *, extra: str) -> ModuleType:
    """Import ``module``, which the optional dependency group ``extra`` provides.

    Raises:
        ImportError: ``module`` is not installed; the message holds the command that installs it.
    """
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # If ``module`` itself is installed but one of its imports is missing, show that error.
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        raise ImportError(
            f"{module} is not installed; {install_command(extra)}", name=module
        ) from None
    package = module.partition(".")[0]
    warn_if_untested(package)
    if package == "transformers":
        warn_if_untested("torch")
    return found


@functools.cache
def warn_if_untested(package: str) -> None:
    """Log a warning, once, if primerl is not tested with a package's installed release.

    Pip installs such a release only if it is requested explicitly or by another package.
    """
    if package not in TESTED:
        return
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return
    first, last = TESTED[package]
    found = re.match(r"(\d+)\.(\d+)", installed)
    if found is not None and first <= (int(found[1]), int(found[2])) <= last:
        return
    bounds = f">={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"
    _log.warning(
        "%s %s is installed, but primerl is tested only with %s, and internals that it relies on "
        "may have changed; if something fails, run: pip install '%s%s'",
        package,
        installed,
        bounds,
        package,
        bounds,
    )


def require_all(extras: Iterable[str], *, environments: Iterable[str] = ()) -> None:
    """Check that optional dependencies are installed, without importing them.

    Args:
        extras: optional dependency groups, keys of ``MODULES``.
        environments: ids of verifiers environments; ids that are not in ``ENVIRONMENTS`` are not
            checked.

    Raises:
        ImportError: some are not installed; the message names all of them, and one command that
            installs them.
    """
    missing: dict[str, list[str]] = {}
    for extra in extras:
        absent = [module for module in MODULES[extra] if not _is_installed(module)]
        if absent:
            missing[extra] = absent
    packages = [environment.partition(":")[0] for environment in environments]
    ours = [
        package
        for package in dict.fromkeys(packages)
        if package in ENVIRONMENTS and not _is_installed(ENVIRONMENTS[package])
    ]
    if not missing and not ours:
        return
    names = [module for absent in missing.values() for module in absent]
    names += [f"the environment {package}" for package in ours]
    hint = " (vLLM for a CPU: docs/vllm.md)" if "vllm" in missing else ""
    raise ImportError(
        f"not installed: {', '.join(names)}; {install_command(*missing, environments=ours)}{hint}"
    )


def install_command(*extras: str, environments: Iterable[str] = ()) -> str:
    """Return the command that installs optional dependency groups and environments."""
    words = [f"'.[{','.join(extras)}]'"] if extras else []
    words += [f"./recipes/environments/{name}" for name in environments]
    return f"in a clone of primerl, run: pip install {' '.join(words)}"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a replacement in sys.modules without a spec
        return False
