"""An event loop that runs in its own thread."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from primerl.rollout.processes.running_clock import RunningLoop

STOP_S = 5.0


class BackgroundLoop:
    """An event loop in a thread, which runs coroutines for any thread or other event loop."""

    def __init__(self, name: str) -> None:
        self._loop = RunningLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the loop's thread is running."""
        return self._thread.is_alive()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Schedule a coroutine; cancelling the returned future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call_soon(self, function: Any, *args: Any) -> None:
        """Schedule a call of a function on the loop."""
        self._loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """Cancel running coroutines and end the thread."""
        if self.alive:
            self.submit(_cancel_others()).result(STOP_S)
        self.end(STOP_S)

    def end(self, timeout_s: float) -> None:
        """End the thread, whatever is running; abandon it if it is blocked for ``timeout_s``."""
        if self.alive:
            self.call_soon(self._loop.stop)
            self._thread.join(timeout_s)
        if not self.alive and not self._loop.is_closed():
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
