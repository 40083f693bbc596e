"""Check that a function's CPU time grows linearly with the size of its input."""

import gc
import time

SMALLEST = 1 << 8
LARGEST = 1 << 17
MOST_GROWTH = 3.2  # per doubling of the size: quadratic time grows by 4
NOTICEABLE_S = 0.01
RUNS = 3
ATTEMPTS = 5


def assert_linear(function, text_of, *, largest=LARGEST):
    """Call ``function`` with ``text_of(size)`` for sizes that double, up to ``largest``.

    Short times are ignored, and the size grows step by step so that the check ends soon where the
    time is not linear.
    """
    size = SMALLEST
    smaller = _least_seconds(function, text_of(size))
    while size < largest:
        size *= 2
        seconds = _least_seconds(function, text_of(size))
        for _ in range(ATTEMPTS):
            if seconds <= max(NOTICEABLE_S, MOST_GROWTH * smaller):
                break
            smaller = _least_seconds(function, text_of(size // 2))
            seconds = _least_seconds(function, text_of(size))
        else:
            raise AssertionError(
                f"size {size // 2} takes {smaller:.3f} s and size {size} takes {seconds:.3f} s: "
                f"{text_of(40)!r:.200}"
            )
        smaller = seconds


def repeated(before, part, after):
    """Return a function of a size that repeats ``part`` up to that size, between two texts."""
    return lambda size: before + part * max(1, size // len(part)) + after


def _least_seconds(function, text):
    found = []
    gc.disable()
    try:
        for _ in range(RUNS):
            start = time.process_time()
            function(text)
            found.append(time.process_time() - start)
    finally:
        gc.enable()
    return min(found)
