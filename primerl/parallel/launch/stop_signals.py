"""Handlers of Ctrl-C, SIGTERM and SIGUSR1, which stop a run after the current step or at once."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from primerl._common.interrupts import StoppedError, ignores_ctrl_c, is_from_inside

ENDING = (signal.SIGINT, signal.SIGTERM)  # a second such signal ends the process
STOPPING = b"\nCtrl-C: the run stops after this step; a second one ends it at once\n"


class StopSignals:
    """Signal handlers of one process, active between ``install`` and ``restore``.

    SIGTERM and SIGUSR1 raise ``StoppedError``, and SIGINT (Ctrl-C) raises ``KeyboardInterrupt``, so
    that context managers exit. A loop that checks for signals after each step calls ``defer``.
    From then on, the first SIGTERM or SIGINT and every SIGUSR1 are only recorded. SIGTERM and
    SIGINT still raise if a rank has failed, or if ``grace_s`` pass without a check. This is because
    torchrun kills the process 30 s after it has forwarded a signal, and because it also sends
    SIGTERM when a rank was killed without recording an error. Once a signal has raised, further
    signals are ignored.

    Args:
        grace_s: time allowed between a signal and the next check, in seconds.
        says: whether this process prints that Ctrl-C takes effect after the current step.
    """

    def __init__(self, grace_s: float, *, says: bool = True) -> None:
        self.received = False
        """Whether this process has received a signal to stop after the current step."""
        self.agreed = False
        """Whether all ranks have agreed to stop."""
        self._grace_s = grace_s
        self._says = says
        self._deferred = False
        self._ended = False
        self._ending = False
        self._failed: Callable[[], bool] | None = None
        self._timer: threading.Timer | None = None
        self._before: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Install the handlers, except for SIGINT if the process ignores it (in the background)."""
        is_from_inside()  # clear the mark that an earlier run may have left
        for which in (*ENDING, signal.SIGUSR1):
            ignored = which == signal.SIGINT and ignores_ctrl_c()
            if self._is_main() and which not in self._before and not ignored:
                self._before[which] = signal.signal(which, self._receive)

    def watch(self, failed: Callable[[], bool]) -> None:
        """Set the function, called when a signal arrives, that checks whether a rank has failed."""
        self._failed = failed

    def defer(self) -> None:
        """Record the first signal instead of raising: the caller checks ``received``."""
        self._deferred = True

    def agree(self) -> None:
        """Record that all ranks have agreed to stop, and ignore further signals."""
        self.agreed = True
        self.ignore()

    def ignore(self) -> None:
        """Ignore further signals, so that none interrupts the exit of this process."""
        self._ending = True
        if self._timer is not None:
            self._timer.cancel()
        if self._is_main():
            for which in self._before:
                signal.signal(which, signal.SIG_IGN)

    def restore(self) -> None:
        """Restore the previous handlers, unless the process is ending."""
        if self._timer is not None:
            self._timer.cancel()
        while self._before and self._is_main():
            which, before = self._before.popitem()
            if not self._ending:
                signal.signal(which, before)

    def _receive(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        inside = signum == signal.SIGINT and is_from_inside()
        rank_failed = self._failed is not None and self._failed()
        at_once = signum in ENDING and (self._ended or rank_failed)
        if not self._deferred or at_once or inside:
            self.ignore()
            if signum == signal.SIGINT:
                raise KeyboardInterrupt("this process was told to stop (SIGINT)")
            raise StoppedError(signal.Signals(signum))
        self.received = True
        # Set before the notice is printed: a second Ctrl-C may arrive as soon as it is visible.
        self._ended = self._ended or signum in ENDING
        if signum == signal.SIGINT and self._says:
            os.write(2, STOPPING)  # sys.stderr may be in the middle of a write
        if signum in ENDING and self._failed is not None:
            self._timer = threading.Timer(self._grace_s, os.kill, (os.getpid(), signum))
            self._timer.daemon = True
            self._timer.start()

    def _is_main(self) -> bool:
        # Python only allows the main thread to set signal handlers.
        return threading.current_thread() is threading.main_thread()
