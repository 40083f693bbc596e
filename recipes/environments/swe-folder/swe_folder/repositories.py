"""Repositories as files by path: of a commit, with a patch, and with what an agent changed."""

import fnmatch
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

MOST_BYTES = 64 << 20  # of a repository
GIT_S = 60.0

# What decides how tests run is the repository's own, whatever the agent wrote.
_STEERING = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml"),
    *("sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc", "*.so", ".coveragerc"),
    *("test_*.py", "*_test.py", "noxfile.py"),
)
_FOLDERS = ("tests", "test", "testing", "__pycache__", ".git")
_TOOLS = ("pytest", "_pytest", "pluggy", "py", "iniconfig", "packaging", "primerl")


def committed(folder: str, commit: str) -> dict[str, bytes]:
    """The files of a commit of a repository on this machine.

    Raises:
        ValueError: there is no such commit.
    """
    command = ["git", "-C", folder, "archive", "--format=tar", f"{commit}^{{commit}}"]
    done = subprocess.run(command, capture_output=True, timeout=GIT_S, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise ValueError(f"{folder} at {commit}: {said}")
    return unpacked(done.stdout)


def patched(files: Mapping[str, bytes], patch: str) -> dict[str, bytes]:
    """The files with a patch applied.

    Raises:
        ValueError: it does not apply.
    """
    if not patch.strip():
        return dict(files)
    with tempfile.TemporaryDirectory() as folder:
        for path, content in files.items():
            place = Path(folder, path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        # Not one of this machine's own repositories, should the folder be inside one.
        variables = {**os.environ, "GIT_CEILING_DIRECTORIES": str(Path(folder).parent)}
        done = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", "-"],
            cwd=folder,
            env=variables,
            input=patch.encode(),
            capture_output=True,
            timeout=GIT_S,
            check=False,
        )
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise ValueError(f"the patch does not apply: {said}")
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(Path(folder).rglob("*"))
            if path.is_file() and not path.is_symlink()
        }


def packed(files: Mapping[str, bytes]) -> bytes:
    """An archive of files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            about = tarfile.TarInfo(path)
            about.size = len(content)
            about.mode = 0o755 if content.startswith(b"#!") else 0o644
            archive.addfile(about, io.BytesIO(content))
    return buffer.getvalue()


def unpacked(archive: bytes) -> dict[str, bytes]:
    """The regular files of an archive, which may be anybody's: nothing is written to disk.

    Raises:
        ValueError: it is no archive, or has too many bytes.
    """
    files = {}
    originals: dict[str, tarfile.TarInfo] = {}
    left = MOST_BYTES
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
            for about in opened:
                path = PurePosixPath(about.name)
                # A hard link is another name of a file before it.
                file = originals.get(about.linkname) if about.islnk() else about
                if file is None or not file.isreg() or not path.parts:
                    continue
                if path.is_absolute() or ".." in path.parts:
                    continue
                left -= file.size
                content = opened.extractfile(file)
                if left < 0 or content is None:
                    raise ValueError(f"the archive has more than {MOST_BYTES} bytes")
                files[path.as_posix()] = content.read()
                originals[about.name] = file
    except (tarfile.TarError, EOFError, OSError, UnicodeError, RecursionError) as error:
        raise ValueError(f"what came out is no archive: {error}") from error
    return files


def graded(
    base: Mapping[str, bytes], changed: Mapping[str, bytes], tests: Mapping[str, bytes]
) -> dict[str, bytes]:
    """What is tested: the agent's files, but the repository's own where they decide how.

    ``base`` is the commit, ``changed`` what the agent left, ``tests`` the commit with the hidden
    tests. New files that steer tests or shadow other modules are left out, and those that are where
    the repository's own need a folder, or the other way round.
    """
    own = {path: content for path, content in tests.items() if steers(path)}
    added = {path: content for path, content in tests.items() if base.get(path) != content}
    fixed = own | added
    folders = {folder for path in (*changed, *fixed) for folder in folders_of(path)}
    kept = {
        path: content
        for path, content in changed.items()
        if not steers(path)
        and (path in base or not shadows(path))
        and path not in folders
        and fixed.keys().isdisjoint(folders_of(path))
    }
    return kept | fixed


def folders_of(path: str) -> list[str]:
    """The folders that a file is in, from the inside out."""
    return [folder.as_posix() for folder in PurePosixPath(path).parents]


def steers(path: str) -> bool:
    """Whether a file is one of the tests, or decides how they run."""
    parts = PurePosixPath(path).parts
    return any(part in _FOLDERS for part in parts[:-1]) or any(
        fnmatch.fnmatch(parts[-1], pattern) for pattern in _STEERING
    )


def shadows(path: str) -> bool:
    """Whether a module would be imported in place of one of Python's, or of the test tools'."""
    parts = PurePosixPath(path).parts
    name = parts[0] if len(parts) > 1 else parts[0].removesuffix(".py")
    return name in sys.stdlib_module_names or name in _TOOLS


def modules(files: Iterable[str]) -> list[str]:
    """The top-level modules and packages of a repository, tests left out."""
    found = set()
    for path in files:
        parts = PurePosixPath(path).parts
        if parts[-1] == "__init__.py" and len(parts) == 2:
            found.add(parts[0])
        elif len(parts) == 1 and path.endswith(".py") and not steers(path):
            found.add(path.removesuffix(".py"))
    return sorted(found - set(_FOLDERS) - {"setup"})
