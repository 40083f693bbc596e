"""Processes on other hosts: Ray actors that start them, supervise them and relay their bytes.

    this process:  Channel ── socket pair ── RayProcess
                                                 │  Ray's calls: send(bytes), receive() -> bytes
    another host:                            ProcessActor ── socket pair ── supervised process

So everything that a channel does (calls in both directions, cancellation, errors by name) is the
same on another host. The process ends with its actor, and Ray ends the actor with its job.
"""

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from typing import Any

from primerl._common.optional import require
from primerl._common.ray import actors
from primerl._common.ray.actors import ActorLost
from primerl.rollout.processes.child import ProcessDied
from primerl.rollout.processes.supervised import STOP_S
from primerl.rollout.ray_actors.actor import MESSAGE_BYTES, ProcessActor

ANSWER_S = 10.0


class RayProcess:
    """A process in a Ray actor, anywhere in the cluster; a ``ChildProcess``.

    Args:
        resources: what the actor takes of its node.
        threads: threads of numerical libraries in the process.
        start_timeout_s: how long a node with room for the actor is waited for.
    """

    def __init__(
        self, *, resources: Mapping[str, float], threads: int, start_timeout_s: float
    ) -> None:
        self.host = self.node = ""
        self._resources = dict(resources)
        self._threads = threads
        self._start_timeout_s = start_timeout_s
        self._actor: Any = None
        self._relaying: asyncio.Task[None] | None = None
        self._lost = ""

    async def open(self) -> socket.socket:
        """Start an actor with the process; return a connected socket, which the process serves.

        Raises:
            NoRoom: no node had room for the actor in time.
            ProcessDied: the actor was lost before it started.
            RuntimeError: the actor failed, or its host has other versions.
        """
        try:
            self._actor, self.host, self.node = await actors.start(
                ProcessActor, resources=self._resources, timeout_s=self._start_timeout_s
            )
            with actors.errors():
                await self._actor.start.remote(self._threads)
        except ActorLost as error:
            raise ProcessDied(str(error)) from error
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._relaying = asyncio.create_task(self._relay(theirs))
        return ours

    async def wait(self) -> None:
        """Wait until the process has ended, or is lost."""
        assert self._relaying is not None, "open() comes first"
        await asyncio.wait([self._relaying])

    async def cause(self) -> str:
        """Return how the process ended, or was lost."""
        ray = require("ray", extra="ray")
        if not self._lost:
            try:
                async with asyncio.timeout(ANSWER_S):
                    return str(await self._actor.cause.remote())
            except (TimeoutError, ray.exceptions.RayError) as error:
                self._lost = actors.reason(error)
        return f"was lost: {self._lost}"

    async def close(self, grace_s: float) -> None:
        """End the process and everything that it started, by force after ``grace_s``."""
        if self._actor is None:
            return
        ray = require("ray", extra="ray")
        if self.host and not self._lost:
            with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
                async with asyncio.timeout(grace_s + STOP_S):
                    await self._actor.close.remote(grace_s)
        self.kill()
        if self._relaying is not None:
            self._relaying.cancel()
            await asyncio.wait([self._relaying])

    def kill(self) -> None:
        """End the actor; the supervisor of its process then ends everything there."""
        if self._actor is not None:
            actors.end(self._actor)

    def kill_and_wait(self) -> None:
        """End the actor, without waiting for its host."""
        self.kill()

    async def _relay(self, sock: socket.socket) -> None:
        """Relay bytes in both directions until the process has ended or is lost."""
        loop = asyncio.get_running_loop()
        sending = asyncio.create_task(self._send(sock))
        try:
            with sock:
                while content := await self._actor.receive.remote():
                    await loop.sock_sendall(sock, content)
        except OSError:
            pass  # this process has closed its end
        except require("ray", extra="ray").exceptions.RayError as error:
            self._lost = actors.reason(error)
        finally:
            sending.cancel()

    async def _send(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, require("ray", extra="ray").exceptions.RayError):
            while content := await asyncio.get_running_loop().sock_recv(sock, MESSAGE_BYTES):
                await self._actor.send.remote(content)
            await self._actor.send.remote(b"")
