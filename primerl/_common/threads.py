"""Threads that work beside the caller."""

import atexit
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

_MOST_THREADS = 8
_TASKS_PER_THREAD = 2
_LAST_WAIT_S = 10.0  # after an error, other ranks may have died

log = logging.getLogger(__name__)

_unfinished: "dict[Future[Any], str]" = {}
"""Work of threads that should not be cut, and its name."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


def thread_count(*, processes: int = 1) -> int:
    """Return how many threads each of a host's ``processes`` may start beside its own work.

    They are at most 8, and no more than the process's share of the cores.
    """
    affine = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if affine else os.cpu_count() or 1
    return max(1, min(_MOST_THREADS, cores // processes))


class BoundedThreads:
    """A context that runs tasks in a few threads, for work that releases the GIL.

        with BoundedThreads(4) as threads:
            digests = {name: threads.submit(digest_of, t) for name, t in tensors.items()}
        return {name: digest.result() for name, digest in digests.items()}

    At the end of the context all tasks have ended, and no thread is left. After an exception, tasks
    that have not begun are cancelled.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="primerl-beside")
        self._room = threading.Semaphore(threads * _TASKS_PER_THREAD)

    def __enter__(self) -> "BoundedThreads":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)

    def submit(
        self, work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> "Future[_T]":
        """Start a task; wait first while more than a few are in flight."""
        self._room.acquire()
        task = self._pool.submit(work, *args, **kwargs)
        task.add_done_callback(self._leave)
        return task

    def _leave(self, _: "Future[Any]") -> None:
        self._room.release()


def in_thread(call: Callable[[], _T], *, finishing: str | None = None) -> "Future[_T]":
    """Run a call in a dedicated daemon thread, because it may never return; return its future.

    ``finishing`` names work that should not be cut when the process ends; see ``wait_for_work``.
    """
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # raised by result(), in the caller's thread
            outcome.set_exception(error)

    if finishing is not None:
        _unfinished[outcome] = finishing
        outcome.add_done_callback(lambda done: _unfinished.pop(done, None))
    threading.Thread(target=run, daemon=True, name="primerl-weights").start()
    return outcome


def wait_for_work(timeout_s: float = _LAST_WAIT_S) -> None:
    """Wait for the work that ``in_thread`` was to finish, before the process or its group ends."""
    pending = dict(_unfinished)
    for what in pending.values():
        log.warning("%s is under way at the end of the program, which did not wait for it", what)
    if not_done := wait(pending, timeout_s).not_done:
        names = ", ".join(pending[one] for one in not_done)
        log.error("%s did not end within %.0f s, and is lost", names, timeout_s)


atexit.register(wait_for_work)
