"""Tiers of a container engine: Docker or podman, with an image that has Python."""

import os
from pathlib import Path

from primerl.sandbox.engine.barriers import skeleton
from primerl.sandbox.errors import Probe
from primerl.sandbox.results import Isolation
from primerl.sandbox.tiers.commands.tier import ENGINE, GUEST, NOBODY, CommandTier, answers

# Of the user on the whole host; the number in one container is limited by --pids-limit.
_MOST_OF_USER = 4096
_IMAGE = "python:3.11-slim"


class Containers(CommandTier):
    """One container for each order, with no network, no capabilities and a read-only root."""

    program: str

    @property
    def image(self) -> str:
        """The image, which the engine must have already, or pulls."""
        return self.options.image or _IMAGE

    def command(self, name: str, files: Path | None) -> list[str]:
        """See ``CommandTier``."""
        limits = self.options.limits
        user = os.getuid() or NOBODY
        options = ["--rm", "--interactive", "--name", name, "--network", "none", "--read-only"]
        options += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        options += ["--user", f"{user}:{user}", "--pids-limit", str(limits.processes)]
        options += ["--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)]
        options += ["--ulimit", f"nofile={limits.open_files}:{limits.open_files}"]
        options += ["--ulimit", f"nproc={_MOST_OF_USER}:{_MOST_OF_USER}"]
        options += ["--ipc", "none", "--hostname", "sandbox", "--workdir", skeleton.HOME]
        space = f"rw,nosuid,nodev,size={limits.disk_bytes},mode=1777"
        options += ["--tmpfs", f"/tmp:{space}"]
        if files is None:
            options += ["--tmpfs", f"{skeleton.HOME}:{space}"]
        else:
            options += ["--volume", f"{files}:{skeleton.HOME}"]
        options += ["--volume", f"{self.folder}/engine:{ENGINE}:ro"]
        for path in self._further():
            options += ["--volume", f"{path}:{path}:ro"]
        return [self.program, "run", *options, self.image, "python3", "-I", "-c", GUEST]

    def removal(self, name: str) -> list[str]:
        """See ``CommandTier``."""
        return [self.program, "rm", "--force", name]

    async def probes(self) -> list[Probe]:
        """See ``Tier``."""
        return [await answers(self.program, "info")]

    def isolation(self) -> Isolation:
        """See ``Tier``."""
        return Isolation(
            tier=self.name,
            shared_kernel=True,
            memory="a cgroup of the container engine's, hard",
            user=f"user {os.getuid() or NOBODY} in a container",
            layers=(f"container ({self.program})", "read-only root", "no capabilities"),
            stops=(
                "reading and writing the host's files",
                "network: no network",
                "seeing, signalling and tracing the host's processes and other sandboxes",
                "more processes, memory, time and output than allowed",
            ),
            does_not_stop=(
                "a bug in the kernel or in the engine: the kernel is shared",
                "system calls that the engine's own filter allows, more than ours",
                "more files than allowed, and in sessions more disk than allowed",
                "side channels of the processor and of timing",
                "outliving a crashed owner for as long as an order's timeout and 10 s",
            ),
        )

    def _further(self) -> list[str]:
        """Paths that the pool's owner named; system folders are the image's."""
        return [path for path in self.options.readable if not path.startswith(_SYSTEM)]


_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/etc")


class Docker(Containers):
    """Docker."""

    name = "docker"
    program = "docker"


class Podman(Containers):
    """podman."""

    name = "podman"
    program = "podman"

    def command(self, name: str, files: Path | None) -> list[str]:
        """See ``CommandTier``."""
        program, run, *rest = super().command(name, files)
        # An ordinary user's container would give the files to users that only podman can map back.
        rootless = ["--userns", "keep-id"] if os.getuid() != 0 else []
        return [program, run, *rootless, *rest]
