"""What tiers take of this machine: an interpreter, paths for sandboxes to read, and a folder."""

import os
import stat
import sys
import tempfile
from pathlib import Path

_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl/certs", "/etc/ca-certificates")


def readable_paths(python: str, extra: tuple[str, ...]) -> list[str]:
    """What sandboxes see, read-only: system folders, the interpreter's and ``extra``, normalized.

    Raises:
        ValueError: an extra path isn't absolute, doesn't exist, or has a ``..`` behind a link.
    """
    for path in extra:
        if not os.path.isabs(path) or not os.path.exists(path):
            raise ValueError(f"readable path {path!r} must be absolute and exist")
        if os.path.realpath(_normal(path)) != os.path.realpath(path):
            raise ValueError(f"readable path {path!r} has a '..' behind a link: resolve it first")
    prefix = os.path.dirname(os.path.dirname(os.path.realpath(python)))
    paths = [path for path in (*_SYSTEM_FOLDERS, *_SYSTEM_FILES) if os.path.exists(path)]
    if not f"{prefix}/".startswith("/usr/"):
        paths.append(prefix)
    return [*paths, *map(_normal, extra)]


def _normal(path: str) -> str:
    """The path with single slashes and no ``..``; the standard library keeps two at its start."""
    return "/" + os.path.normpath(path).lstrip("/")


def default_python() -> str:
    """This interpreter without its virtual environment, whose packages are no business of code."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def new_folder() -> Path:
    """Make a temporary folder that the users of sandboxes can reach.

    Root's temporary folder may be closed to them (libpam-tmpdir makes such ones), so the next
    common folder is taken then.
    """
    places = [tempfile.gettempdir(), "/tmp", "/var/tmp"]
    place = next((one for one in places if os.geteuid() != 0 or _open_to_all(Path(one))), None)
    return Path(tempfile.mkdtemp(prefix="primerl-sandbox-", dir=place))


def _open_to_all(folder: Path) -> bool:
    folders = [folder.resolve(), *folder.resolve().parents]
    return all(one.is_dir() and one.stat().st_mode & stat.S_IXOTH for one in folders)
