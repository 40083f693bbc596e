"""What a pool needs of a tier, and what it needs of each sandbox."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import attrs

from primerl.sandbox.errors import Probe, SandboxUnavailable
from primerl.sandbox.results import Isolation, Limits, Result, Root

Ability = Literal["network", "roots", "snapshots", "turns", "connections"]


@attrs.frozen(kw_only=True)
class Options:
    """What a pool was asked for, as far as it concerns its tier."""

    limits: Limits
    python: str
    readable: Sequence[str]
    allow_network: Sequence[str]
    lease_s: float
    start_timeout_s: float
    image: str | None


@attrs.frozen(kw_only=True)
class Order:
    """What a sandbox is to do: ``kind`` is one of those that the engine's ``orders`` know."""

    kind: str
    header: dict[str, Any]
    files: dict[str, bytes]
    stdin: bytes
    timeout_s: float
    memory_bytes: int
    output_bytes: int
    keeps: bool = False  # the sandbox stays when there is too much output
    connection: int | None = None  # a descriptor to be stdin instead; the slot closes it

    @property
    def complete_header(self) -> dict[str, Any]:
        """The header of the payload that goes to the sandbox."""
        return self.header | {
            "kind": self.kind,
            "files": list(self.files),
            "sizes": [len(content) for content in self.files.values()],
        }


def asked(code: str | Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Kind and header of an order for Python code (a string) or a command (a list).

    Raises:
        ValueError: the command is empty.
    """
    if isinstance(code, str):
        return "code", {"code": code}
    if not code:
        raise ValueError("the command is empty")
    return "argv", {"argv": list(code)}


@runtime_checkable
class Sandbox(Protocol):
    """One sandbox; it takes one order at a time."""

    @property
    def alive(self) -> bool:
        """Whether it can take orders."""
        ...

    async def execute(self, order: Order) -> Result:
        """Carry out an order. What goes wrong inside is in the result."""
        ...

    def kill(self) -> None:
        """End it, with all that runs in it; may be called again."""
        ...


class Tier:
    """A way of keeping code inside.

    ``lacks`` names what its sandboxes can't do: reach listed servers (``network``), have another
    root filesystem (``roots``), be packed and unpacked (``snapshots``), keep a Python from turn to
    turn (``turns``), or have a socket of the owner's as stdin (``connections``). ``hides`` are
    folders of a sandbox's own, in which only what is readable below the host's can appear.
    """

    name: str
    lacks: frozenset[Ability] = frozenset()
    hides: tuple[str, ...] = ()

    def __init__(self, options: Options) -> None:
        self.options = options

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that every command gets, such as those by which programs find a proxy."""
        return {}

    @property
    def alive(self) -> bool:
        """Whether it can make sandboxes: it was started, and what makes them was not killed."""
        raise NotImplementedError(self.name)

    async def start(self) -> None:
        """Start what makes sandboxes.

        Raises:
            SandboxUnavailable: the machine lacks something.
        """
        raise NotImplementedError(self.name)

    async def make(self, settings: Mapping[str, Any]) -> Sandbox:
        """A new sandbox: for one order, or with ``session`` for many, until ``lifetime_s``.

        Raises:
            SandboxError: it can't be made.
        """
        raise NotImplementedError(self.name)

    async def prepare_root(self, layers: Sequence[str]) -> Root:
        """A root filesystem for sessions."""
        raise NotImplementedError(self.name)

    async def close(self) -> None:
        """End everything that was started."""
        raise NotImplementedError(self.name)

    async def probes(self) -> list[Probe]:
        """Each thing that it needs, tried."""
        raise NotImplementedError(self.name)

    def isolation(self) -> Isolation:
        """What it stops, and what it doesn't, as it is in force."""
        raise NotImplementedError(self.name)

    async def require_probes(self) -> None:
        """Raise SandboxUnavailable if something that it needs is missing."""
        failed = [probe for probe in await self.probes() if not probe.ok]
        if failed:
            raise SandboxUnavailable(f"the tier {self.name!r} can't be had here", failed)
