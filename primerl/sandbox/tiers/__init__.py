"""Ways of keeping code inside, behind one interface; a file for each."""

import importlib
from typing import Literal, get_args

from primerl.sandbox.tiers.protocol import Options, Tier

TierName = Literal[
    "namespaces", "landlock", "bubblewrap", "nsjail", "gvisor", "docker", "podman", "prime"
]

_CLASSES = {
    "namespaces": ("namespaces", "Namespaces"),
    "landlock": ("landlock", "Landlock"),
    "bubblewrap": ("bubblewrap", "Bubblewrap"),
    "nsjail": ("nsjail", "Nsjail"),
    "gvisor": ("gvisor", "Gvisor"),
    "docker": ("containers", "Docker"),
    "podman": ("containers", "Podman"),
    "prime": ("prime", "Prime"),
}


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
