"""Threads of torch that leave their cores to a child process, such as a server on a CPU."""

import sys
import threading


class BriefSpinning:
    """Makes torch's threads leave their cores while they wait for each other, until ``close``.

    They wait at the end of each operation. With GNU's OpenMP, a waiting thread spins for some
    milliseconds before it sleeps. So if another process takes the core of one thread, the other
    threads waste theirs. Threads sleep almost at once if a process has more OpenMP threads than
    cores (manual of libgomp, *GOMP_SPINCOUNT*). So this starts a thread that has its own pool and
    then sleeps. This has no effect with other implementations of OpenMP, or if torch
    is not imported yet.

    If no other process needs the cores, operations take longer: a step of SmolLM2-135M a sixth.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._hold_pool, name="brief-spinning", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let threads spin as before."""
        self._over.set()
        self._thread.join()

    def _hold_pool(self) -> None:
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.ones(2**20).add_(1)  # large enough for several threads
        self._over.wait()
