"""Generate the tasks: seed bugs, keep those that hidden tests find, and describe their symptoms.

    python -m bugfix.generation bugfix/tasks.jsonl

The package contains the result, so that loading tasks runs no program. The result is reproducible:
a limit on executed lines, not a timeout, stops buggy programs.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import io
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bugfix.corpus import Program, programs
from bugfix.mutation import Mutation, mutations

MOST_LINES = 20_000  # executed lines per script
MOST_CHARACTERS = 120  # per value in a task's prompt
SEED = 0
PER_PROGRAM = {"function": 4, "module": 9, "package": 12}
PAIRS = 4  # tasks with two bugs, per package


FILE = "program "  # prefix of the programs' file names, which limits tracing to them


class TooLong(BaseException):
    """Raised when a script executes too many lines."""


def outcomes(program: Program, files: dict[str, str]) -> list[tuple[str, Any]]:
    """Run a program's checks: each gives a value, an exception's name or "endless"."""
    results: list[tuple[str, Any]] = []
    for script in program.runnable:
        ended = True
        names: dict[str, Any] = {}
        for code, compared in [("", False), *script]:
            result: tuple[str, Any] = ("endless", None)
            if ended:
                try:
                    with _limited(), contextlib.redirect_stdout(io.StringIO()):
                        if not names:
                            names = load(program, files)
                        result = ("value", run(code, names))
                except TooLong:
                    ended = False
                except Exception as error:  # a buggy program may raise anything
                    result = ("raised", type(error).__name__)
            if compared:
                results.append(result)
    return results


def run(code: str, names: dict[str, Any]) -> Any:
    """Execute a line; return its value if it is an expression."""
    try:
        compiled = compile(code, "check", "eval")
    except SyntaxError:
        exec(compile(code, "check", "exec"), names)
        return None
    return eval(compiled, names)


def load(program: Program, files: dict[str, str]) -> dict[str, Any]:
    """Import a program from ``files`` and return its public names."""
    modules = {path.removesuffix(".py").replace("/", "."): text for path, text in files.items()}
    modules = {name.removesuffix(".__init__"): text for name, text in modules.items()}
    before = {name: sys.modules.pop(name) for name in modules if name in sys.modules}
    finder = _Finder(modules)
    sys.meta_path.insert(0, finder)
    try:
        names: dict[str, Any] = {}
        exec(f"from {program.module} import *", names)
        return names
    finally:
        sys.meta_path.remove(finder)
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)


class _Finder:
    """Meta path finder and loader that imports modules from source strings."""

    def __init__(self, modules: dict[str, str]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """See ``importlib.abc.MetaPathFinder``."""
        del path, target
        if name not in self._modules:
            return None
        nested = any(other.startswith(f"{name}.") for other in self._modules)
        return importlib.util.spec_from_loader(name, self, is_package=nested)

    def create_module(self, spec: Any) -> None:
        """Use the default module creation."""

    def exec_module(self, module: Any) -> None:
        """Execute the module's source."""
        name = module.__name__
        exec(compile(self._modules[name], f"{FILE}{name}", "exec"), module.__dict__)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise ``TooLong`` in a program that executes more than ``MOST_LINES`` lines."""
    left = MOST_LINES

    def trace(frame: Any, event: str, argument: Any) -> Any:  # noqa: ARG001 - required by sys.settrace
        nonlocal left
        if not frame.f_code.co_filename.startswith(FILE):
            return None
        left -= 1
        if left < 0:
            raise TooLong
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)


def failing(program: Program, files: dict[str, str]) -> list[tuple[int, tuple[str, Any]]]:
    """Return the numbers and outcomes of the failing checks."""
    found = outcomes(program, files)
    return [
        (number, result)
        for number, (check, result) in enumerate(zip(program.checks, found, strict=True))
        if repr(result) != repr(check.expected)
    ]


def shown(code: str, result: tuple[str, Any]) -> str | None:
    """Describe the outcome of a line of code; None if the description would be too long."""
    kind, value = result
    text = repr(value)
    if kind == "value" and (len(text) > MOST_CHARACTERS or " object at 0x" in text):
        return None
    if kind == "value":
        return f"`{code}` returns {text}"
    if kind == "raised":
        return f"`{code}` raises {value}"
    return f"`{code}` does not end"


def visible_check(
    program: Program, failed: list[tuple[int, tuple[str, Any]]]
) -> tuple[int, str] | None:
    """Return the check that the prompt shows, with its outcome; None if none can be shown."""
    for ends in (True, False):
        for number, result in failed:
            text = shown(program.checks[number].code, result)
            if text is not None and (result[0] != "endless") == ends:
                return number, text
    return None


def draws(program: Program, label: str) -> random.Random:
    """Return a random generator per program: changing one program keeps the draws of others."""
    digest = hashlib.sha256(f"{SEED} {program.name} {label}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


def tasks_of(program: Program) -> list[dict[str, Any]]:
    """Generate the tasks of one program.

    Raises:
        ValueError: the program fails its own checks.
    """
    if failed := failing(program, program.files):
        raise ValueError(f"{program.name} fails its own checks: {failed}")
    every = [mutation for path, text in program.files.items() for mutation in mutations(path, text)]
    usable = []
    for mutation in every:
        made = _task(program, [mutation])
        # The expert's edit can only replace a line that occurs once in its file.
        if made is not None and _occurs_once(mutation, program.files):
            usable.append((mutation, made))
    tasks = [made for _, made in _spread(usable, PER_PROGRAM[program.kind], draws(program, "one"))]
    if program.kind == "package":
        tasks += _pairs(program, [mutation for mutation, _ in usable])
    return tasks


def _task(program: Program, seeded: list[Mutation]) -> dict[str, Any] | None:
    files = program.files
    for mutation in seeded:
        files = mutation.applied(files)
    failed = failing(program, files)
    # The prompt shows one failing check. At least one other check must fail too, or else a program
    # that hard-codes the shown result would pass.
    if len(failed) < 2:
        return None
    if len(failed) == len(program.checks) and program.kind != "function":
        return None  # the program can't even be imported
    seen = visible_check(program, failed)
    if seen is None:
        return None
    number, text = seen
    return {
        "program": program.name,
        "mutations": [[one.path, one.line, one.kind, one.before, one.after] for one in seeded],
        "check": number,
        "seen": text,
        "failing": len(failed),
    }


def _occurs_once(mutation: Mutation, files: dict[str, str]) -> bool:
    text = mutation.applied(files)[mutation.path]
    return text.count(mutation.after.strip()) == 1


def _spread(
    usable: list[tuple[Mutation, dict[str, Any]]], count: int, chance: random.Random
) -> list[tuple[Mutation, dict[str, Any]]]:
    """Choose ``count`` bugs, on as many different lines as possible."""
    chance.shuffle(usable)
    chosen: list[tuple[Mutation, dict[str, Any]]] = []
    left = list(usable)
    while left and len(chosen) < count:
        lines = set()
        later = []
        for one in left:
            place = (one[0].path, one[0].line)
            if place in lines or len(chosen) == count:
                later.append(one)
            else:
                lines.add(place)
                chosen.append(one)
        left = later
    return sorted(chosen)


def _pairs(program: Program, usable: list[Mutation]) -> list[dict[str, Any]]:
    """Generate tasks with two bugs in different files; each fails a check that the other passes."""
    chance = draws(program, "pairs")
    found = {
        mutation: {number for number, _ in failing(program, mutation.applied(program.files))}
        for mutation in usable
    }
    pairs: list[dict[str, Any]] = []
    candidates = [
        (one, other)
        for one in usable
        for other in usable
        if one.path < other.path and found[one] - found[other] and found[other] - found[one]
    ]
    chance.shuffle(candidates)
    for one, other in candidates:
        made = _task(program, [one, other])
        if made is not None:
            pairs.append(made)
        if len(pairs) == PAIRS:
            break
    return pairs


def main(arguments: list[str] | None = None) -> None:
    """Write the tasks of all programs to a file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", type=Path, help="the JSON lines file to write")
    file = parser.parse_args(arguments).file
    lines = [json.dumps(task) for program in programs().values() for task in tasks_of(program)]
    file.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} tasks")


if __name__ == "__main__":
    main()
