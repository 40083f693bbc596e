"""How a script ends on Ctrl-C."""

import contextlib
import sys
from collections.abc import Iterator

EXIT_CODE = 130  # what shells report of SIGINT


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """A context, or a decorator of a script's main function: Ctrl-C ends it with one line.

        @track.interruptible()
        def main(args: Args) -> None: ...

    The line has the notes of the ``KeyboardInterrupt``, such as how to resume the run, in place of
    a traceback.

    Raises:
        SystemExit: with the exit code 130, in place of ``KeyboardInterrupt``.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        notes = getattr(interrupt, "__notes__", [])
        sys.stderr.write("; ".join(["stopped by Ctrl-C", *notes]) + "\n")
        raise SystemExit(EXIT_CODE) from None
