"""``LeftOut``: the conversations that a run leaves out, and why."""

import sys
from pathlib import Path

from primerl._common.files import whole_or_nothing

PRINTED = 20


class LeftOut:
    """The conversations that a run leaves out, each with the error that names its file and line.

        left_out = data.LeftOut.read(path)  # those of the run that is resumed, if there are any
        left_out.add(str(error))
        left_out.write(path)

    The first 20 are printed. A conversation counts once, however often it is drawn.
    """

    def __init__(self) -> None:
        self._errors: dict[str, None] = {}
        self._written = 0

    def __len__(self) -> int:
        return len(self._errors)

    @classmethod
    def read(cls, path: Path | None) -> "LeftOut":
        """Return those of an earlier run's file; none if there is no such file."""
        found = cls()
        if path is not None and path.exists():
            found._errors = dict.fromkeys(path.read_text(encoding="utf-8").splitlines())
            found._written = len(found)
        return found

    def add(self, error: str) -> None:
        """Add a conversation by its error."""
        error = " ".join(error.splitlines())
        if error not in self._errors and len(self) < PRINTED:
            sys.stdout.write(f"left out: {error}\n")
        self._errors[error] = None

    def write(self, path: Path) -> None:
        """Write one error per line, if there are new ones.

        A disk that is full does not end the run: it is told, and the next call tries again.
        """
        if len(self) == self._written:
            return
        text = "".join(f"{error}\n" for error in self._errors)
        try:
            with whole_or_nothing(path) as file:
                file.write(text.encode())
        except OSError as error:
            sys.stderr.write(f"{path} was not written: {error}\n")
            return
        self._written = len(self)
