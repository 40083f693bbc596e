"""Repositories as mappings from path to file: archives, and the files to grade."""

import io
import itertools
import tarfile
from collections.abc import Callable, Collection, Iterable
from pathlib import PurePosixPath

from primerl.sandbox import Executable, SymbolicLink, archives
from swe_folder.git import MOST_BYTES, File, Files
from swe_folder.layouts import CODE, Layout
from swe_folder.paths import resolved

_MOST_MEMBERS = 20_000  # as many files as a sandbox may have
_LONGEST_NAME = 1024


def packed(files: Files) -> bytes:
    """Pack files into a tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, file in files.items():
            about = tarfile.TarInfo(path)
            if isinstance(file, SymbolicLink):
                about.type, about.linkname = tarfile.SYMTYPE, file.target
                archive.addfile(about)
                continue
            content = file.content if isinstance(file, Executable) else file
            about.size = len(content)
            about.mode = 0o755 if isinstance(file, Executable) else 0o644
            archive.addfile(about, io.BytesIO(content))
    return buffer.getvalue()


def unpacked(archive: bytes) -> Files:
    """Unpack the regular files and symbolic links of an untrusted tar archive, in memory.

    Raises:
        ValueError: the bytes are not an archive, or it has too many bytes, members or long names.
    """
    files: Files = {}
    count = 0
    originals: Files = {}
    left = MOST_BYTES
    try:
        for member in archives.members(io.BytesIO(archive)):
            count += 1
            if count > _MOST_MEMBERS or len(member.name) > _LONGEST_NAME:
                raise ValueError(
                    f"the archive has more than {_MOST_MEMBERS} members, or a name longer than "
                    f"{_LONGEST_NAME} characters"
                )
            path = PurePosixPath(member.name)
            if member.kind not in ("file", "link", "symbolic link") or not path.parts:
                continue
            if path.is_absolute() or ".." in path.parts:
                continue
            # A hard link refers to an earlier file of the archive.
            file = originals.get(member.target) if member.kind == "link" else _read(member)
            if file is None:
                continue
            left -= _size(file)
            if left < 0:
                raise ValueError(f"the archive has more than {MOST_BYTES} bytes")
            originals[member.name] = files[path.as_posix()] = file
    except archives.BadArchive as error:
        raise ValueError(f"the files are not a valid archive: {error}") from error
    return files


def _read(member: archives.ArchiveMember) -> File:
    if member.kind == "symbolic link":
        return SymbolicLink(member.target)
    content = member.content.read()
    return Executable(content) if member.mode & 0o100 else content


def _size(file: File) -> int:
    if isinstance(file, SymbolicLink):
        return len(file.target)
    return len(file.content if isinstance(file, Executable) else file)


def with_own_tests(layout: Layout, *, base: Files, changed: Files, tests: Files) -> Files:
    """Return the agent's code together with the repository's own tests, for one sandbox.

    New modules of the agent that shadow other modules are left out, and packages that contain
    tests stay packages.

    Args:
        layout: the repository's layout.
        base: the files of the base commit.
        changed: the files that the agent left.
        tests: the files of the base commit with the test patch.
    """
    own = {path: file for path, file in tests.items() if layout.is_material(path)}
    above = {str(parent) for path in own if path.endswith(".py") for parent in _parents(path)}
    for folder in above:
        package = str(PurePosixPath(folder, "__init__.py"))
        if package in base and package not in changed and package not in own:
            own[package] = base[package]

    def kept(path: str) -> bool:
        if path in base:
            return True
        name = PurePosixPath(path)
        return not layout.shadows(path) and not (
            name.name == "__init__.py" and str(name.parent) in above
        )

    return _combined(layout, changed, own, kept)


def code_under_test(
    layout: Layout, *, base: Files, changed: Files, inputs: Files | None = None
) -> Files:
    """Return the files for the sandbox of the code under test, which has no hidden tests.

    ``inputs`` are files of the test patch that the code under test may read.
    """
    own = {path: file for path, file in base.items() if path in layout.material}
    return _combined(layout, changed, own | (inputs or {}), lambda path: True)  # noqa: ARG005


def suite(layout: Layout, *, changed: Files, tests: Files) -> Files:
    """Return the files for the sandbox of the tests.

    They are the repository's own, without the code under test. Data files that the reference patch
    changes are the agent's.
    """
    own = {
        path: file
        for path, file in tests.items()
        if (path in layout.material or not path.endswith(CODE)) and path not in layout.product
    }
    for path, file in list(own.items()):  # links to modules of the code under test
        if isinstance(file, SymbolicLink) and path.endswith(CODE):
            target = tests.get(resolved(path, file.target) or "")
            own[path] = target if isinstance(target, (bytes, Executable)) else file
    own |= {f"{package}/__init__.py": b"" for package in layout.packages}
    data: Files = {
        path: file
        for path, file in changed.items()
        if path in layout.product and not isinstance(file, SymbolicLink)
    }
    return _combined(layout, data, own, lambda path: True)  # noqa: ARG005


def _combined(layout: Layout, changed: Files, own: Files, kept: Callable[[str], bool]) -> Files:
    """Return the repository's ``own`` files and the agent's, except the agent's test material.

    Files of the agent whose path conflicts with a folder of the repository's own files, or the
    other way round, are left out.
    """
    conflicting = folders_among({*changed, *own}) | paths_below(changed, own)
    agents = {
        path: file
        for path, file in changed.items()
        if path not in conflicting and not layout.is_material(path) and kept(path)
    }
    return agents | own


def _parents(path: str) -> Iterable[PurePosixPath]:
    return PurePosixPath(path).parents


def folders_among(paths: Collection[str]) -> set[str]:
    """Return the paths that are folders of other paths."""
    # In this order, a folder stands right before what it contains. To list the folders of each
    # path would take memory that is quadratic in the length of the path.
    ordered = sorted(f"{path}/" for path in paths)
    return {
        path.removesuffix("/")
        for path, following in itertools.pairwise(ordered)
        if following.startswith(path)
    }


def paths_below(paths: Iterable[str], places: Collection[str]) -> set[str]:
    """Return the paths below ``places``."""
    found = set()
    place: str | None = None
    for path in sorted(f"{path}/" for path in {*paths, *places}):
        if place is not None and path.startswith(place):
            found.add(path.removesuffix("/"))
        elif path.removesuffix("/") in places:
            place = path
    return found
