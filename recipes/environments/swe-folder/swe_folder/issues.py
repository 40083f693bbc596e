"""Reader for JSON lines files of issues, in the format of this environment or of SWE-bench."""

import difflib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from swe_folder.git import is_repository

IMAGE = "swebench/sweb.eval.x86_64.{id}:latest"
TESTBED = "/testbed"  # path of the repository in SWE-bench's images


_KEYS = (
    *("id", "folder", "base_commit", "problem_statement", "patch", "test_patch", "tests"),
    *("test_command", "modules", "inputs"),
)


@attrs.frozen(kw_only=True)
class Issue:
    """One issue: its repository, its statement, its reference patch and its tests.

    ``folder`` is a git repository on this machine. If it is None, ``image``, a container image or
    the path of an archive or folder with its files, has the repository. ``expected`` names the
    tests that must pass, ``modules`` the Python modules that are tested in isolation, and
    ``inputs`` the files of the test patch that these may read.
    """

    id: str
    statement: str
    base_commit: str
    patch: str
    test_patch: str
    expected: tuple[str, ...]
    test_command: tuple[str, ...]
    modules: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    folder: str | None = None
    image: str | None = None
    workdir: str = "."

    @property
    def files(self) -> tuple[str, ...]:
        """The files with the expected tests."""
        return tuple(dict.fromkeys(name.split("::", 1)[0] for name in self.expected))


def read(path: Path, *, image: str = IMAGE) -> Iterator[Issue]:
    """Yield the issues of a file.

    Raises:
        ValueError: a row has neither format; the message begins with ``FILE:LINE``.
    """
    for place, line in lines(path):
        yield parsed(line, place, path, image=image)


def lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file that are not empty, each after its place (``FILE:LINE``).

    Raises:
        ValueError: the file is not UTF-8.
    """
    with path.open(encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", line
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 ({error})") from None


def parsed(line: str, place: str, path: Path, *, image: str = IMAGE) -> Issue:
    """Return the issue of a line of ``path``.

    Raises:
        ValueError: the line has neither format; the message begins with ``place``.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not valid JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place}: expected a JSON object")
    return _bench(row, place, path, image) if "instance_id" in row else _folder(row, place, path)


def _folder(row: Mapping[str, Any], place: str, path: Path) -> Issue:
    needed = ("id", "folder", "base_commit", "problem_statement", "patch")
    _require(row, place, needed)
    folder = (path.parent / str(row["folder"])).resolve()
    if not is_repository(folder):
        raise ValueError(f"{place}: {folder} is not a git repository")
    _require_known(row, place)
    if not str(row["patch"]).strip():
        raise ValueError(f"{place}: 'patch' is empty; expected the reference solution")
    expected = _listed(row, "tests", place)
    files = [name for name in expected if "::" not in name]
    if files and not row.get("test_command"):
        raise ValueError(
            f"{place}: 'tests' has {files[0]!r}; expected the names of tests, as pytest writes "
            "them: FILE::TEST"
        )
    if not expected and not row.get("test_command"):
        raise ValueError(f"{place}: expected 'tests' that must pass, or a 'test_command'")
    return Issue(
        id=str(row["id"]),
        statement=str(row["problem_statement"]),
        base_commit=str(row["base_commit"]),
        patch=str(row["patch"]),
        test_patch=str(row.get("test_patch", "")),
        expected=expected,
        test_command=_command(row.get("test_command"), expected),
        modules=_listed(row, "modules", place),
        inputs=_listed(row, "inputs", place),
        folder=str(folder),
    )


def _bench(row: Mapping[str, Any], place: str, path: Path, image: str) -> Issue:
    needed = ("repo", "base_commit", "patch", "test_patch", "problem_statement", "FAIL_TO_PASS")
    _require(row, place, (*needed, "PASS_TO_PASS"))
    expected = (*_names(row["FAIL_TO_PASS"]), *_names(row["PASS_TO_PASS"]))
    if not expected:
        raise ValueError(f"{place}: FAIL_TO_PASS and PASS_TO_PASS are empty")
    name = str(row["instance_id"])
    # SWE-bench names its images this way, since "__" is not allowed in image names.
    image = str(row.get("image", image.format(id=name.lower().replace("__", "_1776_"))))
    if image.startswith(("./", "../")):  # an archive or a folder beside the issues file
        image = str((path.parent / image).resolve())
    return Issue(
        id=name,
        statement=str(row["problem_statement"]),
        base_commit=str(row["base_commit"]),
        patch=str(row["patch"]),
        test_patch=str(row["test_patch"]),
        expected=expected,
        test_command=_command(row.get("test_command"), expected),
        image=image,
        workdir=TESTBED,
    )


def _require_known(row: Mapping[str, Any], place: str) -> None:
    """Check that no key is a misspelled one; other keys are left to the user."""
    for name in row.keys() - _KEYS:
        meant = difflib.get_close_matches(name, _KEYS, n=1, cutoff=0.8)
        if meant:
            raise ValueError(f"{place}: unknown key {name!r}; did you mean {meant[0]!r}?")


def _require(row: Mapping[str, Any], place: str, needed: Sequence[str]) -> None:
    missing = [name for name in needed if name not in row]
    if missing:
        raise ValueError(f"{place}: {', '.join(missing)} is missing; the row has {', '.join(row)}")


def _listed(row: Mapping[str, Any], name: str, place: str) -> tuple[str, ...]:
    value = row.get(name, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{place}: '{name}' must be a list of strings, not {value!r:.80}")
    return tuple(value)


def _names(value: Any) -> tuple[str, ...]:
    """Parse test names: a list, or a string with a JSON list, as in SWE-bench."""
    return tuple(json.loads(value) if isinstance(value, str) else value)


def _command(value: Any, expected: Sequence[str]) -> tuple[str, ...]:
    """Return the test command; by default, pytest on the files of the expected tests."""
    if value:
        return tuple(shlex.split(value) if isinstance(value, str) else value)
    files = dict.fromkeys(name.split("::", 1)[0] for name in expected)
    return ("python3", "-m", "pytest", "-rA", "-p", "no:cacheprovider", *files)
