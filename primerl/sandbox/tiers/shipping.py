"""The engine on its way to where it runs: as a program to start, a folder to show, a file to send.

None of the three loads anything of ``primerl`` but the engine, which needs the standard library
alone.
"""

import compileall
import io
import zipfile
from pathlib import Path

from primerl.sandbox import engine

_ENGINE = Path(engine.__file__).parent
SOURCE = str(_ENGINE.parents[2])  # where this interpreter found primerl


def program(source: str, module: str, call: str = "main()") -> str:
    """A program for ``python -I -c`` that calls a module of the engine, which is below a path."""
    return (
        f"import sys; sys.path.insert(0, {source!r}); "
        f"from primerl.sandbox.engine import {module}; {module}.{call}"
    )


def engine_archive() -> bytes:
    """The engine's modules as a zip file that Python imports from."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for package in ("primerl", "primerl/sandbox"):  # in place of primerl's own
            archive.writestr(f"{package}/__init__.py", "")
        for path in _ENGINE.rglob("*.py"):
            archive.write(path, f"primerl/sandbox/engine/{path.relative_to(_ENGINE)}")
    return buffer.getvalue()


def copy_engine(folder: Path) -> None:
    """Copy the engine, compiled, to where every user can read it, whatever the umask."""
    with zipfile.ZipFile(io.BytesIO(engine_archive())) as archive:
        archive.extractall(folder)
    compileall.compile_dir(folder, quiet=2)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
