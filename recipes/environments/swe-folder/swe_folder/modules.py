"""Modules of a repository: which can be imported, from where, and which are under test."""

import contextlib
import itertools
import posixpath
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from primerl.sandbox import SymbolicLink
from swe_folder.configuration import Configuration
from swe_folder.git import Files
from swe_folder.imports import imported
from swe_folder.paths import folders_of, resolved

_NEVER_TESTED = ("pytest", "_pytest", "pluggy", "iniconfig", "primerl")


def under_test(
    files: Files,
    material: Collection[str],
    product: Sequence[str],
    configuration: Configuration,
    installed: Collection[str],
) -> tuple[list[str], set[str]]:
    """Return the folders from which modules are imported, and the top-level modules under test."""
    roots = [*configuration.paths, *(["src"] if any(p.startswith("src/") for p in product) else [])]
    found: set[str] = set()
    known = {*files, *itertools.chain.from_iterable(map(folders_of, files))}
    for root in ("", *roots):
        found |= top_level(product, root) - {
            name
            for name in {*installed, *sys.stdlib_module_names}
            if posixpath.join(root, name, "__init__.py") not in known
            and posixpath.join(root, f"{name}.py") not in known
        }
    found |= {
        path
        for path, file in files.items()
        if "/" not in path
        and isinstance(file, SymbolicLink)
        and path not in material
        and any(one.startswith(f"{resolved(path, file.target)}/") for one in product)
    }
    found -= _beside_tests(files, material, product)
    # Modules of other folders, which a conftest.py or a test's own place makes importable.
    local = {
        name
        for folder in {*map(posixpath.dirname, material)}
        for name in top_level([path for path in material if path.endswith(".py")], folder)
    }
    missing = {
        name.partition(".")[0]
        for path, file in files.items()
        if path.endswith(".py")
        for name in imported(path, file)
    } - {*found, *local, *installed, *sys.stdlib_module_names}
    for path in product:
        for folder in folders_of(path):
            name = posixpath.basename(folder)
            _note(name, posixpath.dirname(folder), missing, known, roots, found)
        name = posixpath.basename(path).removesuffix(".py")
        _note(name, posixpath.dirname(path), missing, known, roots, found)
    return roots, found - set(_NEVER_TESTED)


def _beside_tests(files: Files, material: Collection[str], product: Sequence[str]) -> set[str]:
    """Return the modules that pytest imports from the folders of tests, before all others."""
    names: dict[str, set[str]] = {}
    for path in material:
        if path.endswith(".py"):
            module = path.removesuffix("/__init__.py").removesuffix(".py")
            names.setdefault(posixpath.dirname(module), set()).add(posixpath.basename(module))
    return {
        name
        for folder, found in names.items()
        if posixpath.join(folder, "__init__.py") not in files
        for name in found - top_level(product, folder)
    }


def _note(
    name: str,
    root: str,
    missing: Collection[str],
    known: Collection[str],
    roots: list[str],
    found: set[str],
) -> None:
    """Note a module that is imported from ``root``, which is not a package."""
    if name in missing and root and f"{root}/__init__.py" not in known:
        roots.append(root)
        found.add(name)


def top_level(paths: Iterable[str], root: str) -> set[str]:
    """Return the names that can be imported from a folder."""
    before = f"{root}/" if root not in ("", ".") else ""
    inside = (path.removeprefix(before) for path in paths if path.startswith(before))
    names = {path.split("/", 1)[0].partition(".")[0] for path in inside}
    return {name for name in names if name.isidentifier()}


def enclosing_packages(files: Files, material: Collection[str]) -> set[str]:
    """Return the packages of the code under test that contain test material."""
    found = set()
    for path in material:
        if not path.endswith(".py"):
            continue
        for folder in reversed(folders_of(path)):  # from the innermost outwards
            if f"{folder}/__init__.py" not in files:
                break
            if f"{folder}/__init__.py" not in material:
                found.add(folder)
    return found


def import_name(package: str, files: Files) -> tuple[str, str]:
    """Return the folder from which a package is imported, and its name."""
    folders = folders_of(f"{package}/__init__.py")
    root = ([""] + [folder for folder in folders if f"{folder}/__init__.py" not in files])[-1]
    return root, package.removeprefix(f"{root}/").replace("/", ".")


def places_of(paths: Iterable[str]) -> dict[str, list[str]]:
    """Return the modules' paths by each name under which some folder lets them be imported."""
    found: dict[str, list[str]] = {}
    for path in paths:
        parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
        for start in range(len(parts)):
            found.setdefault(".".join(parts[start:]), []).append(path)
    return found


def names_in(packages: Sequence[str]) -> set[str]:
    """Return the names of modules that are installed in folders."""
    found = set()
    for package in packages:
        with contextlib.suppress(OSError):
            for place in Path(package).iterdir():
                if place.suffix in ("", ".py", ".so") and (
                    place.is_file() or (place / "__init__.py").is_file()
                ):
                    found.add(place.name.partition(".")[0])
    return found
