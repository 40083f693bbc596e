"""One sandbox as its owner sees it: a control socket, and a handle to kill it."""

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from primerl.sandbox.engine import messages
from primerl.sandbox.engine.processes import usage
from primerl.sandbox.errors import BadReply, SandboxError
from primerl.sandbox.results import LIMITS, Limits, Result
from primerl.sandbox.tiers.interface import Order
from primerl.sandbox.tiers.local.cgroups import Cgroup
from primerl.sandbox.tiers.streams import Input, Output

# Beyond its own limit of time, which its first process enforces, a sandbox is killed from outside.
_GRACE_S = 5.0


class Slot:
    """A sandbox that waits for orders; it takes one at a time."""

    def __init__(self, control: socket.socket, handle: int, limits: Limits) -> None:
        self.listener: socket.socket | None = None
        self.on_end: list[Callable[[], None]] = []
        self.cgroup: Cgroup | None = None
        self._control = control
        self._handle = handle
        self._limits = limits
        self._count = 0
        self._reply: asyncio.Future[dict[str, Any]] | None = None
        control.setblocking(False)

    @property
    def alive(self) -> bool:
        """Whether it can take orders."""
        return self._control.fileno() >= 0

    async def ready(self, timeout_s: float) -> None:
        """Wait until the sandbox is set up.

        Raises:
            SandboxError: it isn't in time, or a step failed; it is killed.
        """
        loop = asyncio.get_running_loop()
        self._reply = loop.create_future()
        loop.add_reader(self._control, self._receive)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._reply
        except TimeoutError:
            self.kill()
            raise SandboxError(f"a sandbox was not set up within {timeout_s} s") from None
        except BaseException:
            self.kill()
            raise
        if reply.get("ready") is not True:
            self.kill()
            raise SandboxError(f"a sandbox could not be set up: {reply.get('failed')}")

    async def execute(self, order: Order) -> Result:
        """Carry out an order. A sandbox that breaks the protocol, overflows or hangs is killed."""
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        self._count += 1
        if self.cgroup is not None:
            self.cgroup.limit_memory(order.memory_bytes)
        reply: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._reply = reply

        def overflow() -> None:
            if not reply.done() and not order.keeps:
                reply.set_result(_ended("output", *self._usage()))

        streams: list[Output] = []
        given = Input(order.stdin) if order.connection is None else None
        try:
            streams.append(Output(order.output_bytes, overflow))
            streams.append(Output(order.output_bytes, overflow))
            stdin = given.theirs if given is not None else order.connection or 0
            self._send(order, stdin, [stream.theirs for stream in streams])
            try:
                async with asyncio.timeout(order.timeout_s + _GRACE_S):
                    ended = await reply
            except TimeoutError:
                ended = _ended("timeout", *self._usage())
            except SandboxError as error:
                ended = _ended("protocol" if isinstance(error, BadReply) else "died")
            if ended["exit"] is None and ended.get("kill"):
                self.kill()
            stdout, stderr = (stream.finish() for stream in streams)
        except BaseException:  # cancelled: what runs must not go on
            self.kill()
            raise
        finally:
            self._reply = None
            if given is not None:
                given.close()
            for stream in streams:
                stream.close()
        limits = tuple(ended["limits"])
        if self.cgroup is not None and self.cgroup.ran_out_of_memory():
            limits, ended = ("memory",), ended | {"exit": None}
        if "output" not in limits and any(stream.overflowed for stream in streams):
            limits += ("output",)
        return Result(
            stdout=stdout,
            stderr=stderr,
            exit=ended["exit"],
            limits_hit=limits,
            wall_s=time.perf_counter() - started,
            cpu_s=ended["cpu_s"],
            max_rss_bytes=ended["rss_bytes"],
        )

    def kill(self) -> None:
        """Kill the sandbox: its first process dies, and with it, all others."""
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control)
            for work in self.on_end:
                work()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            self._control.close()
            if self.listener is not None:
                self.listener.close()
            os.close(self._handle)
            self._handle = -1
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(SandboxError("the sandbox was ended"))
            self._reply.exception()

    def _usage(self) -> tuple[float, int]:
        """Seconds of CPU and bytes of memory of all its processes, while it is alive."""
        with contextlib.suppress(OSError):
            for row in Path(f"/proc/self/fdinfo/{self._handle}").read_text("utf-8").splitlines():
                if row.startswith("Pid:") and int(row.split()[1]) > 0:  # not -1: it has ended
                    return usage(row.split()[1])
        return 0.0, 0

    def _send(self, order: Order, stdin: int, outputs: list[int]) -> None:
        """Send an order; the sandbox's ends of the streams are closed here in any case."""
        control = {
            "id": self._count,
            "kind": "turn" if order.kind == "turn" else "job",
            "timeout_s": order.timeout_s,
            "cpu_s": math.ceil(order.timeout_s) * self._limits.processes,
            "memory_bytes": order.memory_bytes,
            "address_space_bytes": self._limits.address_space_bytes or order.memory_bytes,
            "disk_bytes": self._limits.disk_bytes,
        }
        descriptors = [stdin, *outputs]
        try:
            payload = messages.payload(order.complete_header, list(order.files.values()))
            descriptors.insert(0, payload)
            socket.send_fds(self._control, [json.dumps(control).encode()], descriptors)
        except OSError:
            if self._reply is not None and not self._reply.done():
                self._reply.set_result(_ended("died"))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _receive(self) -> None:
        """Take one packet from the sandbox, and trust nothing in it."""
        failure: SandboxError | None = None
        reply: dict[str, Any] = {}
        try:
            data, descriptors = messages.receive(self._control)
            if not data:
                raise SandboxError("the sandbox ended")
            self._keep_listener(descriptors)
            reply = parse(data)
            if "id" in reply:
                reply = checked_reply(reply, self._count)
        except BlockingIOError:
            return
        except SandboxError as error:
            failure = error
        except (OSError, ValueError) as error:
            failure = BadReply(f"a message from a sandbox can't be read: {error}")
        waiting = self._reply
        if failure is not None:
            self._reply = None
            self.kill()
        elif waiting is None:  # nothing was asked
            self.kill()
        if waiting is not None and not waiting.done():
            if failure is not None:
                waiting.set_exception(failure)
            else:
                waiting.set_result(reply)

    def _keep_listener(self, descriptors: list[int]) -> None:
        """Keep the one socket that may come along, which a proxy listens on; close all others."""
        expected = 1 if self._count == 0 and self.listener is None else 0
        for descriptor in descriptors[expected:]:
            os.close(descriptor)
        if len(descriptors) > expected:
            if expected:
                os.close(descriptors[0])
            raise BadReply(f"{len(descriptors)} descriptors came out of a sandbox")
        if descriptors:
            self.listener = socket.socket(fileno=descriptors[0])


