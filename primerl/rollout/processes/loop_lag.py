"""Event-loop lag, which shows that an environment, a reward or a filter does blocking work."""

import asyncio
import logging
import sys
import sysconfig
import threading
import traceback
from collections import deque

import numpy as np

from primerl.rollout.processes.running_clock import running_time

PERIOD_S = 0.05
WINDOW = 2400  # two minutes of samples
HELD_S = 1.0  # how long one callback may hold the loop before it is named
_PACKAGES = sysconfig.get_path("purelib")  # within the standard library's folder
_OTHERS = (sysconfig.get_path("stdlib"), "<frozen")

log = logging.getLogger(__name__)


class LoopLag:
    """Measures by how many seconds timers fire late on the event loop on which ``run`` runs.

    Time in which the whole process was suspended does not count. A thread names the code that holds
    the loop for long, in the log and as ``held_by``.
    """

    def __init__(self) -> None:
        self.max_s = 0.0
        self.last_heartbeat = running_time()
        self.held_by = ""
        """The code that held the loop last, such as ``environment.py:12 in play``."""
        self._recent: deque[float] = deque(maxlen=WINDOW)

    @property
    def p99_s(self) -> float:
        """The 99th percentile over the last two minutes, in seconds."""
        return float(np.quantile(self._recent, 0.99)) if self._recent else 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        ended = threading.Event()
        watcher = threading.Thread(
            target=self._watch,
            args=(threading.get_ident(), ended),
            name="primerl-lag",
            daemon=True,
        )
        watcher.start()
        try:
            while True:
                due = running_time() + PERIOD_S
                await asyncio.sleep(PERIOD_S)
                self.last_heartbeat = running_time()
                lag = max(0.0, self.last_heartbeat - due)
                self._recent.append(lag)
                self.max_s = max(self.max_s, lag)
        finally:
            ended.set()
            watcher.join(HELD_S)

    def _watch(self, loop_thread: int, ended: threading.Event) -> None:
        """Name what holds the loop, once each time."""
        named = 0.0
        while not ended.wait(HELD_S / 2):
            beat = self.last_heartbeat
            held_s = running_time() - beat
            if held_s > HELD_S and beat != named:
                named, self.held_by = beat, _code_running(loop_thread)
                log.warning(
                    "the event loop has been held for %.1f s by %s; meanwhile nothing else runs: "
                    "use await, a thread, or rollout.isolated",
                    held_s,
                    self.held_by,
                )


def _code_running(thread: int) -> str:
    """Return the innermost code of a thread that is not the standard library's."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame)[::-1] if frame is not None else []
    for one in stack:
        if one.filename.startswith(_PACKAGES) or not one.filename.startswith(_OTHERS):
            return f"{one.filename}:{one.lineno} in {one.name}"
    return "unknown code"
