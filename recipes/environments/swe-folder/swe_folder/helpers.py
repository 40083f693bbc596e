"""Test modules outside of test folders: those that are test material, by what imports them.

The README describes the rule in words.
"""

import posixpath
from collections.abc import Collection, Iterable, Mapping

from swe_folder.configuration import Configuration
from swe_folder.git import Files
from swe_folder.imports import imported, is_test_code
from swe_folder.modules import places_of
from swe_folder.paths import folders_of


def loose(
    files: Files,
    material: Collection[str],
    beside: Collection[str],
    touched: Collection[str],
    configuration: Configuration,
    modules: Collection[str],
) -> set[str]:
    """Return the test modules outside of test folders.

    Args:
        files: the repository's files, with both patches.
        material: the test material that is known already.
        beside: the folders with test files.
        touched: the files that the reference patch changes.
        configuration: pytest's configuration.
        modules: the top-level modules that the issue declares to be under test.
    """
    code = {path for path in files if path.endswith(".py")}
    product = {*touched} & code
    packages = {_package(path, files) for path in product} - {None}
    tests = {path for path in code if configuration.is_test_file(path)}
    named_after = _named_after(tests)
    under_test = {
        path
        for path in code
        if _package(path, files) in packages
        or {*modules} & {*path.removesuffix(".py").split("/")}
        or posixpath.basename(path) in named_after
    }

    certain = tests | {
        path
        for path in code
        if posixpath.dirname(path) in beside and is_test_code(path, files[path])
    }
    standing = {path for path in code - under_test if posixpath.dirname(path) in beside}
    candidates = (certain | standing) - {*material} - product
    if not candidates:
        return set()
    uses = Uses(files, code)
    others = code - {*material} - candidates
    used_by_tests = uses.of(code & {*material})
    sources = tuple(f"{path}/" for path in ("src", *configuration.paths) if path not in ("", "."))
    relied_on = uses.reached(
        product
        | (others & (used_by_tests | under_test))
        # Other modules count if they are in a package; the rest are scripts.
        | {path for path in others if _package(path, files) or path.startswith(sources)},
        within=code - {*material},
    )
    candidates -= relied_on
    known = (code & {*material}) | (certain & candidates)
    return uses.reached(known, within=candidates) & candidates


class Uses:
    """The modules that modules execute when they are imported."""

    def __init__(self, files: Files, code: Collection[str]) -> None:
        self._files = files
        self._places = places_of(code)

    def of(self, paths: Iterable[str]) -> set[str]:
        """Return the modules that some modules import, and the packages that contain them."""
        return {
            used
            for path in paths
            for place in [path, *self._imports(path)]
            for used in [place, *self._enclosing(place)]
        }

    def reached(self, paths: Iterable[str], *, within: Collection[str]) -> set[str]:
        """Return modules, and those of ``within`` that they import, directly or not."""
        found: set[str] = set()
        left = {*paths}
        while left:
            found |= left
            left = (self.of(left) & {*within}) - found
        return found

    def _imports(self, path: str) -> set[str]:
        found: set[str] = set()
        for name in imported(path, self._files[path]):
            places = self._places.get(name, ())
            # Of several modules with one name, a script means the one beside it.
            folder = posixpath.dirname(path)
            near = [one for one in places if _folder(one) == folder]
            found |= {*(near if near and not _package(path, self._files) else places)}
        return found

    def _enclosing(self, path: str) -> list[str]:
        names = [f"{folder}/__init__.py" for folder in folders_of(path)]
        return [name for name in names if name in self._files]


def _folder(path: str) -> str:
    return posixpath.dirname(path.removesuffix("/__init__.py"))


def _package(path: str, files: Mapping[str, object]) -> str | None:
    """Return the outermost package that contains a module, or None."""
    found = None
    for folder in reversed(folders_of(path)):
        if f"{folder}/__init__.py" not in files:
            break
        found = folder
    return found


def _named_after(tests: Collection[str]) -> set[str]:
    """Return the names of the files that test files are named after: bank.py for test_bank.py."""
    names = {posixpath.basename(path).removesuffix(".py") for path in tests}
    return {f"{name.removeprefix('test_').removesuffix('_test')}.py" for name in names}
