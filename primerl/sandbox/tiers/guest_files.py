"""Delivery of the guest code (``primerl.sandbox.guest``) to the place where it runs.

It is delivered as a program to start, a folder to mount, or a zip file to upload. None of them
loads any other part of ``primerl``: the guest code needs only the standard library.
"""

import compileall
import io
import zipfile
from pathlib import Path

from primerl.sandbox import guest

_GUEST_FOLDER = Path(guest.__file__).parent
SOURCE = str(_GUEST_FOLDER.parents[2])  # where this interpreter found primerl


def program(source: str, module: str, call: str = "main()") -> str:
    """Return a program for ``python -I -c`` that calls a guest module, imported from ``source``."""
    return (
        f"import sys; sys.path.insert(0, {source!r}); "
        f"from primerl.sandbox.guest import {module}; {module}.{call}"
    )


def guest_archive() -> bytes:
    """Return a zip file of the guest code that Python can import from."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for package in ("primerl", "primerl/sandbox"):  # empty, instead of primerl's own
            archive.writestr(f"{package}/__init__.py", "")
        for path in _GUEST_FOLDER.rglob("*.py"):
            archive.write(path, f"primerl/sandbox/guest/{path.relative_to(_GUEST_FOLDER)}")
    return buffer.getvalue()


def copy_guest(folder: Path) -> None:
    """Copy the guest code to a folder, compiled, and readable by every user whatever the umask."""
    with zipfile.ZipFile(io.BytesIO(guest_archive())) as archive:
        archive.extractall(folder)
    compileall.compile_dir(folder, quiet=2)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
