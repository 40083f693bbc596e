"""A clock that stands still while this process is suspended, and an event loop that uses it.

A process is suspended by SIGSTOP, by a frozen container, or by a computer that gives it no time.
When the process continues, all time limits on the ordinary clock have expired at once, and sound
rollouts, requests and servers fail. On this clock they have as much time left as before.
"""

import asyncio
import logging
import os
import threading
import time

BEAT_S = 0.1
GAP_S = 1.0  # a process none of whose threads ran for this long was suspended, or is computing
NAMED_S = 3.0  # longer suspensions are reported as warnings

log = logging.getLogger(__name__)


class RunningClock:
    """The monotonic clock without the time in which the process was suspended.

    A thread beats every ``BEAT_S``. If there was no beat, no thread ran. Either one of them kept
    the interpreter's lock and computed meanwhile, which is seen in the process's CPU time and
    counts, or the process was suspended.
    """

    def __init__(self) -> None:
        self.suspended_s = 0.0
        """How long the process has been suspended in all."""
        self._lock = threading.Lock()
        self._alive_at = time.monotonic()
        self._cpu_s = time.process_time()
        self._pid = 0

    def time(self) -> float:
        """Return the time in seconds; it never decreases, and is comparable in this process only.

        Thread-safe.
        """
        if self._pid != os.getpid():  # at first, and after a fork, which has no such thread
            self._start()
        while True:
            suspended_s = self.suspended_s
            now = time.monotonic()
            if now - self._alive_at > GAP_S:
                self._resume()
            elif suspended_s == self.suspended_s:  # else another thread has resumed
                self._alive_at = max(self._alive_at, now)
                return now - suspended_s

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._alive_at, self._cpu_s = time.monotonic(), time.process_time()
        self._pid = os.getpid()
        threading.Thread(target=self._beat, name="primerl-clock", daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self.time()
            self._cpu_s = time.process_time()

    def _resume(self) -> None:
        """Leave out the time since a thread last ran, if the process was suspended."""
        with self._lock:
            now, cpu_s = time.monotonic(), time.process_time()
            gap_s = now - self._alive_at - max(0.0, cpu_s - self._cpu_s)
            if now - self._alive_at <= GAP_S:
                return  # another thread has done this
            suspended = gap_s > GAP_S
            if suspended:
                self.suspended_s += gap_s
            self._alive_at, self._cpu_s = now, cpu_s
        if suspended:
            log.log(
                logging.WARNING if gap_s > NAMED_S else logging.DEBUG,
                "this process (pid %d) was suspended for %.0f s (by SIGSTOP, a frozen container, "
                "a computer without time for it, or a call that kept the interpreter's lock); time "
                "limits do not count these seconds",
                self._pid,
                gap_s,
            )


CLOCK = RunningClock()


def running_time() -> float:
    """Return the time of this process's clock, in seconds."""
    return CLOCK.time()


class RunningLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers and time limits use the clock of the running process."""

    def time(self) -> float:
        """Return the loop's time, in seconds."""
        return CLOCK.time()
