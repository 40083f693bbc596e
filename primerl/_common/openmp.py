"""OpenMP's threads of a thread that is about to wait.

Each thread that computes starts its own OpenMP threads. If all of them together are more than the
machine has cores, GNU's OpenMP puts them to sleep after each parallel region, and waking them up
takes longer than most operations of a small model: on two cores, a step of decoding takes three to
four times as long. So a thread that waits for another one to compute gives up its threads.
"""

import ctypes
import functools
import sys
from collections.abc import Callable

SOFT = 1  # omp_pause_soft: the settings stay (OpenMP 5.0, section 3.2.43)


def release_threads() -> None:
    """End the OpenMP threads of the calling thread; its next operation starts them again.

    Nothing happens if torch is not loaded, or if its OpenMP has no such function.
    """
    if "torch" in sys.modules and (pause := _find_pause()) is not None:
        pause(SOFT)


@functools.cache
def _find_pause() -> Callable[[int], int] | None:
    try:
        function: Callable[[int], int] | None = ctypes.CDLL(None).omp_pause_resource_all
    except (OSError, AttributeError, TypeError):
        return None
    return function
