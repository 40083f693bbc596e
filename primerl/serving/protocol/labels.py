"""Labels of weight versions on servers."""

import re

LARGEST_VERSION = 2**31 - 1


class Labels:
    """Conversion of one run's policy versions to labels on servers, and back.

    A label has the run and the version, such as ``"3f2a91c0-12"``. The label of an adapter's
    version begins with the adapter's name: ``"policy-3f2a91c0-12"``. ``number`` is None for all
    other labels: those of a server's own checkpoint, weights of another run, another adapter, or
    weights that failed to load.
    """

    def __init__(self, run: str, adapter: str | None = None) -> None:
        if not run or not run.isalnum():
            raise ValueError(f"run is {run!r}, expected letters and digits")
        if adapter is not None and not re.fullmatch(r"[A-Za-z0-9._-]+", adapter):
            raise ValueError(f"adapter is {adapter!r}, expected letters, digits, '.', '_' and '-'")
        self.run = run
        self.adapter = adapter
        self._prefix = run if adapter is None else f"{adapter}-{run}"

    def name(self, version: int) -> str:
        """Return the label of a version of this run."""
        return f"{self._prefix}-{version}"

    def number(self, label: str | None) -> int | None:
        """Return the version of a label, or None if the label is not of this run."""
        prefix, _, version = (label or "").rpartition("-")
        if prefix != self._prefix or not 0 < len(version) <= len(str(LARGEST_VERSION)):
            return None
        number = int(version) if version.isascii() and version.isdecimal() else LARGEST_VERSION + 1
        return number if number <= LARGEST_VERSION and str(number) == version else None
