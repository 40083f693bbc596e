"""Paths in a repository, as strings with slashes."""

import posixpath
from collections.abc import Collection, Iterator

from primerl.sandbox import SymbolicLink
from swe_folder.git import Files


def folders_of(path: str) -> list[str]:
    """Return the folders of a path, outermost first."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[: depth + 1]) for depth in range(len(parts))]


def resolved(path: str, target: str) -> str | None:
    """Return the path that a link leads to, or None for links out of the repository."""
    if target.startswith("/"):
        return None
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return None if found.startswith("../") or found == ".." else found


def above(path: str, folders: Collection[str]) -> Iterator[str]:
    """Yield those of ``folders`` that contain a path."""
    if not folders:
        return
    deepest = max(folder.count("/") for folder in folders) + 2
    parts = path.split("/", deepest)
    for depth in range(1, len(parts)):
        folder = "/".join(parts[:depth])
        if folder in folders:
            yield folder


def followed(path: str, files: Files) -> str:
    """Return the path of the file that a path leads to, through links of the repository."""
    for _ in range(8):  # links to links
        for place in (*folders_of(path), path):
            file = files.get(place)
            target = resolved(place, file.target) if isinstance(file, SymbolicLink) else None
            if target is not None:
                path = posixpath.normpath(target + path[len(place) :])
                break
        else:
            return path
    return path
