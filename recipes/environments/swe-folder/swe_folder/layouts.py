"""Layouts: the part of a repository that is test material, and the modules under test.

The layout depends only on the repository at its base commit, the reference patch and the test
patch. Nothing that an agent wrote has an influence on it. The README describes the rule in words.
"""

import fnmatch
import posixpath
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

import attrs

from swe_folder.configuration import Configuration
from swe_folder.git import Files
from swe_folder.helpers import loose
from swe_folder.imports import imported
from swe_folder.modules import (
    enclosing_packages,
    import_name,
    names_in,
    places_of,
    top_level,
    under_test,
)
from swe_folder.paths import above, folders_of, followed

# Files that configure or alter the run of tests, wherever they are.
_STEERING = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini"),
    *("setup.cfg", "pyproject.toml", ".coveragerc", "noxfile.py"),
    *("sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc", "*.pyo", "*.so", "*.pyd"),
)
# Installed packages (*-info) name the plugins of pytest.
_STEERING_FOLDERS = ("__pycache__", ".git", "*.dist-info", "*.egg-info")
_TEST_FOLDERS = ("test", "tests")
_TOOLS = ("pytest", "_pytest", "pluggy", "py", "iniconfig", "packaging", "primerl")
CODE = (".py", ".so", ".pyd", ".pyc")  # endings of files that can be imported


@attrs.frozen(kw_only=True, eq=False)
class Layout:
    """The layout of an issue's repository.

    Attributes:
        material: the paths of the test material.
        folders: the test folders, all of whose files are test material.
        modules: the modules under test, as ``grade_repository`` takes them.
        paths: the folders from which these modules are imported.
        packages: the packages of the code under test that contain test material.
        product: the files, other than Python code, that the reference patch changes.
        taken: names of modules that the agent may not add where they could be imported.
    """

    material: frozenset[str]
    folders: frozenset[str]
    modules: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    packages: frozenset[str] = frozenset()
    product: frozenset[str] = frozenset()
    taken: frozenset[str] = attrs.field(
        default=frozenset((*sys.stdlib_module_names, *_TOOLS)), repr=False
    )

    def is_material(self, path: str) -> bool:
        """Check whether a file is test material, or would be if it existed."""
        known = path in self.material or path in self._above_material
        return known or steers(path) or any(above(path, self._closed))

    def shadows(self, path: str) -> bool:
        """Check whether a new file could be imported in place of another module."""
        folders = {"", *self.paths, *self._beside_tests}
        deepest = max(folder.count("/") for folder in folders) + 2
        parts = path.split("/", deepest)
        for depth, part in enumerate(parts[:deepest]):
            name = part.partition(".")[0]
            taken = name in self.taken and name not in self.modules
            if taken and "/".join(parts[:depth]) in folders:
                return True
        return False

    @cached_property
    def _closed(self) -> frozenset[str]:
        # A package would be imported in place of the module of the same name.
        modules = {path.removesuffix(".py") for path in self.material if path.endswith(".py")}
        return self.folders | modules

    @cached_property
    def _above_material(self) -> frozenset[str]:
        return frozenset(folder for path in self.material for folder in folders_of(path))

    @cached_property
    def _beside_tests(self) -> frozenset[str]:
        # pytest imports test files from their folders, unless these are packages.
        return frozenset(posixpath.dirname(path) for path in self.material) - self.packages


def steers(path: str) -> bool:
    """Check whether a file, by its name, configures or alters the run of tests."""
    parts = PurePosixPath(path.lower()).parts
    return any(fnmatch.fnmatchcase(parts[-1], pattern) for pattern in _STEERING) or any(
        fnmatch.fnmatchcase(part, pattern) for part in parts for pattern in _STEERING_FOLDERS
    )


def by_names(paths: Iterable[str], expected: Iterable[str], hidden: Iterable[str] = ()) -> Layout:
    """Return the layout of a repository of which only the paths are known.

    Args:
        paths: the paths of the repository's files.
        expected: the files with the expected tests.
        hidden: the files that the test patch changes.
    """
    known = set(paths)
    certain = {*expected, *hidden}
    folders = _test_folders(known | certain, certain, Configuration())
    material = {path for path in known if steers(path) or any(above(path, folders))}
    return Layout(
        material=frozenset(material | certain),
        folders=frozenset(folders),
        modules=tuple(top_level([path for path in known if path.endswith(CODE)], "")),
    )


