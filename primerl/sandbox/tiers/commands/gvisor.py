"""The tier ``gvisor``: each job runs on its own user-space kernel (``runsc``)."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from primerl.sandbox.errors import Probe
from primerl.sandbox.guest.isolation import shared_root
from primerl.sandbox.results import Isolation
from primerl.sandbox.tiers.commands.tier import GUEST, GUEST_FOLDER, NOBODY, CommandTier, answers


class Gvisor(CommandTier):
    """The tier ``gvisor``, which starts one ``runsc run`` of an OCI bundle per job.

    It does not use ``runsc do``, which would show the host's files.
    """

    name = "gvisor"

    def command(self, name: str, files: Path | None, image: str | None) -> list[str]:
        """Write an OCI bundle, and return the ``runsc run`` command line for it."""
        del image  # sessions can't choose one
        bundle = self.folder / "bundles" / name
        root = bundle / "rootfs"
        for path in ("dev", "proc", "tmp", "sandbox", GUEST_FOLDER.lstrip("/")):
            (root / path).mkdir(parents=True)
        for path in self.options.readable:
            _make_place(path, root)
        (bundle / "config.json").write_text(json.dumps(self._configuration(files)))
        return [*self._runsc(), "run", "--bundle", str(bundle), name]

    def removal(self, name: str) -> list[str]:
        """Return the ``runsc delete`` command line."""
        return [*self._runsc(), "delete", "--force", name]

    async def probes(self) -> list[Probe]:
        """Check that ``runsc`` is installed and runs."""
        return [await answers("runsc", "--version")]

    def isolation(self) -> Isolation:
        """Describe the isolation by gVisor."""
        return Isolation(
            tier=self.name,
            shared_kernel=False,
            memory="a limit on the address space of each process; their sum is not limited",
            user=f"user {NOBODY} inside gVisor's kernel",
            layers=("gVisor's kernel in user space", "read-only root", "no capabilities"),
            stops=(
                "system calls to the host's kernel: gVisor handles them",
                "reading and writing the host's files",
                "network: no network",
                "seeing, signaling and tracing the host's processes and other sandboxes",
                "more time and output than allowed",
            ),
            does_not_stop=(
                "a bug in gVisor, followed by one in the kernel",
                "more processes, files or total memory than allowed",
                "in sessions, more disk than allowed",
                "processor and timing side channels",
                "reading the listed read-only folders",
            ),
        )

    def _runsc(self) -> list[str]:
        options = ["--root", str(self.folder / "runsc"), "--network=none", "--ignore-cgroups"]
        if os.getuid() != 0:
            options.append("--rootless")
        return [shutil.which("runsc") or "runsc", *options]

    def _configuration(self, files: Path | None) -> dict[str, Any]:
        """Return the bundle's ``config.json``, per the OCI runtime specification."""
        user = NOBODY if os.getuid() == 0 else 0  # rootless, only one user is mapped
        space = ["nosuid", "nodev", f"size={self.options.limits.disk_bytes}", "mode=1777"]
        mounts = [
            _mount("proc", "/proc", "proc"),
            _mount("tmpfs", "/dev", "tmpfs"),
            _mount("tmpfs", "/tmp", "tmpfs", *space),
            _mount(f"{self.folder}/guest", GUEST_FOLDER, "bind", "rbind", "ro"),
        ]
        if files is None:
            mounts.append(_mount("tmpfs", shared_root.HOME, "tmpfs", *space))
        else:
            mounts.append(_mount(str(files), shared_root.HOME, "bind", "rbind", "rw"))
        shown = [path for path in self.options.readable if not os.path.islink(path)]
        mounts += [_mount(path, path, "bind", "rbind", "ro") for path in shown]
        nothing: list[str] = []
        names = ("bounding", "effective", "inheritable", "permitted", "ambient")
        return {
            "ociVersion": "1.0.0",
            "process": {
                "user": {"uid": user, "gid": user},
                "args": [self.options.python, "-I", "-c", GUEST],
                "env": ["PATH=/usr/bin:/bin", "LANG=C.UTF-8"],
                "cwd": shared_root.HOME,
                "capabilities": dict.fromkeys(names, nothing),
                "noNewPrivileges": True,
            },
            "root": {"path": "rootfs", "readonly": True},
            "hostname": "sandbox",
            "mounts": mounts,
            "linux": {
                "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]
            },
        }


def _mount(source: str, target: str, kind: str, *options: str) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": source, "options": [*options]}


def _make_place(path: str, root: Path) -> None:
    """Create the symlink or the mount point for ``path`` in the bundle's root."""
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    if os.path.islink(path):
        place.symlink_to(os.readlink(path))
    elif os.path.isdir(path):
        place.mkdir(exist_ok=True)
    else:
        place.touch()
