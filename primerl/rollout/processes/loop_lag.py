"""Event-loop lag, which shows that an environment, a reward or a filter does blocking work."""

import asyncio
import time
from collections import deque

import numpy as np

PERIOD_S = 0.05
WINDOW = 2400  # two minutes of samples


class LoopLag:
    """Measures by how many seconds timers fire late on the event loop on which ``run`` runs."""

    def __init__(self) -> None:
        self.max_s = 0.0
        self.last_heartbeat = time.monotonic()
        self._recent: deque[float] = deque(maxlen=WINDOW)

    @property
    def p99_s(self) -> float:
        """The 99th percentile over the last two minutes, in seconds."""
        return float(np.quantile(self._recent, 0.99)) if self._recent else 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = time.monotonic() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.last_heartbeat = time.monotonic()
            lag = max(0.0, self.last_heartbeat - due)
            self._recent.append(lag)
            self.max_s = max(self.max_s, lag)
