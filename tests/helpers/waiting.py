"""Waiting for conditions that another thread or process makes true."""

import time


def until(condition, *, within_s=60.0):
    """Wait until ``condition()`` is true; fail after ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition was not true within {within_s} s"
        time.sleep(0.01)
