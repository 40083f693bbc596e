"""How a script ends on Ctrl-C and SIGTERM."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from primerl._common.interrupts import StoppedError
from primerl.track.live import close_views

EXIT_CODE = 130  # what shells report of SIGINT
TERMINATED = 143  # and of SIGTERM
AGAIN = "to start again, run the same command"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """A context, or a decorator of a script's main function: Ctrl-C and SIGTERM end it by one line.

        with track.interruptible():
            import torch

        @track.interruptible()
        def main(args: Args) -> None: ...

    A live view is closed, and its terminal restored, however the script ends. In place of a
    traceback, the line has the notes of the ``KeyboardInterrupt``, such as how to resume the run.
    Of torchrun's ranks, the first prints it.

    Raises:
        SystemExit: in place of ``KeyboardInterrupt``, with the exit code 130; after SIGTERM, 143.
    """
    with _sigterm_raises():
        try:
            try:
                yield
            finally:
                close_views()
        except KeyboardInterrupt as interrupt:
            told = isinstance(interrupt, StoppedError)
            by = interrupt.which.name if isinstance(interrupt, StoppedError) else "Ctrl-C"
            notes = getattr(interrupt, "__notes__", [AGAIN])
            if os.environ.get("RANK", "0") == "0":
                sys.stderr.write("; ".join([f"stopped by {by}", *notes]) + "\n")
            raise SystemExit(TERMINATED if told else EXIT_CODE) from None


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM raises, once, so that contexts are closed; where nothing else handles it."""

    def receive(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nothing interrupts the exit
        raise StoppedError(signal.Signals(signum))

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, receive)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