def layout(
    base: Files,
    *,
    tests: Files,
    solved: Files,
    expected: Collection[str],
    modules: Sequence[str] = (),
    packages: Sequence[str] = (),
) -> Layout:
    """Return the layout of a repository.

    Args:
        base: the files of the base commit.
        tests: the files of the base commit with the test patch.
        solved: the files of the base commit with the reference patch.
        expected: the files with the expected tests.
        modules: the top-level modules under test; if there are none, they are found.
        packages: folders of installed packages, which are not under test.
    """
    configuration = Configuration.of(tests)
    everything = {**solved, **tests}
    hidden = changed(base, tests)
    certain = {followed(path, everything) for path in expected} | set(expected) | hidden
    certain |= {path for path in everything if steers(path)}
    touched = changed(base, solved) - certain
    everything |= {path: solved[path] for path in touched & {*solved}}
    folders = _test_folders(everything, certain, configuration)
    named = {path for path in {*expected, *hidden} if path.endswith(".py")}
    folders |= _given_folders(everything, named, touched, configuration)
    material = certain | {path for path in everything if any(above(path, folders))}
    beside = {
        posixpath.dirname(path) for path in material if path.endswith(".py") and not steers(path)
    }
    material |= loose(everything, material, beside, touched, configuration, modules)
    # Links of the tests to modules.
    material |= {followed(path, everything) for path in material if path.endswith(".py")} - touched
    material &= {*everything, *expected}
    product = [path for path in everything if path not in material and path.endswith(CODE)]
    installed = names_in(packages)
    roots, names = under_test(everything, material, product, configuration, installed)
    enclosing = enclosing_packages(everything, material)
    dotted = set()
    for package in enclosing:
        root, name = import_name(package, everything)
        dotted.add(name)
        roots.append(root)
    return Layout(
        material=frozenset(material),
        folders=frozenset(folders),
        modules=tuple(sorted({*(modules or names), *dotted})),
        paths=tuple(dict.fromkeys(root for root in roots if root not in ("", "."))),
        packages=frozenset(enclosing),
        product=frozenset(path for path in touched - material if not path.endswith(CODE)),
        taken=frozenset((*sys.stdlib_module_names, *_TOOLS)) | installed,
    )


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Return the paths of files that differ."""
    return {path for path in {*before, *after} if before.get(path) != after.get(path)}


# ---- tests ----


def _test_folders(
    paths: Iterable[str], certain: Collection[str], configuration: Configuration
) -> set[str]:
    """Return the folders that are named like test folders and contain test files."""
    return {
        folder
        for path in paths
        if path in certain or configuration.is_test_file(path)
        for folder in folders_of(path)
        if posixpath.basename(folder).lower() in _TEST_FOLDERS
    }


def _given_folders(
    files: Files, named: Collection[str], touched: Collection[str], configuration: Configuration
) -> set[str]:
    """Return further folders of tests: pytest's ``testpaths``, and folders of the named tests.

    They are not packages, no file outside of them imports their modules, and the reference patch
    changes none of their files.
    """
    beside = {posixpath.dirname(path) for path in named}
    beside = {folder for folder in beside if f"{folder}/__init__.py" not in files}
    closed = {
        "",
        ".",
        *configuration.paths,
        *(folder for path in touched for folder in folders_of(path)),
    }
    listed = {folder for folder in configuration.folders if not set(folder) & set("*?[")}
    return {
        folder
        for folder in (listed | beside) - closed
        if any(path.startswith(f"{folder}/") for path in files)
        if not _imported_elsewhere(folder, files)
    }


def _imported_elsewhere(folder: str, files: Files) -> bool:
    """Check whether a file outside the folder imports one of its modules."""
    inside = [path for path in files if path.startswith(f"{folder}/") and path.endswith(".py")]
    places = places_of(inside)
    return any(
        name in places
        for path, file in files.items()
        if path.endswith(".py") and not path.startswith(f"{folder}/")
        for name in imported(path, file)
    )
