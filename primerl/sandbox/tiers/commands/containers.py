"""The tiers ``docker`` and ``podman``: containers, from an image that provides Python."""

import asyncio
import contextlib
import functools
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from primerl.sandbox.errors import Probe, SandboxError
from primerl.sandbox.guest.isolation import shared_root
from primerl.sandbox.results import Isolation
from primerl.sandbox.tiers.commands.tier import (
    GUEST,
    GUEST_FOLDER,
    NOBODY,
    CommandSandbox,
    CommandTier,
    answers,
)
from primerl.sandbox.tiers.images.cache import Grow, ImageCache
from primerl.sandbox.tiers.images.engines import ContainerClient
from primerl.sandbox.tiers.interface import Options

# RLIMIT_NPROC counts a user's processes on the whole host; --pids-limit limits one container.
_MOST_OF_USER = 4096
_IMAGE = "python:3.11-slim"
_REMOVAL_S = 60.0


@attrs.frozen(kw_only=True)
class PulledImage:
    """An image of the engine, which is ``ours`` if it was pulled for a session of this pool."""

    name: str
    ours: bool


class Containers(CommandTier):
    """A tier that starts one container per job: no network, no capabilities, a read-only root."""

    program: str
    lacks = CommandTier.lacks - {"images"}

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._images: ImageCache[PulledImage] = ImageCache(
            self._pull,
            self._remove,
            limit_bytes=options.image_bytes,
            timeout_s=options.image_timeout_s,
        )

    @property
    def image(self) -> str:
        """The container image, which Docker or podman pulls if this machine doesn't have it."""
        return self.options.image or _IMAGE

    async def fetch(self, image: str) -> None:
        """Pull an image, unless this host has it."""
        await self._images.fetch(image)

    async def make(self, settings: Mapping[str, Any]) -> CommandSandbox:
        """Create a sandbox, whose image the engine keeps until the sandbox ends."""
        image = settings.get("image")
        if image is None:
            return await super().make(settings)
        held = await self._images.take(image)
        try:
            sandbox = await super().make(settings)
        except BaseException:
            self._images.release(held)
            raise
        sandbox.on_end = functools.partial(self._images.release, held)
        return sandbox

    def stats(self) -> dict[str, Any]:
        """Return the images of sessions; those that the engine had before have 0 bytes."""
        return self._images.stats()

    async def close(self) -> None:
        """Remove the pool's folder, and the images that were pulled for sessions."""
        await self._images.close()
        await super().close()
        await asyncio.to_thread(self._images.clear)

    async def _pull(self, image: str, grow: Grow) -> "PulledImage":
        if os.path.isabs(image):
            raise SandboxError(
                f"the tier {self.name!r} can't use the path {image} as an image: load it into "
                f"{self.program} and give its name, or use the tier 'namespaces'"
            )
        engine = ContainerClient(self.program)
        if await engine.has(image):
            return PulledImage(name=image, ours=False)
        await engine.pull(image)
        try:
            await asyncio.to_thread(grow, await engine.size(image))
        except BaseException:
            await engine.remove(image)
            raise
        return PulledImage(name=image, ours=True)

    def _remove(self, image: "PulledImage") -> None:
        if image.ours:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    [self.program, "rmi", image.name], capture_output=True, timeout=_REMOVAL_S
                )

    def command(self, name: str, files: Path | None, image: str | None) -> list[str]:
        """Return the ``docker run`` or ``podman run`` command line."""
        limits = self.options.limits
        user = os.getuid() or NOBODY
        options = ["--rm", "--interactive", "--name", name, "--network", "none", "--read-only"]
        options += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        options += ["--user", f"{user}:{user}", "--pids-limit", str(limits.processes)]
        options += ["--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)]
        options += ["--ulimit", f"nofile={limits.open_files}:{limits.open_files}"]
        options += ["--ulimit", f"nproc={_MOST_OF_USER}:{_MOST_OF_USER}"]
        options += ["--ipc", "none", "--hostname", "sandbox", "--workdir", shared_root.HOME]
        space = f"rw,nosuid,nodev,size={limits.disk_bytes},mode=1777"
        options += ["--tmpfs", f"/tmp:{space}"]
        if files is None:
            options += ["--tmpfs", f"{shared_root.HOME}:{space}"]
        else:
            options += ["--volume", f"{files}:{shared_root.HOME}"]
        options += ["--volume", f"{self.folder}/guest:{GUEST_FOLDER}:ro"]
        for path in self._further():
            options += ["--volume", f"{path}:{path}:ro"]
        return [self.program, "run", *options, image or self.image, "python3", "-I", "-c", GUEST]

    def removal(self, name: str) -> list[str]:
        """Return the command line that force-removes a container."""
        return [self.program, "rm", "--force", name]

    async def probes(self) -> list[Probe]:
        """Check that the container engine responds."""
        return [await answers(self.program, "info")]

    def isolation(self) -> Isolation:
        """Describe the isolation by containers."""
        return Isolation(
            tier=self.name,
            shared_kernel=True,
            memory="a hard limit, by the container engine's cgroup",
            user=f"user {os.getuid() or NOBODY} in a container",
            layers=(f"container ({self.program})", "read-only root", "no capabilities"),
            stops=(
                "reading and writing the host's files",
                "network: no network",
                "seeing, signaling and tracing the host's processes and other sandboxes",
                "more processes, memory, time and output than allowed",
            ),
            does_not_stop=(
                "a bug in the kernel or in the container engine: the kernel is shared",
                "system calls that the container engine's own filter allows: more than ours",
                "more files than allowed, and in sessions more disk than allowed",
                "processor and timing side channels",
                "containers outliving a crashed owner, until 10 s after the job's timeout",
            ),
        )

    def _further(self) -> list[str]:
        """Return the readable paths outside system folders, which come from the image."""
        return [path for path in self.options.readable if not path.startswith(_SYSTEM)]


_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/etc")


class Docker(Containers):
    """The tier ``docker``: containers run by Docker."""

    name = "docker"
    program = "docker"


class Podman(Containers):
    """The tier ``podman``: containers run by podman."""

    name = "podman"
    program = "podman"

    def command(self, name: str, files: Path | None, image: str | None) -> list[str]:
        """Return the command line, with ``--userns keep-id`` for an unprivileged user."""
        program, run, *rest = super().command(name, files, image)
        # Without it, files of an unprivileged user's container belong to subordinate uids, which
        # only podman can map back.
        rootless = ["--userns", "keep-id"] if os.getuid() != 0 else []
        return [program, run, *rootless, *rest]
