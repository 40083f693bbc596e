"""Waiting for what another thread or process does."""

import time


def until(condition, *, within_s=60.0):
    """Return when ``condition()`` is true; fail after ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not come about within {within_s} s"
        time.sleep(0.01)
