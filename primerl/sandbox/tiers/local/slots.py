"""The owner's side of a local sandbox: a control socket, and a pidfd to kill it."""

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from primerl.sandbox.errors import BadReply, SandboxError, SandboxNotStarted
from primerl.sandbox.guest import messages
from primerl.sandbox.guest.processes import usage
from primerl.sandbox.results import LIMITS, Result, SandboxLimits
from primerl.sandbox.tiers.interface import Job
from primerl.sandbox.tiers.local.cgroups import Cgroup
from primerl.sandbox.tiers.streams import Input, Output

# The sandbox's init process enforces the timeout; this much later, the owner kills the sandbox.
_GRACE_S = 5.0
_LARGE = 1 << 20  # bytes that would hold up the event loop


class Slot:
    """A local sandbox that waits for jobs and executes one at a time."""

    host = ""

    def __init__(self, control: socket.socket, handle: int, limits: SandboxLimits) -> None:
        self.listener: socket.socket | None = None
        self.on_end: list[Callable[[], None]] = []
        self.cgroup: Cgroup | None = None
        self.environment: Mapping[str, str] = {}  # of its image; jobs' own variables override it
        self._control = control
        self._handle = handle
        self._limits = limits
        self._count = 0
        self._reply: asyncio.Future[dict[str, Any]] | None = None
        self._killed = False  # from outside, while it executed a job
        control.setblocking(False)

    @property
    def alive(self) -> bool:
        """Whether the sandbox can take jobs."""
        return self._control.fileno() >= 0

    async def ready(self, timeout_s: float) -> None:
        """Wait until the sandbox is set up; kill it if that fails.

        Raises:
            SandboxNotStarted: a step of the setup failed, or it exceeded its timeout.
        """
        loop = asyncio.get_running_loop()
        self._reply = loop.create_future()
        loop.add_reader(self._control, self._receive)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._reply
        except TimeoutError:
            self.kill()
            raise SandboxNotStarted(f"a sandbox was not set up within {timeout_s} s") from None
        except SandboxError as error:
            self.kill()
            raise SandboxNotStarted(f"a sandbox could not be set up: {error}") from error
        except BaseException:
            self.kill()
            raise
        if reply.get("ready") is not True:
            self.kill()
            raise SandboxNotStarted(f"a sandbox could not be set up: {reply.get('failed')}")

    async def execute(self, job: Job) -> Result:
        """Execute a job; kill the sandbox if it breaks the protocol, hangs, or outputs too much.

        Raises:
            SandboxNotStarted: this machine is too short of something to start the job.
            SandboxError: the sandbox was killed from outside, as when the pool is closed.
        """
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        self._count += 1
        if self.cgroup is not None:
            self.cgroup.limit_memory(job.memory_bytes)
        reply: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._reply = reply

        def overflow() -> None:
            if not reply.done() and not job.keeps:
                reply.set_result(_ended("output", *self._usage()))

        streams: list[Output] = []
        given: Input | None = None
        try:
            with _sent_or_closed([] if job.connection is None else [job.connection]) as theirs:
                if job.connection is None:
                    given = Input(job.stdin)
                    theirs.append(given.theirs)
                for _ in range(2):
                    streams.append(Output(job.output_bytes, overflow))
                    theirs.append(streams[-1].theirs)
                await self._send(job, theirs)
            try:
                async with asyncio.timeout(job.timeout_s + _GRACE_S):
                    ended = await reply
            except TimeoutError:
                ended = _ended("timeout", *self._usage())
            except BadReply:
                ended = _ended("protocol")
            except SandboxError:
                if self._killed:
                    raise
                ended = _ended("died")
            if "failed" in ended:
                raise SandboxNotStarted(f"a sandbox could not start its job: {ended['failed']}")
            if ended["exit"] is None and ended.get("kill"):
                self.kill()
            stdout, stderr = [await stream.finish() for stream in streams]
        except SandboxNotStarted:
            raise  # the sandbox keeps its files, and can take another job
        except BaseException:  # cancelled: the code must not keep running
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
        """Kill the sandbox's init process, and with it all other processes of the sandbox."""
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
            self._killed = True
            self._reply.set_exception(SandboxError("the sandbox was killed"))
            self._reply.exception()

    def _usage(self) -> tuple[float, int]:
        """Return CPU seconds and peak memory of a sandbox's processes, or zeros if it ended."""
        with contextlib.suppress(OSError):
            for row in Path(f"/proc/self/fdinfo/{self._handle}").read_text("utf-8").splitlines():
                if row.startswith("Pid:") and int(row.split()[1]) > 0:  # -1 once it has ended
                    return usage(row.split()[1])
        return 0.0, 0

    async def _send(self, job: Job, streams: list[int]) -> None:
        control = {
            "id": self._count,
            "kind": "turn" if job.kind == "turn" else "job",
            "timeout_s": job.timeout_s,
            "cpu_s": math.ceil(job.timeout_s) * self._limits.processes,
            "memory_bytes": job.memory_bytes,
            "address_space_bytes": self._limits.address_space_bytes or job.memory_bytes,
            "disk_bytes": self._limits.disk_bytes,
        }
        header, contents = job.complete_header, list(job.files.values())
        if self.environment:
            header["environment"] = {**self.environment, **header["environment"]}
        if sum(header["sizes"]) > _LARGE:
            payload = await asyncio.to_thread(messages.payload, header, contents)
        else:
            payload = messages.payload(header, contents)
        try:
            socket.send_fds(self._control, [json.dumps(control).encode()], [payload, *streams])
        finally:
            os.close(payload)

    def _receive(self) -> None:
        """Receive one packet from the sandbox, validating all of its content."""
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
            failure = BadReply(f"a message from a sandbox is unreadable: {error}")
        waiting = self._reply
        if failure is not None:
            self._reply = None
            self.kill()
        elif waiting is None:  # an unsolicited message
            self.kill()
        if waiting is not None and not waiting.done():
            if failure is not None:
                waiting.set_exception(failure)
            else:
                waiting.set_result(reply)

    def _keep_listener(self, descriptors: list[int]) -> None:
        """Keep the one listening socket that a sandbox may send for the proxy; close the others."""
        expected = 1 if self._count == 0 and self.listener is None else 0
        for descriptor in descriptors[expected:]:
            os.close(descriptor)
        if len(descriptors) > expected:
            if expected:
                os.close(descriptors[0])
            raise BadReply(
                f"{len(descriptors)} file descriptors came from a sandbox; expected none, "
                "or one with its first message"
            )
        if descriptors:
            self.listener = socket.socket(fileno=descriptors[0])


