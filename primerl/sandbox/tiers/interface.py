"""The interfaces of tiers and sandboxes that a pool relies on, and the jobs it sends them."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import attrs

from primerl.sandbox.errors import Probe, SandboxError, SandboxNotStarted, SandboxUnavailable
from primerl.sandbox.results import Isolation, Result, Root, SandboxLimits

T = TypeVar("T")
_ENDING_S = 1.0
_PAUSES_S = (0.05, 0.5)  # before another attempt to start something
Ability = Literal["network", "roots", "images", "snapshots", "turns", "connections"]


@attrs.frozen(kw_only=True)
class Options:
    """The options of a pool that its tier needs.

    An empty ``python`` is the host's default, and ``readable`` what is readable besides the system;
    ``tiers.on_this_host`` completes both.
    """

    limits: SandboxLimits
    python: str
    readable: Sequence[str]
    allow_network: Sequence[str]
    lease_s: float
    start_timeout_s: float
    image: str | None
    image_bytes: int = 64 << 30
    image_timeout_s: float = 1800.0


@attrs.frozen(kw_only=True)
class Job:
    """A job for a sandbox, such as code to run or a file to read.

    ``guest/jobs/kinds.py`` defines the values of ``kind``.
    """

    kind: str
    header: dict[str, Any]
    files: dict[str, bytes]
    stdin: bytes
    timeout_s: float
    memory_bytes: int
    output_bytes: int
    keeps: bool = False  # whether the sandbox survives too much output
    connection: int | None = None  # a file descriptor to use as stdin; the slot closes it

    @property
    def complete_header(self) -> dict[str, Any]:
        """The header of the payload for the sandbox, with the job's kind, file names and sizes."""
        return self.header | {
            "kind": self.kind,
            "files": list(self.files),
            "sizes": [len(content) for content in self.files.values()],
        }


def asked(code: str | Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the kind and header of a job for Python code (a string) or a command (a list).

    Raises:
        ValueError: the command is empty.
    """
    if isinstance(code, str):
        return "code", {"code": code}
    if not code:
        raise ValueError("the command is empty: give at least the name of a program")
    return "argv", {"argv": list(code)}


@runtime_checkable
class Sandbox(Protocol):
    """A sandbox, which executes one job at a time."""

    @property
    def host(self) -> str:
        """The name of the other host on which the sandbox is; empty on this host."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the sandbox can take jobs."""
        ...

    async def execute(self, job: Job) -> Result:
        """Execute a job. The result reports failures of the code inside."""
        ...

    def kill(self) -> None:
        """Kill all processes of the sandbox; calling this again does nothing."""
        ...


class Tier:
    """An isolation tier: a factory of sandboxes that are isolated in one particular way.

    ``lacks`` names what its sandboxes can't do: reach listed servers (``network``), use another
    root filesystem (``roots``), use the image of a session (``images``), pack and unpack their
    files (``snapshots``), keep Python state between turns (``turns``), or use a socket of the owner
    as stdin (``connections``). ``hides`` lists folders that each sandbox replaces with its own: the
    host's folder can't be shown there, but readable paths below it can.
    """

    name: str
    lacks: frozenset[Ability] = frozenset()
    hides: tuple[str, ...] = ()

    def __init__(self, options: Options) -> None:
        self.options = options

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that every command gets, such as the address of a proxy."""
        return {}

    @property
    def alive(self) -> bool:
        """Whether the tier can create sandboxes: it was started and its helpers still run."""
        raise NotImplementedError(self.name)

    async def start(self) -> None:
        """Start the tier, so that it can create sandboxes.

        Raises:
            SandboxUnavailable: the machine lacks a requirement of the tier.
        """
        raise NotImplementedError(self.name)

    async def make(self, settings: Mapping[str, Any]) -> Sandbox:
        """Create a sandbox for one job, or for many if ``settings`` has ``session``.

        The setting ``lifetime_s`` limits how long a session's sandbox lives. ``image`` is the image
        of a session, which stays on this host as long as the sandbox lives.

        Raises:
            SandboxError: the sandbox can't be created.
        """
        raise NotImplementedError(self.name)

    async def run_connected(
        self, served: Job, suite: Job, *, sandboxes: "Sandboxes"
    ) -> tuple[Result, Result | None]:
        """Execute two jobs as ``connected`` does; ``sandboxes`` creates them if they are here."""
        return await connected(sandboxes, served, suite)

    async def fetch(self, image: str) -> None:
        """Bring the image of a session to this host before the session's sandbox is created.

        Raises:
            SandboxError: the image can't be had; the message names it.
        """
        raise NotImplementedError(self.name)

    def stats(self) -> dict[str, Any]:
        """Return the images that this host holds, and what became of others."""
        return {}

    async def prepare_root(self, layers: Sequence[str]) -> Root:
        """Build a root filesystem for sessions from layers, the lowest first."""
        raise NotImplementedError(self.name)

    async def close(self) -> None:
        """Stop the tier, with everything that it started."""
        raise NotImplementedError(self.name)

    async def probes(self) -> list[Probe]:
        """Check each requirement of the tier on this machine."""
        raise NotImplementedError(self.name)

    def isolation(self) -> Isolation:
        """Describe the isolation in force: what it stops and what it does not."""
        raise NotImplementedError(self.name)

    async def require_probes(self) -> None:
        """Raise SandboxUnavailable if this machine lacks a requirement of the tier."""
        failed = [probe for probe in await self.probes() if not probe.ok]
        if failed:
            raise SandboxUnavailable(
                f"the tier {self.name!r} is not available on this machine", failed
            )


Sandboxes = Callable[[], contextlib.AbstractAsyncContextManager[Sandbox]]
"""Creates a sandbox, which lives as long as the context is open."""


async def connected(sandboxes: Sandboxes, served: Job, suite: Job) -> tuple[Result, Result | None]:
    """Execute two jobs in two sandboxes, with the two ends of a socket pair as standard inputs.

    Returns the results of ``suite`` and of ``served``, which is None if ``served`` had to be ended
    after ``suite``.

    Raises:
        SandboxNotStarted: the sandboxes could not be created or connected.
    """
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise SandboxNotStarted(f"two sandboxes could not be connected: {error}") from error
    with ours, theirs:
        async with sandboxes() as serving, sandboxes() as testing:
            # Detached, so that each end is open in one sandbox only: if that sandbox ends, the
            # other one sees the connection close.
            served = attrs.evolve(served, connection=ours.detach())
            suite = attrs.evolve(suite, connection=theirs.detach())
            answering = asyncio.ensure_future(serving.execute(served))
            try:
                done = await testing.execute(suite)
            finally:
                # It ends when the tests do, unless the code under test delays it.
                await asyncio.wait([answering], timeout=_ENDING_S)
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
            return done, None if answering.cancelled() else answering.result()


async def attempted(
    work: Callable[[], Awaitable[T]],
    *,
    errors: tuple[type[SandboxError], ...] = (SandboxNotStarted,),
) -> T:
    """Do ``work``; if one of ``errors`` says that it was not done, do it again after a while."""
    for pause_s in _PAUSES_S:
        with contextlib.suppress(*errors):
            return await work()
        await asyncio.sleep(pause_s)
    return await work()
