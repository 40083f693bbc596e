"""Host resources that tiers use: the interpreter, readable paths, and a temporary folder."""

import os
import stat
import sys
import tempfile
from pathlib import Path

_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl/certs", "/etc/ca-certificates")


def readable_paths(python: str, extra: tuple[str, ...]) -> list[str]:
    """Return the paths that sandboxes can read: the system's, the interpreter's, and ``extra``.

    The paths are normalized.

    Raises:
        ValueError: an extra path is not absolute, does not exist, or has a ``..`` after a symlink.
    """
    for path in extra:
        if not os.path.isabs(path) or not os.path.exists(path):
            raise ValueError(f"readable path {path!r} must be absolute and exist")
        if os.path.realpath(_normal(path)) != os.path.realpath(path):
            raise ValueError(f"readable path {path!r} has a '..' after a symlink: resolve it first")
    prefix = os.path.dirname(os.path.dirname(os.path.realpath(python)))
    paths = [path for path in (*_SYSTEM_FOLDERS, *_SYSTEM_FILES) if os.path.exists(path)]
    if not f"{prefix}/".startswith("/usr/"):
        paths.append(prefix)
    return [*paths, *map(_normal, extra)]


def _normal(path: str) -> str:
    """Normalize a path, including a leading ``//``, which ``os.path.normpath`` keeps."""
    return "/" + os.path.normpath(path).lstrip("/")


def default_python() -> str:
    """Return the current interpreter outside its virtual environment, to hide those packages."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def new_folder() -> Path:
    """Create a temporary folder that the sandboxes' users can enter.

    Root's temporary folder may be closed to other users (libpam-tmpdir does this). In that case,
    the folder is created in ``/tmp`` or ``/var/tmp``.
    """
    places = [tempfile.gettempdir(), "/tmp", "/var/tmp"]
    place = next((one for one in places if os.geteuid() != 0 or _open_to_all(Path(one))), None)
    return Path(tempfile.mkdtemp(prefix="primerl-sandbox-", dir=place))


def _open_to_all(folder: Path) -> bool:
    folders = [folder.resolve(), *folder.resolve().parents]
    return all(one.is_dir() and one.stat().st_mode & stat.S_IXOTH for one in folders)
