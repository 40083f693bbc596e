"""Installation of clients at pinned versions, once, into a folder that outlives the tests."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import attrs
from filelock import FileLock

FOLDER = Path(os.environ.get("PRIMERL_AGENTS_FOLDER") or "~/.cache/primerl/agents").expanduser()
STAMP = "installed.txt"


@attrs.frozen(kw_only=True)
class Installation:
    """Packages that are installed together, by ``pip`` or by ``npm``."""

    name: str
    manager: str
    pins: tuple[str, ...]

    @property
    def folder(self):
        """The folder, whose name changes with the pins."""
        digest = hashlib.sha256("\n".join([self.manager, *self.pins]).encode()).hexdigest()
        return FOLDER / f"{self.name}-{digest[:12]}"

    @property
    def bin(self):
        """The folder of the programs."""
        inside = "bin" if self.manager == "pip" else "node_modules/.bin"
        return self.folder / inside

    def version(self, package):
        """Return the pinned version of a package."""
        for pin in self.pins:
            name, _, version = pin.rpartition("==" if self.manager == "pip" else "@")
            if name.partition("[")[0] == package:
                return version
        raise KeyError(package)


def install(installation):
    """Install the packages, unless an earlier run has; return the folder."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    folder = installation.folder
    with FileLock(FOLDER / f"{folder.name}.lock"):
        if (folder / STAMP).exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)  # of an installation that was interrupted
        if installation.manager == "pip":
            python = folder / "bin" / "python"
            _run([sys.executable, "-m", "venv", str(folder)])
            _run([str(python), "-m", "pip", "install", "--quiet", *installation.pins])
        elif shutil.which("npm") is None:
            raise RuntimeError(f"{installation.name} is installed by npm, which was not found")
        else:
            options = ["--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(folder)]
            _run(["npm", "install", *options, *installation.pins])
        (folder / STAMP).write_text("\n".join(installation.pins), encoding="utf-8")
    return folder


def _run(command):
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=1800)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
