"""What a pool needs of a tier, and what it needs of each sandbox."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import attrs

from primerl.sandbox.errors import Probe
from primerl.sandbox.results import Isolation, Limits, Result
from primerl.sandbox.roots import Root
from primerl.sandbox.slots import Order

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


@runtime_checkable
class Tier(Protocol):
    """A way of keeping code inside.

    ``lacks`` names what its sandboxes can't do: reach listed servers (``network``), have another
    root filesystem (``roots``), be packed and unpacked (``snapshots``), keep a Python from turn to
    turn (``turns``), or have a socket of the owner's as stdin (``connections``). ``hides`` are
    folders of a sandbox's own, in which only what is readable below the host's can appear.
    """

    name: str
    lacks: frozenset[Ability]
    hides: tuple[str, ...]

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that every command gets, such as those by which programs find a proxy."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it can make sandboxes: it was started, and what makes them was not killed."""
        ...

    async def start(self) -> None:
        """Start what makes sandboxes.

        Raises:
            SandboxUnavailable: the machine lacks something.
        """
        ...

    async def make(self, settings: Mapping[str, Any]) -> Sandbox:
        """A new sandbox: for one order, or with ``session`` for many, until ``lifetime_s``.

        Raises:
            SandboxError: it can't be made.
        """
        ...

    async def prepare_root(self, layers: Sequence[str]) -> Root:
        """A root filesystem for sessions."""
        ...

    async def close(self) -> None:
        """End everything that was started."""
        ...

    async def probes(self) -> list[Probe]:
        """Each thing that it needs, tried."""
        ...

    def isolation(self) -> Isolation:
        """What it stops, and what it doesn't, as it is in force."""
        ...
