"""Signals that end a process, and interrupting its main thread from another one."""

import signal
import threading

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

    It wakes the thread from what it waits for, as an exception cannot.
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
