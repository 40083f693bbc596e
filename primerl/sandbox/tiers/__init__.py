"""Ways of keeping code inside, behind one interface; a file for each."""

import importlib
from collections.abc import Sequence
from typing import Literal, get_args

from primerl.sandbox.errors import Probe
from primerl.sandbox.results import Limits
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

_STRENGTHS = {"landlock": 0, "gvisor": 2, "prime": 3}  # the others, which share the kernel: 1


def allowed(tier: TierName | None, min_isolation: TierName | None) -> TierName:
    """The tier to take: ``tier``, if it is as strong as ``min_isolation``, which is the default.

    Raises:
        ValueError: it is weaker, or there is no such tier.
    """
    for name in (tier, min_isolation):
        if name is not None and name not in _CLASSES:
            raise ValueError(
                f"{name!r} is no tier of sandboxes; expected one of {', '.join(get_args(TierName))}"
            )
    chosen: TierName = tier or min_isolation or "namespaces"
    if min_isolation and _STRENGTHS.get(chosen, 1) < _STRENGTHS.get(min_isolation, 1):
        raise ValueError(
            f"the tier {chosen!r} keeps code inside less well than min_isolation={min_isolation!r}"
        )
    return chosen


def choose(name: TierName, options: Options) -> Tier:
    """The tier of that name, not yet started.

    Raises:
        ValueError: there is no such tier, or it can't do what the options ask for.
    """
    if name not in _CLASSES:
        raise ValueError(f"tier is {name!r}; expected one of {', '.join(get_args(TierName))}")
    module, class_name = _CLASSES[name]
    found = importlib.import_module(f"primerl.sandbox.tiers.{module}")
    tier: Tier = getattr(found, class_name)(options)
    if options.allow_network and "network" in tier.lacks:
        raise ValueError(
            f"allow_network is set, and the tier {name!r} can't let sandboxes reach single "
            "servers: use the tiers 'namespaces' or 'prime', or leave it out"
        )
    return tier


def require_visible(paths: Sequence[str], tier: Tier) -> None:
    """Raise ValueError for a path that sandboxes of the tier can't show."""
    for path in paths:
        if path in tier.hides:
            raise ValueError(
                f"{path} can't be a readable path in sandboxes of the tier {tier.name!r}, which "
                f"have a {path} of their own: name the folders below it"
            )


async def probe(tier: TierName = "namespaces", *, python: str | None = None) -> list[Probe]:
    """Try each thing that a tier needs, in processes of their own.

    Raises:
        SandboxError: the probes themselves can't be run.
        ValueError: there is no such tier.
    """
    python = python or host.default_python()
    options = Options(
        limits=Limits(),
        python=python,
        readable=host.readable_paths(python, ()),
        allow_network=(),
        lease_s=60.0,
        start_timeout_s=30.0,
        image=None,
    )
    return await choose(tier, options).probes()
