"""The common part of the tiers whose sandboxes are forked by a zygote on this machine."""

import asyncio
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import attrs

from primerl.sandbox.errors import Probe, SandboxError, SandboxUnavailable
from primerl.sandbox.tiers import guest_files
from primerl.sandbox.tiers.interface import Options, Tier
from primerl.sandbox.tiers.local import zygote_process
from primerl.sandbox.tiers.local.cgroups import Cgroup, Cgroups, delegated
from primerl.sandbox.tiers.local.slots import Slot

_WATCHDOG = (
    "rlimits per process, and a watchdog for all processes and files together, which checks every "
    "4 to 100 ms, so that a sandbox can exceed its limit for that long. Kernel memory of pipes, "
    "sockets and processes is not counted, only bounded by limits on their number"
)
_CGROUP = (
    "one cgroup per sandbox, with hard limits on memory (including kernel memory) and processes; "
    "rlimits and a watchdog take effect before it"
)
WAY_OUT = (
    "Remedies: on a Linux host, allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces above 0); in Docker, "
    "run with --security-opt seccomp=unconfined --security-opt systempaths=unconfined (and "
    "apparmor=unconfined), in Kubernetes with procMount: Unmasked, a seccompProfile that allows "
    "unshare, and hostUsers: false; run environments on another machine; or choose another tier "
    "(tier='landlock' needs no namespaces, and stops less)"
)
_BEATS = 4  # heartbeats per lease
_PROBES_TAKE_S = 30.0
_GROUPS_GO_S = 5.0


class LocalTier(Tier):
    """The base class of the tiers whose sandboxes a zygote forks."""

    way: str  # the zygote's name for this kind of sandbox
    needs: frozenset[str] = frozenset()  # names of the required kernel probes; empty means all
    network = False

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._launcher: zygote_process.Launcher | None = None
        self._beats: asyncio.Task[None] | None = None
        self._cgroups: Cgroups | None = None
        self._why_no_cgroups = ""

    @property
    def alive(self) -> bool:
        """Whether the zygote is running."""
        return self._launcher is not None and self._launcher.alive

    @property
    def launcher(self) -> zygote_process.Launcher:
        """The owner's connection to the zygote.

        Raises:
            SandboxError: the pool isn't running.
        """
        if self._launcher is None or not self.alive:
            raise SandboxError(
                "the pool isn't running: use it as `async with SandboxPool() as pool`"
            )
        return self._launcher

    async def start(self) -> None:
        """Start the zygote, and create a test sandbox."""
        if not sys.platform.startswith("linux"):
            raise SandboxUnavailable(
                f"the tier {self.name!r} needs Linux, but this is {sys.platform}: run the worker "
                "on a Linux machine, or in a Linux virtual machine (on macOS: Lima, Colima or "
                f"Docker Desktop's, with these settings). {WAY_OUT}",
                [Probe(name="Linux", message=f"this is {sys.platform}")],
            )
        try:
            self._launcher = await zygote_process.Launcher.start(
                way=self.way,
                python=self.options.python,
                readable=[*self.options.readable],
                settings=self._settings(),
                lease_s=self.options.lease_s,
                start_timeout_s=self.options.start_timeout_s,
            )
        except zygote_process.ZygoteFailed as error:
            failed = Probe(name="start", errno=error.errno, message=str(error))
            raise SandboxUnavailable(
                f"the tier {self.name!r} is not available on this machine: {error}. {WAY_OUT}",
                [failed, *await self.probes()],
            ) from error
        self._beats = asyncio.get_running_loop().create_task(self._give_signs_of_life())
        try:
            await self._try()
        except SandboxError as error:
            await self.close()
            raise SandboxUnavailable(
                f"the tier {self.name!r} can't create sandboxes here: {error}. {WAY_OUT}",
                await self.probes(),
            ) from error
        except BaseException:
            await self.close()
            raise

    async def make(self, settings: Mapping[str, Any]) -> Slot:
        """Fork a sandbox, in a separate cgroup if cgroups can be used."""
        launcher, limits = self.launcher, self.options.limits
        cgroup = None
        if self._cgroups is not None:
            cgroup = self._cgroups.make(
                memory_bytes=limits.memory_bytes, processes=limits.processes
            )
        try:
            async with asyncio.timeout(self.options.start_timeout_s):
                control, handle = await launcher.make(
                    dict(settings), cgroup=None if cgroup is None else cgroup.entrance
                )
        except BaseException:
            self._close_cgroup(cgroup)
            raise
        slot = Slot(control, handle, limits)
        slot.cgroup = cgroup
        slot.on_end.append(functools.partial(self._close_cgroup, cgroup))
        await slot.ready(self.options.start_timeout_s)
        return slot

    async def close(self) -> None:
        """End the zygote with all sandboxes, and remove their cgroups."""
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)
        if self._launcher is not None:
            await self._launcher.close()
        await self._remove_cgroups()

    async def probes(self) -> list[Probe]:
        """Check the kernel features that this tier needs."""
        found = await kernel_probes(self.options.python)
        return [probe for probe in found if not self.needs or probe.name in self.needs]

    def memory(self) -> str:
        """Describe how the memory of sandboxes is limited."""
        if self._cgroups is not None:
            return _CGROUP
        return f"{_WATCHDOG}. No cgroup is used: {self._why_no_cgroups}"

    async def _try(self) -> None:
        """Create a test sandbox: with a cgroup if one can be used, otherwise without."""
        found, self._why_no_cgroups = delegated()
        if found is not None:
            self._cgroups = Cgroups(found)
            try:
                (await self.make({})).kill()
            except (OSError, SandboxError) as error:
                self._cgroups, self._why_no_cgroups = None, str(error)
        if self._cgroups is None:
            (await self.make({})).kill()

    def _close_cgroup(self, cgroup: Cgroup | None) -> None:
        if cgroup is not None and self._cgroups is not None:
            self._cgroups.close(cgroup)

    async def _remove_cgroups(self) -> None:
        deadline = time.monotonic() + _GROUPS_GO_S
        while self._cgroups is not None and self._cgroups.remove_closed():
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(0.01)

    def user(self) -> str:
        """Describe the user that owns the processes of sandboxes."""
        if self.launcher.separate_users:
            return "one user per sandbox, which no account has"
        user = self.launcher.user
        return f"user {user}, which no account has" if user else f"user {os.getuid()}"

    def _settings(self) -> dict[str, Any]:
        return {
            **attrs.asdict(self.options.limits),
            "session": False,
            "lifetime_s": 1e9,
            "root": None,
            "overlay": False,
            "network": self.network,
            "readable": [*self.options.readable],
        }

    async def _give_signs_of_life(self) -> None:
        while True:
            await asyncio.sleep(self.options.lease_s / _BEATS)
            if self._launcher is not None and self._launcher.alive:
                self._launcher.renew()


async def kernel_probes(python: str) -> list[Probe]:
    """Check which kernel features that the tiers need are available, in separate processes.

    Raises:
        SandboxError: the checks themselves could not be run.
    """
    try:
        done = await asyncio.to_thread(
            subprocess.run,
            [python, "-I", "-c", guest_files.program(guest_files.SOURCE, "feature_checks")],
            capture_output=True,
            timeout=_PROBES_TAKE_S,
            env={"PATH": "/usr/bin:/bin"},
            check=True,
        )
        rows = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SandboxError(f"the checks of kernel features could not be run: {error}") from error
    return [Probe(name=name, errno=number, message=message) for name, number, message in rows]
