"""CPU settings: fastest dtype, threads for trainer and engine, memory and garbage collection."""

import atexit
import ctypes
import gc
import os
from typing import Literal

import torch

from primerl._common.progress import report

VARIABLE = "OMP_NUM_THREADS"
# (parameter, value) pairs from glibc's malloc.h. Blocks of up to 1 GiB are allocated on the heap,
# which the process keeps, and up to 2 GiB of free memory at the top of the heap are kept too (the
# parameter is an int).
MALLOC = {"M_MMAP_THRESHOLD": (-3, 2**30), "M_TRIM_THRESHOLD": (-1, 2**31 - 1)}

# bfloat16 instructions of x86 and ARM, as torch.cpu.get_capabilities() names them.
INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")


def native_dtype() -> Literal["bfloat16", "float32"]:
    """Return the name of the dtype in which this machine computes fastest.

    This is ``"bfloat16"`` with CUDA and on CPUs that have bfloat16 instructions. Other CPUs emulate
    bfloat16, and are faster in ``"float32"``.
    """
    if torch.cuda.is_available():
        return "bfloat16"
    capabilities = torch.cpu.get_capabilities()
    native = any(capabilities.get(name) for name in INSTRUCTIONS)
    return "bfloat16" if native else "float32"


def configure_cpu(device: torch.device | None = None) -> None:
    """Configure threads and memory allocation for training on a CPU.

    Call it before anything else. With CUDA, it does nothing, unless ``device`` (``World.device``)
    is a CPU. It reports the settings as progress,
    which ``track.LiveView`` prints.

    - Threads: this process keeps one thread per core. Processes that it starts afterwards, such as
      a vLLM server, get half as many, through the environment variable ``OMP_NUM_THREADS``. The
      threads of an operation wait for each other at its end, so two thread pools that compete for
      the same core stall each other. On two cores, the recipe trained 74 tokens per second with two
      threads each, 104 with one each, and 122 with two for the trainer and one for the server. If
      the variable is already set, as by torchrun, it applies to all processes.
    - Memory: glibc returns large blocks to the system as soon as they are freed, and the system
      zeroes them whenever they are allocated again, which takes a tenth of a small model's step.
      With these settings, the process keeps them.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        return
    threads = torch.get_num_threads()
    if VARIABLE in os.environ:
        said = f"{threads} threads each for trainer and engine, as {VARIABLE} says"
    else:
        of_others = max(1, threads // 2)
        os.environ[VARIABLE] = str(of_others)
        said = f"{threads} threads for the trainer, {of_others} for a server"
    report("cpu", f"{said}{'; freed memory is kept' if _keep_freed_memory() else ''}")


def freeze_gc() -> None:
    """Exempt all live objects from garbage collection, until the process ends (``gc.freeze``).

    Call it once, before the training loop. A full collection stops all threads, including those of
    a sampler in this process. In the demo, most steps lost 0.3 s to collections, just for the
    objects that importing torch and transformers creates. Frozen objects are still freed when
    nothing refers to them; only reference cycles among them stay in memory.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extension modules report frozen objects as leaks at exit


def _keep_freed_memory() -> bool:
    """Make glibc keep freed memory; return False if the C library does not support that."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*setting) == 1 for setting in MALLOC.values())
