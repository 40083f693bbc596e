"""A check of issues before a run spends time on them: which of them can be graded, and why not."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from primerl.sandbox import SandboxError, SandboxPool
from swe_folder import grading
from swe_folder.cheats import AGREES, cheats, helper_cheats
from swe_folder.git import Files
from swe_folder.grading import Source
from swe_folder.issues import Issue, lines, parsed
from swe_folder.layouts import changed

_LONGEST_REASON = 12  # lines
_LONGEST_LINE = 300
_OWN_TESTS = (
    "expected tests are in {}, which the reference patch changes, but an agent can't change the "
    "files of expected tests: move the tests (doctests?) to a file of their own"
)
_HELPER = (
    "the tests rely on {}, which an agent may change: if it is a helper of the tests, move it to a "
    "folder tests"
)
_ONE_PROCESS = (
    "the reference patch passes with grading=command: the tests need one process, which is not "
    "safe from cheats (docs/sandbox.md lists what can't work in isolation)"
)


@attrs.frozen(kw_only=True)
class Finding:
    """The result of checking one issue; a field is None if that step was not reached.

    Attributes:
        name: the issue's id, or the place of a row that can't be read.
        line: the issue's line in its file, and ``path`` that file.
        reference: whether the tests pass with the reference patch.
        empty: whether they pass without it.
        cheats: whether they pass for each cheat, by name.
        seconds: how long the grading of the reference patch took.
        reasons: why the issue is bad; none if it is good.
        checked: false for issues whose repository is in an image.
    """

    name: str
    path: Path
    line: str
    reference: bool | None = None
    empty: bool | None = None
    cheats: dict[str, bool] | None = None
    seconds: float | None = None
    reasons: tuple[str, ...] = ()
    checked: bool = True

    @property
    def good(self) -> bool:
        """Whether the issue can be graded, and no cheat passes."""
        return self.checked and not self.reasons


@attrs.frozen(kw_only=True)
class Options:
    """How to grade, as in the environment's ``task`` configuration."""

    grading: Literal["isolated", "command"] = "isolated"
    packages: tuple[str, ...] = ()
    timeout_s: float = 300.0
    memory_bytes: int = 1 << 30
    concurrency: int = 1
    with_cheats: bool = True


def files_with_issues(place: Path) -> list[Path]:
    """Return the files to check: a file of issues, or all ``*.jsonl`` of a folder.

    Raises:
        ValueError: there is no such file.
    """
    if place.is_dir():
        found = sorted(place.glob("*.jsonl"))
        if not found:
            raise ValueError(
                f"{place} has no file of issues (*.jsonl): the README of swe-folder describes one"
            )
        return found
    if not place.is_file():
        raise ValueError(f"{place} does not exist: expected a file of issues, or a folder of them")
    return [place]


async def check(
    files: Sequence[Path], options: Options, *, progress: Callable[[str], None]
) -> AsyncIterator[Finding]:
    """Check all issues of files, and yield what was found in the order of the issues.

    ``progress`` is called with a line at each step.

    Raises:
        ValueError: a file can't be read.
        SandboxUnavailable: this machine can't create sandboxes.
    """
    rows = [(path, place, line) for path in files for place, line in lines(path)]
    gate = asyncio.Semaphore(options.concurrency)
    limits = {"memory_bytes": options.memory_bytes}
    async with _pool(options, **limits) as pool:

        async def one(number: int, path: Path, place: str, line: str) -> Finding:
            async with gate:

                def say(text: str) -> None:
                    progress(f"[{number}/{len(rows)}] {text}")

                return await _checked(pool, options, path, place, line, say)

        tasks = [asyncio.create_task(one(number, *row)) for number, row in enumerate(rows, start=1)]
        try:
            for task in tasks:
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def good_lines(findings: Sequence[Finding], target: Path) -> str:
    """Return the lines of good issues, with their folders relative to the file ``target``."""
    written = []
    for finding in findings:
        if finding.good:
            row = json.loads(finding.line)
            folder = (finding.path.parent / row["folder"]).resolve()
            row["folder"] = os.path.relpath(folder, target.resolve().parent)
            written.append(json.dumps(row) + "\n")
    return "".join(written)


