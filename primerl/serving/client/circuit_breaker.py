"""``CircuitBreaker``, which keeps requests away from a server that fails them."""

import attrs

from primerl.rollout.processes.running_clock import running_time

OPENS_AFTER = 3  # failures in a row
FIRST_OPEN_S = 5.0
MOST_OPEN_S = 15.0


@attrs.define(eq=False)
class CircuitBreaker:
    """The circuit breaker of one server.

    It opens after ``OPENS_AFTER`` failed or wrong answers in a row, for ``FIRST_OPEN_S``. Then the
    server gets one request, and a further one every ``FIRST_OPEN_S``, until it answers one and the
    breaker closes. If one fails, the breaker opens for twice as long as before, at most for
    ``MOST_OPEN_S``.
    """

    failures: int = 0
    """The number of failures so far."""
    reason: str = ""
    """The last failure, while the breaker is not closed; empty while it is."""
    _in_a_row: int = 0
    _opened: int = 0
    _until: float = 0.0

    def add_failure(self, reason: str) -> float | None:
        """Record a failure; return for how many seconds this opens the breaker, None if not."""
        self.failures += 1
        self._in_a_row += 1
        if self._in_a_row < OPENS_AFTER:
            return None
        return self.open(reason)

    def open(self, reason: str) -> float | None:
        """Open the breaker; return for how many seconds, None if it is open."""
        now = running_time()
        if now < self._until:
            return None
        open_s: float = min(FIRST_OPEN_S * 2**self._opened, MOST_OPEN_S)
        self.reason = reason
        self._in_a_row = max(self._in_a_row, OPENS_AFTER)  # the next failure opens it again
        self._opened = min(self._opened + 1, 10)
        self._until = now + open_s
        return open_s

    def close(self) -> None:
        """Close the breaker: the server answered a request, or was restarted."""
        self.reason, self._in_a_row, self._opened, self._until = "", 0, 0, 0.0

    def allows(self, in_flight: int) -> bool:
        """Return whether a server with this number of requests in flight should get another."""
        return not self.reason or in_flight * FIRST_OPEN_S <= running_time() - self._until
