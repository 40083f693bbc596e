"""A tier of bubblewrap (``bwrap``), with our filter of system calls and our watchdog inside."""

import os

from primerl.sandbox.engine.confined import DEVICES
from primerl.sandbox.engine.namespaces import HOST_FILES
from primerl.sandbox.engine.wrapped import ENGINE, PLACES
from primerl.sandbox.errors import Probe
from primerl.sandbox.tiers import programs
from primerl.sandbox.tiers.wrapped import WrappedTier


class Bubblewrap(WrappedTier):
    """bubblewrap makes namespaces and mounts, never as root; the rest is as in ``namespaces``."""

    name = "bubblewrap"
    program = "bwrap"

    def command(self, folder: str) -> list[str]:
        """See ``LocalTier``."""
        options = ["--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1"]
        options += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--clearenv"]
        options += ["--cap-drop", "ALL", "--proc", "/proc"]
        for name in HOST_FILES:
            if os.path.lexists(f"/proc/{name}"):
                options += ["--ro-bind", "/dev/null", f"/proc/{name}"]
        for device in DEVICES:
            options += ["--dev-bind", device, device]
        for path in self.beside_places():
            options += ["--ro-bind", path, path]
        for place in PLACES:
            options += ["--size", str(self.options.limits.disk_bytes), "--tmpfs", place]
        for source, path in self.in_places(folder):
            options += ["--ro-bind", source, path]
        options += ["--ro-bind", f"{folder}/engine", ENGINE, "--chdir", PLACES[0]]
        options += ["--remount-ro", "/proc", "--remount-ro", "/"]
        return [programs.find(self.program) or self.program, *options, "--"]

    async def probes(self) -> list[Probe]:
        """See ``Tier``."""
        return [await programs.answers(self.program, "--version"), *await super().probes()]
