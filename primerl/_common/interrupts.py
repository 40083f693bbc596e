"""Handling of signals that end a process, and interrupting its main thread from a thread."""

import signal
import threading
from types import FrameType

_from_inside = threading.Event()


class StoppedError(KeyboardInterrupt):
    """Raised when SIGTERM or SIGUSR1 is received.

    torchrun sends SIGTERM to all ranks when one has failed. This class derives from
    ``KeyboardInterrupt``, so that no ``except Exception`` of a library catches it.
    """

    def __init__(self, which: signal.Signals) -> None:
        super().__init__(f"this process was told to stop ({which.name})")
        self.which = which


def interrupt_main_thread() -> None:
    """Raise ``KeyboardInterrupt`` in the main thread by sending it SIGINT.

    It is raised at once, also where Ctrl-C waits for the end of a step. The signal interrupts
    blocking system calls, which an exception set from another thread would not. A process that
    ignores SIGINT has to call ``accept_interrupts`` first.
    """
    _from_inside.set()
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def is_from_inside() -> bool:
    """Return True, once, if the SIGINT was sent by ``interrupt_main_thread``."""
    came = _from_inside.is_set()
    _from_inside.clear()
    return came


def ignores_ctrl_c() -> bool:
    """Check whether Ctrl-C is ignored, as in background jobs of a shell script."""
    return signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, _ignore_ctrl_c)


def accept_interrupts() -> None:
    """Make ``interrupt_main_thread`` work where SIGINT is ignored; Ctrl-C stays ignored."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, _ignore_ctrl_c)


def _ignore_ctrl_c(_number: int, _frame: FrameType | None) -> None:
    if is_from_inside():
        raise KeyboardInterrupt
