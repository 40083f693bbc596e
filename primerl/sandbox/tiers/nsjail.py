"""A tier of nsjail, with our filter of system calls and our watchdog inside."""

import os

from primerl.sandbox.engine.confined import DEVICES
from primerl.sandbox.engine.wrapped import ENGINE, PLACES
from primerl.sandbox.errors import Probe
from primerl.sandbox.tiers import programs
from primerl.sandbox.tiers.wrapped import WrappedTier

_UNLIMITED = ("as", "core", "cpu", "fsize", "nofile", "nproc", "stack")


class Nsjail(WrappedTier):
    """nsjail makes namespaces and mounts, never as root; the rest is as in ``namespaces``."""

    name = "nsjail"
    program = "nsjail"

    def command(self, folder: str) -> list[str]:
        """See ``LocalTier``."""
        options = ["--mode", "o", "--really_quiet", "--time_limit", "0", "--hostname", "sandbox"]
        options += ["--user", "1000", "--group", "1000", "--pass_fd", "@CONTROL@"]
        for limit in _UNLIMITED:  # ours come later
            options += [f"--rlimit_{limit}", "hard"]
        for path in self.beside_places():
            if os.path.islink(path):
                options += ["--symlink", f"{os.readlink(path)}:{path}"]
            else:
                options += ["--bindmount_ro", path]
        for device in DEVICES:
            options += ["--bindmount", device]
        for place in PLACES:
            size = self.options.limits.disk_bytes
            files = self.options.limits.files
            options += ["--mount", f"none:{place}:tmpfs:size={size},nr_inodes={files}"]
        for source, path in self.in_places(folder):
            options += ["--bindmount_ro", f"{source}:{path}"]
        options += ["--bindmount_ro", f"{folder}/engine:{ENGINE}", "--cwd", PLACES[0]]
        return [programs.find(self.program) or self.program, *options, "--"]

    async def probes(self) -> list[Probe]:
        """See ``Tier``."""
        return [await programs.answers(self.program, "--help"), *await super().probes()]