@contextlib.contextmanager
def _sent_or_closed(theirs: list[int]) -> Iterator[list[int]]:
    """Collect the sandbox's ends of a job's streams, and close them once it is sent or failed.

    Raises:
        SandboxNotStarted: the job could not be sent.
    """
    try:
        yield theirs
    except OSError as error:
        raise SandboxNotStarted(f"a job could not be sent to its sandbox: {error}") from error
    finally:
        for descriptor in theirs:
            os.close(descriptor)


def checked_reply(reply: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the fields of the reply to job number ``count``, after checking types and ranges.

    Raises:
        BadReply: the reply is malformed, or belongs to another job.
    """
    failed = reply.get("failed")
    if reply.get("id") == count and isinstance(failed, str):
        return {"failed": failed[: messages.LONGEST_REASON]}
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
        raise BadReply(f"a sandbox's reply to job {count} is malformed: {reply!r:.200}")
    return {name: reply[name] for name in ("exit", "limits", "cpu_s", "rss_bytes")}


def _ended(limit: str, cpu_s: float = 0.0, rss_bytes: int = 0) -> dict[str, Any]:
    return {"exit": None, "limits": [limit], "cpu_s": cpu_s, "rss_bytes": rss_bytes, "kill": True}


def parse(data: bytes) -> dict[str, Any]:
    """Parse a message, which must be a JSON object.

    Raises:
        BadReply: the message is not a JSON object.
    """
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadReply(f"a message of {len(data)} bytes is not JSON") from error
    if not isinstance(message, dict):
        raise BadReply(f"a message is a {type(message).__name__}, not a JSON object")
    return message
