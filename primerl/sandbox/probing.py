"""Finding out what this machine lets each tier do."""

from primerl.sandbox import launching, tiers
from primerl.sandbox.errors import Probe
from primerl.sandbox.results import Limits
from primerl.sandbox.tiers.protocol import Options


async def probe(tier: tiers.TierName = "namespaces", *, python: str | None = None) -> list[Probe]:
    """Try each thing that a tier needs, in processes of their own.

    Raises:
        SandboxError: the probes themselves can't be run.
        ValueError: there is no such tier.
    """
    python = python or launching.default_python()
    options = Options(
        limits=Limits(),
        python=python,
        readable=launching.readable_paths(python, ()),
        allow_network=(),
        lease_s=60.0,
        start_timeout_s=30.0,
        image=None,
    )
    return await tiers.choose(tier, options).probes()
