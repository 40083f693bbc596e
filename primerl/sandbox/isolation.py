"""Tiers of isolation: what each needs of the machine, and what it stops."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from primerl.sandbox import launching
from primerl.sandbox.errors import Probe, SandboxError, SandboxUnavailable
from primerl.sandbox.proxy import Proxy
from primerl.sandbox.results import Isolation

TIERS = ("namespaces",)
WAY_OUT = (
    "Ways out: on a Linux host, allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces above 0); in Docker, "
    "run with --security-opt seccomp=unconfined --security-opt systempaths=unconfined (and "
    "apparmor=unconfined), in Kubernetes with procMount: Unmasked, a seccompProfile that allows "
    "unshare, and hostUsers: false; or run environments on another machine"
)
_PROBE_PROGRAM = (
    "import sys; sys.path.insert(0, {source!r}); "
    "from primerl.sandbox.engine import probes; probes.main()"
)
_PROBES_TAKE_S = 30.0
_WATCHDOG = (
    "rlimits for each process, and a watchdog for all processes and files together, which looks "
    "every 4 to 100 ms, so that a sandbox can pass its limit for that long. Kernel memory of "
    "pipes, sockets and processes is bounded by their number, not counted. No cgroup is used"
)


def tier(name: str) -> str:
    """The tier that is used where ``name`` is the weakest allowed.

    Raises:
        ValueError: there is no such tier.
    """
    if name not in TIERS:
        known = ", ".join(TIERS)
        raise ValueError(f"min_isolation is {name!r}; the tiers built in are: {known}")
    return name


async def start(
    name: str,
    *,
    python: str,
    readable: list[str],
    settings: dict[str, Any],
    lease_s: float,
    start_timeout_s: float,
) -> launching.Launcher:
    """Start what makes sandboxes of a tier.

    Raises:
        SandboxUnavailable: the machine lacks something; ``probes`` says what.
    """
    if not sys.platform.startswith("linux"):
        raise SandboxUnavailable(
            f"sandboxes need Linux namespaces, and this is {sys.platform}: run the worker on a "
            "Linux machine, or in a Linux virtual machine (on macOS: Lima, Colima or Docker "
            f"Desktop's, with these settings). {WAY_OUT}",
            [Probe(name="Linux", message=f"this is {sys.platform}")],
        )
    try:
        return await launching.Launcher.start(
            python=python,
            readable=readable,
            settings=settings,
            lease_s=lease_s,
            start_timeout_s=start_timeout_s,
        )
    except launching.ZygoteFailed as error:
        failed = Probe(name="start", errno=error.errno, message=str(error))
        raise SandboxUnavailable(
            f"the tier {name!r} can't be had here: {error}. {WAY_OUT}",
            [failed, *await probe(python)],
        ) from error


async def probe(python: str | None = None) -> list[Probe]:
    """Try each thing that the tiers need, in processes of their own.

    Raises:
        SandboxError: the probes themselves can't be run.
    """
    source = str(Path(__file__).parents[2])
    program = _PROBE_PROGRAM.format(source=source)
    command = [python or launching.default_python(), "-I", "-c", program]
    try:
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            capture_output=True,
            timeout=_PROBES_TAKE_S,
            env={"PATH": "/usr/bin:/bin"},
            check=True,
        )
        rows = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SandboxError(f"the probes can't be run: {error}") from error
    return [Probe(name=name, errno=number, message=message) for name, number, message in rows]


def describe(name: str, *, landlock: bool, user: int, network: Proxy | None) -> Isolation:
    """What a tier stops and what it doesn't, as it is in force on this machine."""
    layers = ["namespaces (user, pid, mount, net, ipc, uts, cgroup)", "read-only root", "seccomp"]
    layers += ["no capabilities", "rlimits", *(["landlock"] if landlock else [])]
    reachable = "no network"
    if network is not None:
        reachable = f"no network but {', '.join(network.allowed)}, through a proxy"
    who = f"user {user}, whom no account has" if user else f"user {os.getuid()}, an ordinary user"
    return Isolation(
        tier=name,
        shared_kernel=True,
        memory=_WATCHDOG,
        user=who,
        layers=tuple(layers),
        stops=(
            "reading and writing the host's files",
            f"network: {reachable}",
            "seeing, signalling and tracing the host's processes and other sandboxes",
            "system calls off a list of about 240",
            "more processes, files, memory, time and output than allowed",
            "outliving its owner",
        ),
        does_not_stop=(
            "a bug in the kernel that the allowed system calls reach: the kernel is shared",
            "side channels of the processor and of timing",
            "use of processor time by all sandboxes together, within their limits",
            "reading the listed read-only folders",
        ),
    )
