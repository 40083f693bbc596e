"""Correct programs with hidden tests; the tasks seed bugs into them.

A program is Python code with doctest examples in its docstrings. The examples are the hidden tests.
The repository that an agent sees has only the first line of each docstring with examples.
"""

import ast
import doctest
import functools
import hashlib
import textwrap
from pathlib import Path
from typing import Any, Literal, get_args

import attrs

FOLDER = Path(__file__).parent / "programs"
Kind = Literal["function", "module", "package"]


@attrs.frozen
class Check:
    """One hidden test: run the lines of ``before``, then compare the value of ``code``.

    ``expected`` is ``("value", v)``, or ``("raised", name)`` with the name of an exception.
    """

    before: tuple[str, ...]
    code: str
    expected: tuple[str, Any]


@attrs.frozen(eq=False)
class Program:
    """A correct program: its files by path, and its hidden tests as scripts of doctest examples."""

    name: str
    kind: Kind
    files: dict[str, str]
    scripts: tuple[tuple[doctest.Example, ...], ...]

    @property
    def split(self) -> str:
        """The split of the program's tasks: "train" or "eval"."""
        return "eval" if self.name in held_out() else "train"

    @property
    def module(self) -> str:
        """Name of the module that the tests import."""
        return self.name

    @functools.cached_property
    def checks(self) -> tuple[Check, ...]:
        """All hidden tests, in the order in which ``runnable`` runs them."""
        found = []
        for script in self.scripts:
            stateful = any(not example.want for example in script)
            before: list[str] = []
            for example in script:
                code = example.source.strip()
                if example.want:
                    found.append(Check(tuple(before), code, expected(example.want)))
                if stateful:
                    before.append(code)
        return tuple(found)

    @property
    def runnable(self) -> list[list[tuple[str, bool]]]:
        """The scripts as pairs of a line of code and whether its value is compared."""
        return [
            [(example.source.strip(), bool(example.want)) for example in script]
            for script in self.scripts
        ]


def expected(want: str) -> tuple[str, Any]:
    """Parse the expected result of an example: a value's repr or an exception's name."""
    want = want.strip()
    if want.endswith("Error") and want.isidentifier():
        return ("raised", want)
    return ("value", ast.literal_eval(want))


@functools.cache
def programs() -> dict[str, Program]:
    """Return all programs by name."""
    found = [*_functions(FOLDER / "functions.py")]
    found += [_module(path) for path in sorted((FOLDER / "modules").glob("*.py"))]
    folders = sorted(path for path in (FOLDER / "packages").glob("*") if path.is_dir())
    found += [_package(folder) for folder in folders]
    return {program.name: program for program in found}


@functools.cache
def held_out() -> frozenset[str]:
    """Return the names of the held-out programs: a quarter of each kind, never trained on."""
    chosen: set[str] = set()
    for kind in get_args(Kind):
        names = [program.name for program in programs().values() if program.kind == kind]
        names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
        chosen.update(names[: len(names) // 4])
    return frozenset(chosen)


def _functions(path: Path) -> list[Program]:
    text = path.read_text(encoding="utf-8")
    found = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
            source = "\n".join(lines) + "\n"
            scripts = _scripts(ast.get_docstring(node) or "")
            files = {f"{node.name}.py": _without_examples(source)}
            found.append(Program(node.name, "function", files, scripts))
    return found


def _module(path: Path) -> Program:
    text = path.read_text(encoding="utf-8")
    scripts = _scripts(ast.get_docstring(ast.parse(text)) or "")
    return Program(path.stem, "module", {path.name: _without_examples(text)}, scripts)


def _package(folder: Path) -> Program:
    files = {}
    scripts: tuple[tuple[doctest.Example, ...], ...] = ()
    for path in sorted(folder.glob("*.py")):
        text = path.read_text()
        scripts += _scripts(ast.get_docstring(ast.parse(text)) or "")
        files[f"{folder.name}/{path.name}"] = _without_examples(text)
    return Program(folder.name, "package", files, scripts)


def _scripts(docstring: str) -> tuple[tuple[doctest.Example, ...], ...]:
    """Return the examples of a docstring as scripts; a blank line ends a script."""
    scripts: list[tuple[doctest.Example, ...]] = []
    for block in textwrap.dedent(docstring).split("\n\n"):
        examples = tuple(doctest.DocTestParser().get_examples(block))
        if examples:
            scripts.append(examples)
    return tuple(scripts)


def _without_examples(source: str) -> str:
    """Return the source; docstrings with examples are cut to their first line."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) or not node.body:
            continue
        first = node.body[0]
        if not (isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)):
            continue
        if ">>>" not in str(first.value.value):
            continue
        summary = str(first.value.value).split("\n", 1)[0]
        indent = lines[first.lineno - 1][: first.col_offset]
        cut = [None] * ((first.end_lineno or first.lineno) - first.lineno)
        lines[first.lineno - 1 : first.end_lineno] = [f'{indent}"""{summary}"""', *cut]  # type: ignore[list-item]
    return "\n".join(line for line in lines if line is not None) + "\n"
