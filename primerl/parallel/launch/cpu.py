"""What a CPU computes fastest in, and how trainer and engine share its cores and its memory."""

import atexit
import ctypes
import gc
import os
from typing import Literal

import torch

from primerl._common.progress import report

VARIABLE = "OMP_NUM_THREADS"
# Of glibc's malloc.h. Blocks of up to 1 GiB come from memory that the process keeps; up to 2 GiB of
# what is free at its end are kept too (the parameter is an int).
MALLOC = {"M_MMAP_THRESHOLD": (-3, 2**30), "M_TRIM_THRESHOLD": (-1, 2**31 - 1)}

# Of x86 and of ARM, as torch.cpu.get_capabilities() calls them.
INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")


def native_dtype() -> Literal["bfloat16", "float32"]:
    """The name of what this machine computes fastest in.

    ``"bfloat16"`` with CUDA and on CPUs that have instructions for it. Others imitate it, and are
    faster in ``"float32"``.
    """
    if torch.cuda.is_available():
        return "bfloat16"
    capabilities = torch.cpu.get_capabilities()
    native = any(capabilities.get(name) for name in INSTRUCTIONS)
    return "bfloat16" if native else "float32"


def configure_cpu() -> None:
    """Divide the cores among trainer and engine, and keep memory that was freed.

    Call it first, on a CPU: with CUDA, it does nothing. The result is reported as progress,
    which ``track.LiveView`` prints.

    - Threads: this process keeps a thread for each core; those that it starts from now on, such as
      vLLM's server, get half as many, by the environment variable ``OMP_NUM_THREADS``. The threads
      of an operation wait for each other at its end, so those of two pools that want the same core
      keep both from working: on two cores, with two threads each, the recipe trained 74 tokens a
      second, with one each 104, and with two and one 122. If the variable is set already, it
      decides for all; torchrun sets it.
    - Memory: glibc returns large blocks to the system as soon as they are freed, and the system
      clears them at each use, which is a tenth of a small model's step. They are kept instead.
    """
    if torch.cuda.is_available():
        return
    threads = torch.get_num_threads()
    if VARIABLE in os.environ:
        said = f"{threads} threads for trainer and engine each, as {VARIABLE} says"
    else:
        of_others = max(1, threads // 2)
        os.environ[VARIABLE] = str(of_others)
        said = f"{threads} threads, and {of_others} for a server beside it"
    report("cpu", f"{said}{'; freed memory is kept' if _keep_freed_memory() else ''}")


def freeze_gc() -> None:
    """Exempt all live objects from garbage collection, until the process ends (``gc.freeze``).

    Call it once, before the loop. A full collection stops all threads, those of a sampler in this
    process, too: 0.3 s, in most steps of the demo, for what torch and transformers import alone.
    Memory of objects that nothing refers to is freed as ever; only cycles among the exempt ones
    stay.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)  # extension modules report what is left at the end as leaks


def _keep_freed_memory() -> bool:
    """Tell glibc's allocator; False where the C library is another one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*setting) == 1 for setting in MALLOC.values())
