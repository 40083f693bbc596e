"""An environment of an earlier verifiers, which had a module ``verifiers.utils``."""

import verifiers.utils  # noqa: F401

__all__: list[str] = []
