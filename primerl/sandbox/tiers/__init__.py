"""Isolation tiers: several ways to isolate code, behind one interface."""

import importlib
from collections.abc import Sequence
from typing import Literal, get_args

import attrs

from primerl.sandbox.errors import Probe
from primerl.sandbox.results import SandboxLimits
from primerl.sandbox.tiers import host
from primerl.sandbox.tiers.interface import Options, Tier

TierName = Literal["namespaces", "landlock", "gvisor", "docker", "podman", "prime"]

_CLASSES = {
    "namespaces": ("local.namespaces", "Namespaces"),
    "landlock": ("local.landlock", "Landlock"),
    "gvisor": ("commands.gvisor", "Gvisor"),
    "docker": ("commands.containers", "Docker"),
    "podman": ("commands.containers", "Podman"),
    "prime": ("prime", "Prime"),
}

_STRENGTHS = {"landlock": 0, "gvisor": 2, "prime": 3}  # tiers not listed share the kernel: 1


def allowed(tier: TierName | None, min_isolation: TierName | None) -> TierName:
    """Return the tier to use: ``tier`` if given, else ``min_isolation``, else ``"namespaces"``.

    Raises:
        ValueError: ``tier`` isolates less than ``min_isolation``, or a name is unknown.
    """
    for name in (tier, min_isolation):
        if name is not None and name not in _CLASSES:
            raise ValueError(
                f"{name!r} is not a sandbox tier; expected one of {', '.join(get_args(TierName))}"
            )
    chosen: TierName = tier or min_isolation or "namespaces"
    if min_isolation and _STRENGTHS.get(chosen, 1) < _STRENGTHS.get(min_isolation, 1):
        raise ValueError(f"the tier {chosen!r} isolates less than min_isolation={min_isolation!r}")
    return chosen


def choose(name: TierName, options: Options) -> Tier:
    """Create the tier of a given name, without starting it.

    Raises:
        ValueError: the name is unknown, or the tier can't do what the options require.
    """
    if name not in _CLASSES:
        raise ValueError(f"tier is {name!r}; expected one of {', '.join(get_args(TierName))}")
    module, class_name = _CLASSES[name]
    found = importlib.import_module(f"primerl.sandbox.tiers.{module}")
    tier: Tier = getattr(found, class_name)(options)
    if options.allow_network and "network" in tier.lacks:
        raise ValueError(
            f"allow_network is set, but the tier {name!r} can't let sandboxes reach single "
            "servers: use the tier 'namespaces' or 'prime', or leave allow_network out"
        )
    return tier


def on_this_host(name: TierName, options: Options) -> Tier:
    """Create a tier for this host: with its interpreter, and all paths that its sandboxes read.

    Raises:
        ValueError: as ``choose``; or a readable path does not exist, or can't be shown.
    """
    python = options.python or host.default_python()
    paths = host.readable_paths(python, tuple(options.readable))
    tier = choose(name, attrs.evolve(options, python=python, readable=paths))
    require_visible(paths, tier)
    return tier


def require_visible(paths: Sequence[str], tier: Tier) -> None:
    """Raise ValueError if sandboxes of the tier can't show one of the host's ``paths``."""
    for path in paths:
        if path in tier.hides:
            raise ValueError(
                f"{path} can't be a readable path in sandboxes of the tier {tier.name!r}, which "
                f"have a {path} of their own: name the folders below it"
            )


async def probe(tier: TierName = "namespaces", *, python: str | None = None) -> list[Probe]:
    """Check each requirement of a tier on this machine, in separate processes.

    Raises:
        SandboxError: the checks themselves could not be run.
        ValueError: there is no such tier.
    """
    options = Options(
        limits=SandboxLimits(),
        python=python or "",
        readable=(),
        allow_network=(),
        lease_s=60.0,
        start_timeout_s=30.0,
        image=None,
    )
    return await on_this_host(tier, options).probes()
