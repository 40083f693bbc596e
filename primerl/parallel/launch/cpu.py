"""A CPU that trainer and engine share: its cores, and its memory."""

import ctypes
import os

import torch

from primerl._progress import report

VARIABLE = "OMP_NUM_THREADS"
# Of glibc's malloc.h. Blocks of up to 1 GiB come from memory that the process keeps; up to 2 GiB of
# what is free at its end are kept too (the parameter is an int).
MALLOC = {"M_MMAP_THRESHOLD": (-3, 2**30), "M_TRIM_THRESHOLD": (-1, 2**31 - 1)}


def settle_cpu(*, sharing: int = 2) -> None:
    """Divide the cores among what computes at the same time, and keep memory that was freed.

    Call it first, on a CPU: with CUDA, it does nothing. What it settles is reported as progress,
    which ``track.LiveView`` prints.

    - Threads: ``max(1, cores // sharing)`` for this process, and through the environment variable
      ``OMP_NUM_THREADS`` for the processes that it starts from now on, such as vLLM's server. Two
      pools of threads that want the same core wait for each other at the end of every operation: on
      two cores, a trainer's step took 47 s with two threads beside a server with two, and 4 s with
      one thread each. If the variable is set already, it decides; torchrun sets it.
    - Memory: glibc returns large blocks to the system as soon as they are freed, and the system
      clears them at each use, which is a tenth of a small model's step. They are kept instead.

    Args:
        sharing: how many processes compute at the same time: 2 for a trainer beside an engine, 1
            where they take turns.

    Raises:
        ValueError: ``sharing`` is below 1.
    """
    if sharing < 1:
        raise ValueError(f"sharing is {sharing}, expected how many processes compute, at least 1")
    if torch.cuda.is_available():
        return
    divided = VARIABLE not in os.environ
    if divided:
        torch.set_num_threads(max(1, torch.get_num_threads() // sharing))
        os.environ[VARIABLE] = str(torch.get_num_threads())
    threads = torch.get_num_threads()
    said = f"{threads} thread{'s' if threads > 1 else ''} for trainer and engine each"
    origin = f"of {os.cpu_count()} cores" if divided else f"as {VARIABLE} says"
    kept = "; freed memory is kept" if _keep_freed_memory() else ""
    report("cpu", f"{said}, {origin}{kept}")


def _keep_freed_memory() -> bool:
    """Tell glibc's allocator; False where the C library is another one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*setting) == 1 for setting in MALLOC.values())
