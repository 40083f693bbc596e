"""Import an optional dependency, or say how to install it."""

import importlib
from types import ModuleType


def require(module: str, *, extra: str) -> ModuleType:
    """Import ``module``, which the optional dependency group ``extra`` provides.

    Raises:
        ImportError: ``module`` is not installed; the message holds the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module missing deeper down is that package's own failure and must stay visible.
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        raise ImportError(
            f"{module} is not installed; {install_command(extra)}", name=module
        ) from None


def install_command(extra: str) -> str:
    """What installs the optional dependency group ``extra``."""
    return f"in a clone of primerl, run: pip install '.[{extra}]'"