def checked_reply(reply: dict[str, Any], count: int) -> dict[str, Any]:
    """A reply to order number ``count`` with all its fields of the right type and range.

    Raises:
        BadReply: it isn't one.
    """
    code, limits = reply.get("exit"), reply.get("limits")
    number = (int, float)
    good = (
        type(reply.get("id")) is int
        and reply["id"] == count
        and (code is None or (type(code) is int and -65 <= code <= 255))
        and isinstance(limits, list)
        and all(isinstance(limit, str) and limit in LIMITS for limit in limits)
        and len(limits) <= len(LIMITS)
        and (code is not None or limits)
        and type(reply.get("cpu_s")) in number
        and 0 <= reply["cpu_s"] < 1e9
        and type(reply.get("rss_bytes")) is int
        and 0 <= reply["rss_bytes"] < 1 << 60
    )
    if not good:
        raise BadReply(f"a reply to order {count} is malformed: {reply!r:.200}")
    return {name: reply[name] for name in ("exit", "limits", "cpu_s", "rss_bytes")}


def _ended(limit: str, cpu_s: float = 0.0, rss_bytes: int = 0) -> dict[str, Any]:
    return {"exit": None, "limits": [limit], "cpu_s": cpu_s, "rss_bytes": rss_bytes, "kill": True}


def parse(data: bytes) -> dict[str, Any]:
    """A message as a dictionary.

    Raises:
        BadReply: it is none.
    """
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadReply(f"a message of {len(data)} bytes is no JSON") from error
    if not isinstance(message, dict):
        raise BadReply(f"a message is a {type(message).__name__}, not an object")
    return message
