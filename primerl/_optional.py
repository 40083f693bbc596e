"""Import an optional dependency, or say how to install it."""

import importlib
import importlib.util
from collections.abc import Iterable
from types import ModuleType

from primerl._tested_versions import warn_if_untested

MODULES = {
    "recipes": ("transformers", "psutil", "tyro", "rich"),
    "verifiers": ("verifiers",),
    "vllm": ("vllm",),
    "lora": ("peft",),
    "data": ("datasets",),
}
"""The modules of those optional dependency groups that recipes need."""

ENVIRONMENTS = {
    "bugfix": "bugfix",
    "pivot": "pivot",
    "python-math": "python_math",
    "reasoning-gym": "reasoning_gym_environment",
    "reverse-words": "reverse_words",
    "swe-folder": "swe_folder",
}
"""The modules of the environments in ``recipes/environments``."""


def require(module: str, *, extra: str) -> ModuleType:
    """Import ``module``, which the optional dependency group ``extra`` provides.

    Raises:
        ImportError: ``module`` is not installed; the message holds the command that installs it.
    """
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module missing deeper down is that package's own failure and must stay visible.
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


def require_all(extras: Iterable[str], *, environments: Iterable[str] = ()) -> None:
    """Look for optional dependencies, and import none.

    Args:
        extras: optional dependency groups, of ``MODULES``.
        environments: ids of verifiers environments; of other authors' nothing is known here.

    Raises:
        ImportError: some are not installed; the message names all, and the one command that
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
    """The command that installs optional dependency groups and environments."""
    words = [f"'.[{','.join(extras)}]'"] if extras else []
    words += [f"./recipes/environments/{name}" for name in environments]
    return f"in a clone of primerl, run: pip install {' '.join(words)}"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a module without a spec, which somebody put in its place
        return False
