"""Reader for JSON lines files of issues, in the format of this environment or of SWE-bench."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

IMAGE = "swebench/sweb.eval.x86_64.{id}:latest"
TESTBED = "/testbed"  # path of the repository in SWE-bench's images


@attrs.frozen(kw_only=True)
class Issue:
    """One issue: its repository, its statement, its reference patch and its tests.

    ``folder`` is a git repository on this machine. If it is None, the container image ``image`` has
    the repository. ``expected`` names the tests that must pass, ``modules`` the Python modules that
    are tested in isolation.
    """

    id: str
    statement: str
    base_commit: str
    patch: str
    test_patch: str
    expected: tuple[str, ...]
    test_command: tuple[str, ...]
    modules: tuple[str, ...] = ()
    folder: str | None = None
    image: str | None = None
    workdir: str = "."


def read(path: Path, *, image: str = IMAGE) -> Iterator[Issue]:
    """Yield the issues of a file.

    Raises:
        ValueError: a row has neither format; the message begins with ``FILE:LINE``.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{place}: not valid JSON ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{place}: expected a JSON object")
            yield _bench(row, place, image) if "instance_id" in row else _folder(row, place, path)


def _folder(row: Mapping[str, Any], place: str, path: Path) -> Issue:
    needed = ("id", "folder", "base_commit", "problem_statement", "patch")
    _require(row, place, needed)
    folder = (path.parent / str(row["folder"])).resolve()
    if not (folder / ".git").exists():
        raise ValueError(f"{place}: {folder} is not a git repository")
    expected = tuple(row.get("tests", ()))
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
        modules=tuple(row.get("modules", ())),
        folder=str(folder),
    )


def _bench(row: Mapping[str, Any], place: str, image: str) -> Issue:
    needed = ("repo", "base_commit", "patch", "test_patch", "problem_statement", "FAIL_TO_PASS")
    _require(row, place, (*needed, "PASS_TO_PASS"))
    expected = (*_names(row["FAIL_TO_PASS"]), *_names(row["PASS_TO_PASS"]))
    if not expected:
        raise ValueError(f"{place}: FAIL_TO_PASS and PASS_TO_PASS are empty")
    name = str(row["instance_id"])
    # SWE-bench names its images this way, since "__" is not allowed in image names.
    default = image.format(id=name.lower().replace("__", "_1776_"))
    return Issue(
        id=name,
        statement=str(row["problem_statement"]),
        base_commit=str(row["base_commit"]),
        patch=str(row["patch"]),
        test_patch=str(row["test_patch"]),
        expected=expected,
        test_command=_command(row.get("test_command"), expected),
        image=str(row.get("image", default)),
        workdir=TESTBED,
    )


def _require(row: Mapping[str, Any], place: str, needed: Sequence[str]) -> None:
    missing = [name for name in needed if name not in row]
    if missing:
        raise ValueError(f"{place}: {', '.join(missing)} is missing; the row has {', '.join(row)}")


def _names(value: Any) -> tuple[str, ...]:
    """Parse test names: a list, or a string with a JSON list, as in SWE-bench."""
    return tuple(json.loads(value) if isinstance(value, str) else value)


def _command(value: Any, expected: Sequence[str]) -> tuple[str, ...]:
    """Return the test command; by default, pytest on the files of the expected tests."""
    if value:
        return tuple(shlex.split(value) if isinstance(value, str) else value)
    files = dict.fromkeys(name.split("::", 1)[0] for name in expected)
    return ("python3", "-m", "pytest", "-rA", "-p", "no:cacheprovider", *files)
