"""Honest test suites: a module, its tests, and a bug that the tests find.

Each file of ``tests/sandbox/suites`` has the module, the line ``--- tests`` and the tests. A line
with ``# BUG: new`` is wrong if its statement is replaced by ``new``.
"""

import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "sandbox" / "suites"
NAMES = sorted(path.stem for path in FOLDER.glob("*.txt"))
_BUG = re.compile(r"(?m)^(\s*)(.*?)  # BUG: (.*)$")
_HEAD = re.compile(r"(?:def .*?\)(?: -> \w+)?: |(?:if|for|with|while|elif) [^:]*?: )")


def modules(*, buggy: bool) -> dict[str, bytes]:
    """The modules of all suites, by file name."""
    return {
        f"{name}.py": _BUG.sub(_wrong if buggy else r"\1\2", _parts(name)[0]).encode()
        for name in NAMES
    }


def tests() -> dict[str, bytes]:
    """The tests of all suites, by file name."""
    return {f"test_{name}.py": _parts(name)[1].encode() for name in NAMES}


def failed(outcomes: dict[str, str]) -> set[str]:
    """The names of the suites of which a test failed."""
    names = [name for name, outcome in outcomes.items() if outcome == "failed"]
    return {name.split(".py")[0].removeprefix("test_") for name in names}


def _parts(name: str) -> list[str]:
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8").split("--- tests\n")


def _wrong(line: re.Match[str]) -> str:
    indent, right, wrong = line.groups()
    head = _HEAD.match(right)
    keeps_head = head and not _HEAD.match(wrong)
    return f"{indent}{head[0] if head and keeps_head else ''}{wrong}"
