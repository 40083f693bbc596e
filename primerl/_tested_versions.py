"""The releases of packages that primerl hooks into and is tested with."""

import functools
import importlib.metadata
import logging
import re

TESTED = {
    "torch": ((2, 11), (2, 14)),
    "transformers": ((5, 17), (5, 24)),
    "verifiers": ((0, 4), (0, 4)),
}
"""The first and the last minor release; ``pyproject.toml`` declares the same."""

log = logging.getLogger(__name__)


@functools.cache
def warn_if_untested(package: str) -> None:
    """Log a warning, once, if a package's installed release is not one that primerl is tested with.

    Pip installs no such release, unless it is asked for by name or comes with another package.
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
    log.warning(
        "%s %s is installed, but primerl is tested with %s only, and what it hooks into may have "
        "changed; if something fails, run: pip install '%s%s'",
        package,
        installed,
        bounds,
        package,
        bounds,
    )
