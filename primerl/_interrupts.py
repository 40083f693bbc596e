"""Interrupting the main thread from another one, told apart from Ctrl-C."""

import signal
import threading

_from_inside = threading.Event()


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
