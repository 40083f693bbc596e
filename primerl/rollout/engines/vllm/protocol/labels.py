"""Names of weight versions on servers."""

LARGEST_VERSION = 2**31 - 1


class Labels:
    """Names of weight versions on servers: run and policy version, such as ``"3f2a91c0-12"``.

    ``number`` is None for any other label: a server's own checkpoint, weights of another run, or
    weights that failed to load.
    """

    def __init__(self, run: str) -> None:
        if not run or not run.isalnum():
            raise ValueError(f"run is {run!r}, expected letters and digits")
        self.run = run

    def name(self, version: int) -> str:
        """The label of a version of this run."""
        return f"{self.run}-{version}"

    def number(self, label: str | None) -> int | None:
        """The version of a label of this run, or None."""
        run, _, version = (label or "").rpartition("-")
        if run != self.run or not 0 < len(version) <= len(str(LARGEST_VERSION)):
            return None
        number = int(version) if version.isascii() and version.isdecimal() else LARGEST_VERSION + 1
        return number if number <= LARGEST_VERSION and str(number) == version else None
