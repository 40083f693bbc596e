"""An environment that imports a package that is not installed."""

import a_package_that_nobody_has  # noqa: F401

__all__: list[str] = []
