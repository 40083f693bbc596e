"""Signals that end a process, and interrupting its main thread from another one."""

import signal
import threading
from types import FrameType

_from_inside = threading.Event()


class StoppedError(KeyboardInterrupt):
    """SIGTERM or SIGUSR1 was received; torchrun sends SIGTERM to all ranks when one has failed.

    It is as Ctrl-C is, so that no ``except Exception`` of a library takes it for a failure.
    """

    def __init__(self, which: signal.Signals) -> None:
        super().__init__(f"this process was told to stop ({which.name})")
        self.which = which


def interrupt_main_thread() -> None:
    """Raise ``KeyboardInterrupt`` in the main thread, where Ctrl-C would wait for a step's end too.

    It wakes the thread from what it waits for, as an exception cannot. A process that ignores
    SIGINT has to call ``accept_interrupts`` first.
    """
    _from_inside.set()
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def is_from_inside() -> bool:
    """Whether a SIGINT that came is that of ``interrupt_main_thread``; asked once for each."""
    came = _from_inside.is_set()
    _from_inside.clear()
    return came


def ignores_ctrl_c() -> bool:
    """Whether Ctrl-C is ignored, as in jobs that a shell script starts in the background."""
    return signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, _ignore_ctrl_c)


def accept_interrupts() -> None:
    """Let ``interrupt_main_thread`` work where SIGINT is ignored; Ctrl-C stays ignored."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, _ignore_ctrl_c)


def _ignore_ctrl_c(_number: int, _frame: FrameType | None) -> None:
    if is_from_inside():
        raise KeyboardInterrupt
