"""Repositories as mappings from path to content: read commits, apply patches, select files."""

import fnmatch
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

MOST_BYTES = 64 << 20  # per repository
GIT_S = 60.0

# Files that control how tests run. The agent's versions are ignored.
_STEERING = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml"),
    *("sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc", "*.so", ".coveragerc"),
    *("test_*.py", "*_test.py", "noxfile.py"),
)
_FOLDERS = ("tests", "test", "testing", "__pycache__", ".git")
_TOOLS = ("pytest", "_pytest", "pluggy", "py", "iniconfig", "packaging", "primerl")


def committed(folder: str, commit: str) -> dict[str, bytes]:
    """Read the files of a commit from a git repository on this machine.

    Raises:
        ValueError: the commit does not exist.
    """
    command = ["git", "-C", folder, "archive", "--format=tar", f"{commit}^{{commit}}"]
    done = subprocess.run(command, capture_output=True, timeout=GIT_S, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise ValueError(f"{folder} at {commit}: {said}")
    return unpacked(done.stdout)


def patched(files: Mapping[str, bytes], patch: str) -> dict[str, bytes]:
    """Return the files with a patch applied.

    Raises:
        ValueError: the patch does not apply.
    """
    if not patch.strip():
        return dict(files)
    with tempfile.TemporaryDirectory() as folder:
        for path, content in files.items():
            place = Path(folder, path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        # Keep git from finding a repository of this machine around the temporary folder.
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
    """Pack files into a tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            about = tarfile.TarInfo(path)
            about.size = len(content)
            about.mode = 0o755 if content.startswith(b"#!") else 0o644
            archive.addfile(about, io.BytesIO(content))
    return buffer.getvalue()


def unpacked(archive: bytes) -> dict[str, bytes]:
    """Unpack the regular files of an untrusted tar archive, without writing to disk.

    Raises:
        ValueError: the bytes are not an archive, or the files have too many bytes.
    """
    files = {}
    originals: dict[str, tarfile.TarInfo] = {}
    left = MOST_BYTES
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
            for about in opened:
                path = PurePosixPath(about.name)
                # A hard link refers to an earlier file of the archive.
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
        raise ValueError(f"the files are not a valid archive: {error}") from error
    return files


def graded(
    base: Mapping[str, bytes], changed: Mapping[str, bytes], tests: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Combine the files to test: the agent's code, and the repository's own tests.

    Files that control how tests run also come from the repository. New files that do so are
    dropped, and so are new files that shadow other modules. Files whose path conflicts with a
    folder of the repository's own files, or the other way round, are dropped too.

    Args:
        base: the files of the commit.
        changed: the files that the agent left.
        tests: the files of the commit with the hidden tests.
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
    """Return the folders that contain a file, innermost first."""
    return [folder.as_posix() for folder in PurePosixPath(path).parents]


def steers(path: str) -> bool:
    """Check whether a file is a test or controls how tests run."""
    parts = PurePosixPath(path).parts
    return any(part in _FOLDERS for part in parts[:-1]) or any(
        fnmatch.fnmatch(parts[-1], pattern) for pattern in _STEERING
    )


def shadows(path: str) -> bool:
    """Check whether a module would shadow one of Python's standard library or of the test tools."""
    parts = PurePosixPath(path).parts
    name = parts[0] if len(parts) > 1 else parts[0].removesuffix(".py")
    return name in sys.stdlib_module_names or name in _TOOLS


def modules(files: Iterable[str]) -> list[str]:
    """Return the top-level modules and packages of a repository, without its tests."""
    found = set()
    for path in files:
        parts = PurePosixPath(path).parts
        if parts[-1] == "__init__.py" and len(parts) == 2:
            found.add(parts[0])
        elif len(parts) == 1 and path.endswith(".py") and not steers(path):
            found.add(path.removesuffix(".py"))
    return sorted(found - set(_FOLDERS) - {"setup"})
