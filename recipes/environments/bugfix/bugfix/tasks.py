"""Tasks of the bugfix environment and their scoring."""

import contextlib
import json
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import verifiers.v1 as vf

from bugfix import corpus
from bugfix.grading import Grade, grade_files
from bugfix.mutation import Mutation
from primerl.sandbox import SandboxPool

FILE = Path(__file__).parent / "tasks.jsonl"
MOST_BYTES = 200_000  # per graded module
MOST_HELPERS = 50  # modules that the agent added
_MODULE_PATH = re.compile(r"(?:[A-Za-z_]\w*/)*[A-Za-z_]\w*\.py", re.ASCII)
TIERS = ("easiest", "easy", "medium", "hard")
SYSTEM = (
    "Fix the bug. edit replaces a text that occurs once in a file; bash runs a command. "
    "When it is fixed, say so."
)


class Bug(vf.TaskData):
    """Data of a task: a program with seeded bugs. An agent sees only the prompt and the files."""

    program: str
    tier: str
    mutations: list[tuple[str, int, str, str, str]]


class FixConfig(vf.TaskConfig):
    """Options of a task. ``grading_timeout_s`` limits all hidden tests together."""

    grading_timeout_s: float = 10.0


class Fix(vf.Task[Bug, vf.State, FixConfig]):
    """Task: repair the program, so that its hidden tests pass."""

    @property
    def program(self) -> corpus.Program:
        """The correct program."""
        return corpus.programs()[self.data.program]

    @property
    def seeded(self) -> list[Mutation]:
        """The seeded bugs."""
        return [Mutation(*one) for one in self.data.mutations]

    @property
    def files(self) -> dict[str, str]:
        """The repository as the agent finds it."""
        files = self.program.files
        for mutation in self.seeded:
            files = mutation.applied(files)
        return files

    async def setup(self, runtime: vf.Runtime) -> None:
        """Write the buggy repository into the sandbox.

        Raises:
            RuntimeError: the sandbox can read the correct programs.
        """
        await refuse_readable_programs(runtime)
        for path, text in self.files.items():
            await runtime.write(path, text.encode())

    @vf.reward
    async def fixed(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        """Return 1 if all hidden tests pass, else 0; ``trace.info["bugfix"]`` has the reason."""
        result = await self.graded(runtime)
        trace.record_metric("tests_passed", result.passed / result.total)
        trace.info["bugfix"] = {"passed": result.passed, "of": result.total, "why": result.reason}
        return float(result.fixed)

    async def validate(self, runtime: vf.Runtime) -> bool:
        """Check that the buggy program fails hidden tests and the correct one passes them all."""
        before = await self.graded(runtime)
        for path, text in self.program.files.items():
            await runtime.write(path, text.encode())
        after = await self.graded(runtime)
        return after.fixed and not before.fixed

    async def graded(self, runtime: vf.Runtime) -> Grade:
        """Read the repository's modules, and run the hidden tests on them in another sandbox.

        Raises:
            SandboxError: the sandboxes failed through no fault of the agent.
        """
        pool = getattr(runtime, "pool", None)
        try:
            files = {
                path: (await runtime.read(path, max_bytes=MOST_BYTES)).decode()
                for path in self.program.files
            }
            files |= await helpers(runtime, self.program)
        except (vf.SandboxError, OSError, UnicodeDecodeError) as error:
            # An agent may end its own sandbox or remove the files, and then gets 0. It can't close
            # the pool.
            if pool is not None and not pool.alive:
                raise
            return Grade(0, len(self.program.checks), f"the repository can't be read: {error}")
        timeout_s = self.config.grading_timeout_s
        if pool is not None:
            return await grade_files(pool, self.program, files, timeout_s=timeout_s)
        async with SandboxPool(concurrency=1, warm=0) as own:
            return await grade_files(own, self.program, files, timeout_s=timeout_s)


async def helpers(runtime: vf.Runtime, program: corpus.Program) -> dict[str, str]:
    """Read the modules that the agent added, by path; unreadable files are left out.

    A package named like a module of the program, or a module named like its package, is left out:
    Python could import it instead of the program, which would hide the bug rather than fix it.
    """
    found = await runtime.run(["find", ".", "-name", "*.py", "-type", "f"], {})
    paths = sorted(line.removeprefix("./") for line in found.stdout.splitlines())
    taken = {module(path) for path in program.files}
    added = {}
    for path in paths:
        if len(added) == MOST_HELPERS:
            break
        if not _MODULE_PATH.fullmatch(path) or hides(path, taken):
            continue
        with contextlib.suppress(vf.SandboxError, OSError, UnicodeDecodeError):
            added[path] = (await runtime.read(path, max_bytes=MOST_BYTES)).decode()
    return added


def module(path: str) -> str:
    """Return the path of a module without its ending: that of a package is its folder."""
    return path.removesuffix(".py").removesuffix("/__init__")


def hides(path: str, taken: set[str]) -> bool:
    """Whether a file is, or is below, one of the modules ``taken``.

    Submodules that an agent adds to a package of the program are not: their package is the
    program's own.
    """
    name = module(path)
    parents = [name[:end] for end in range(len(name)) if name[end] == "/"]
    packages = {one.rpartition("/")[0] for one in taken}
    return name in taken or any(one in taken and one not in packages for one in parents)


class Options(vf.TasksetConfig):
    """Options that select tasks.

    ``tier`` "all" gives all tiers, the easiest first. ``split`` selects programs, so no program is
    in both splits. ``program`` is the name of the only program of the tasks; "all" selects all.
    """

    tier: Literal["all", "easiest", "easy", "medium", "hard"] = "all"
    split: Literal["train", "eval", "all"] = "train"
    program: str = "all"
    task: FixConfig = FixConfig()


class Bugfix(vf.Taskset[Fix, Options]):
    """Taskset of programs with seeded bugs."""

    def load(self) -> Iterator[Fix]:
        """Yield the tasks of the tier, the split and the program, by tier; programs alternate.

        Raises:
            ValueError: there is no program of this name.
        """
        only = self.config.program
        if only != "all" and only not in corpus.programs():
            known = ", ".join(sorted(corpus.programs()))
            raise ValueError(f"program is {only!r}; expected all, or one of {known}")
        wanted = TIERS if self.config.tier == "all" else (self.config.tier,)
        made = [self._task(number, row) for number, row in enumerate(rows())]
        for tier in wanted:
            for task in made:
                in_split = self.config.split in ("all", task.program.split)
                chosen = only in ("all", task.data.program)
                if in_split and chosen and task.data.tier == tier:
                    yield task

    def _task(self, number: int, row: dict[str, Any]) -> Fix:
        program = corpus.programs()[row["program"]]
        tier = tier_of(program, row["mutations"])
        data = Bug(
            id=f"{program.name}-{number}",
            system_prompt=SYSTEM,
            prompt="",
            program=program.name,
            tier=tier,
            mutations=row["mutations"],
        )
        task = Fix(data, self.config.task)
        return task.with_data(prompt=statement(task, row))


def rows() -> list[dict[str, Any]]:
    """Return the generated tasks, reordered: the first of each program, then the second, ..."""
    ranked = []
    seen: dict[str, int] = {}
    for line in FILE.read_text().splitlines():
        row = json.loads(line)
        rank = seen.get(row["program"], 0)
        seen[row["program"]] = rank + 1
        ranked.append((rank, row))
    return [row for _, row in sorted(ranked, key=lambda one: one[0])]


def tier_of(program: corpus.Program, mutations: list[Any]) -> str:
    """Return the tier of a task, as the README's table defines it."""
    if program.kind == "function":
        return "easiest"
    if program.kind == "module":
        return "easy"
    return "medium" if len(mutations) == 1 else "hard"


def statement(task: Fix, row: dict[str, Any]) -> str:
    """Return the prompt: the actual and the expected result of one failing test."""
    check = task.program.checks[row["check"]]
    kind, value = check.expected
    right = f"return {value!r}" if kind == "value" else f"raise {value}"
    text = f"{row['seen']}, but should {right}."
    if check.before:
        text = "After\n" + "".join(f"    {line}\n" for line in check.before) + text
    if task.data.tier == "easiest":
        [(path, source)] = task.files.items()
        return f"{text}\n\n{path}:\n{source}"
    if task.data.tier == "easy":
        return f"{text}\n\nThe module is {next(iter(task.files))}."
    more = " There may be more than one bug." if task.data.tier == "hard" else ""
    return f"{text}\n\nThe package is {task.program.module}/.{more}"


_CHECKED: "weakref.WeakSet[Any]" = weakref.WeakSet()


async def refuse_readable_programs(runtime: Any) -> None:
    """Raise if the sandboxes of a pool can read the correct programs.

    Raises:
        RuntimeError: the programs are in a folder that sandboxes may read.
    """
    pool = getattr(runtime, "pool", None)
    if pool is None or pool in _CHECKED:
        return
    found = await runtime.run(["test", "-e", str(corpus.FOLDER)], {})
    if found.exit_code == 0:
        raise RuntimeError(
            f"sandboxes can read {corpus.FOLDER}, which has the solutions; install bugfix into a "
            "virtual environment, which sandboxes can't read, or pass another python to the pool"
        )
    _CHECKED.add(pool)