def _pool(options: Options, **limits: Any) -> SandboxPool:
    from primerl.sandbox import SandboxLimits

    return SandboxPool(
        limits=SandboxLimits(**limits),
        concurrency=options.concurrency,
        warm=0,
        readable=options.packages,
    )


async def _checked(
    pool: SandboxPool,
    options: Options,
    path: Path,
    place: str,
    line: str,
    say: Callable[[str], None],
) -> Finding:
    finding = Finding(name=place, path=path, line=line)
    try:
        issue = parsed(line, place, path)
    except ValueError as error:
        return attrs.evolve(finding, reasons=(str(error),))
    finding = attrs.evolve(finding, name=issue.id)
    if issue.folder is None:
        return attrs.evolve(finding, checked=False)
    try:
        return await _graded(pool, options, issue, finding, say)
    except (ValueError, SandboxError) as error:
        return attrs.evolve(finding, reasons=(str(error),))


async def _graded(
    pool: SandboxPool,
    options: Options,
    issue: Issue,
    finding: Finding,
    say: Callable[[str], None],
) -> Finding:
    say(f"{issue.id}: reading the repository")
    source = await asyncio.to_thread(grading.source, issue, options.packages)

    async def passes(
        files: Files, mode: Literal["isolated", "command"] = options.grading
    ) -> tuple[bool, str]:
        return await grading.graded(
            pool,
            issue,
            files,
            grading=mode,
            packages=options.packages,
            timeout_s=options.timeout_s,
        )

    say(f"{issue.id}: the reference patch")
    start = time.monotonic()
    untestable = None
    try:
        reference, why = await passes(source.solved)
    except ValueError as error:
        reference, why, untestable = False, str(error), error
    seconds = time.monotonic() - start
    reasons = []
    if not reference:
        if own := _changed_tests(issue, source):
            reasons.append(_OWN_TESTS.format(own))
        elif options.grading == "isolated" and (await passes(source.solved, "command"))[0]:
            reasons.append(_ONE_PROCESS)
        reasons.append(f"the reference patch does not pass: {_shortened(why)}")
    if untestable is not None:
        return attrs.evolve(finding, reference=False, reasons=tuple(reasons))
    say(f"{issue.id}: without a patch")
    empty, _ = await passes(source.base)
    if empty:
        reasons.append("the expected tests pass without any patch")
    finding = attrs.evolve(
        finding, reference=reference, empty=empty, seconds=seconds, reasons=tuple(reasons)
    )
    if reasons or not options.with_cheats:
        return finding
    found = {}
    for name, files in cheats(issue, source).items():
        if name == AGREES and options.grading == "command":
            continue  # it passes most tests that share a process with the code
        say(f"{issue.id}: an agent that {name}")
        found[name], _ = await passes(files)
        if found[name]:
            reasons.append(f"an agent that {name} passes")
    if options.grading == "isolated":
        for path, files in helper_cheats(source).items():
            say(f"{issue.id}: an agent that replaces {path}")
            passed, _ = await passes(files)
            if passed:
                found[f"replaces {path}"] = True
                reasons.append(_HELPER.format(path))
    return attrs.evolve(finding, cheats=found, reasons=tuple(reasons))


def _shortened(text: str) -> str:
    """Return the beginning and the end of a log."""
    said = [line for line in text.splitlines() if line.strip()]
    if len(said) > _LONGEST_REASON:
        said = [said[0], "…", *said[2 - _LONGEST_REASON :]]
    return "\n    ".join(line[:_LONGEST_LINE] for line in said)


def _changed_tests(issue: Issue, source: Source) -> str:
    """Return the files of expected tests that only the reference patch changes."""
    touched = changed(source.base, source.solved) - changed(source.base, source.tests)
    return ", ".join(path for path in issue.files if path in touched)
