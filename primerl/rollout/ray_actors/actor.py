"""The Ray actor of an environment, whose code travels with it: see ``HostActor``."""

import asyncio
import contextlib
import socket
from typing import Any

from primerl._common.ray.host_actor import HostActor

MESSAGE_BYTES = 1 << 20
POLL_S = 0.25
_TOKEN = "RAY_AUTH_TOKEN"  # not for environments: who has it can run code on every host


class ProcessActor(HostActor):
    """The Ray actor: it starts a supervised process on its host, and relays its bytes."""

    what = "environment"

    async def start(self, threads: int) -> None:
        """Start the process."""
        self._starting = asyncio.create_task(self._start(threads))
        await self._starting

    async def _start(self, threads: int) -> None:
        import attrs

        from primerl._common.processes.launch import LaunchContext
        from primerl.rollout.processes.supervised import SupervisedProcess

        context = LaunchContext.current()
        environment = {key: value for key, value in context.environment.items() if key != _TOKEN}
        self._process: Any = SupervisedProcess(
            threads=threads, context=attrs.evolve(context, environment=environment)
        )
        self._socket = await self._process.open()
        self._socket.setblocking(False)
        self._watching = asyncio.create_task(self._watch())

    async def send(self, content: bytes) -> None:
        """Pass bytes to the process; no bytes mean that there are no more."""
        with contextlib.suppress(OSError):  # receive() reports that the process has ended
            if content:
                await asyncio.get_running_loop().sock_sendall(self._socket, content)
            else:
                self._socket.shutdown(socket.SHUT_WR)

    async def receive(self) -> bytes:
        """Wait for bytes of the process; return none when it has ended."""
        try:
            return await asyncio.get_running_loop().sock_recv(self._socket, MESSAGE_BYTES)
        except OSError:
            return b""

    async def cause(self) -> str:
        """Return how the process ended."""
        return str(await self._process.cause())

    async def close(self, grace_s: float) -> None:
        """End the process and everything that it started, by force after ``grace_s``."""
        await asyncio.wait([self._starting])  # else the process would outlive this actor
        await self._process.close(grace_s)

    async def _watch(self) -> None:
        """End ``receive`` when the process has ended, even if a fork holds its socket open."""
        await self._process.wait()
        await asyncio.sleep(POLL_S)  # bytes may still be in the socket
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
