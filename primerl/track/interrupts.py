"""A context manager that ends a script on Ctrl-C or SIGTERM without a traceback."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from primerl._common.interrupts import StoppedError
from primerl.track.live import close_views

EXIT_CODE = 130  # the exit code that shells report after SIGINT
TERMINATED = 143  # the exit code that shells report after SIGTERM
AGAIN = "to start again, run the same command"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """End a script on Ctrl-C or SIGTERM with one line instead of a traceback.

    Use it as a context manager, or as a decorator of the main function:

        with track.interruptible():
            import torch

        @track.interruptible()
        def main(args: Args) -> None: ...

    A live view is closed, and its terminal restored, however the script ends. The line contains the
    notes of the ``KeyboardInterrupt``, such as how to resume the run. Under torchrun, only rank 0
    prints it.

    Raises:
        SystemExit: in place of ``KeyboardInterrupt``, with exit code 130; after SIGTERM, 143.
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
    """Make SIGTERM raise, once, so that contexts are closed, unless it is handled elsewhere."""

    def receive(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the exit
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
