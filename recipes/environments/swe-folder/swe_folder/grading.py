"""Grading of the files that an agent left, in sandboxes."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import attrs
import verifiers.v1 as vf

from primerl.sandbox import SandboxPool, grade_repository, verifiers_runtime
from swe_folder import git, layouts, repositories
from swe_folder.git import Files
from swe_folder.issues import Issue
from swe_folder.layouts import Layout
from swe_folder.runtimes import put, reading

# pytest's exit codes for sessions that ran to their end: all tests passed, or some failed.
_COMPLETE = (0, 1)
_OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (.+?)(?: - .*)?$", re.MULTILINE)


@attrs.frozen(kw_only=True, eq=False)
class Source:
    """The repository of an issue: its layout, and its files before and after each patch.

    ``base`` has the files of the base commit, ``tests`` those with the test patch, and ``solved``
    those with the reference patch.
    """

    base: Files
    tests: Files
    solved: Files
    layout: Layout


@lru_cache(maxsize=4)
def source(issue: Issue, packages: tuple[str, ...]) -> Source:
    """Return the source of an issue whose repository is a folder.

    Raises:
        ValueError: the repository can't be read, or one of the issue's patches does not apply.
    """
    assert issue.folder is not None
    base = git.committed(issue.folder, issue.base_commit)
    tests, solved = base, base
    if issue.test_patch.strip():
        try:
            tests = git.committed(issue.folder, issue.base_commit, issue.test_patch)
        except ValueError as error:
            raise ValueError(f"test_patch: {error}") from None
    if issue.patch.strip():
        try:
            solved = git.committed(issue.folder, issue.base_commit, issue.patch)
        except ValueError as error:
            raise ValueError(f"patch: {error}") from None
    layout = layouts.layout(
        base,
        tests=tests,
        solved=solved,
        expected=issue.files,
        modules=issue.modules,
        packages=packages,
    )
    return Source(base=base, tests=tests, solved=solved, layout=layout)


async def graded(
    pool: SandboxPool,
    issue: Issue,
    changed: Files,
    *,
    grading: Literal["isolated", "command"],
    packages: Sequence[str],
    timeout_s: float,
) -> tuple[bool, str]:
    """Run the tests of an issue on the files that an agent left.

    Returns whether the tests pass, and the reason if they do not.

    Raises:
        ValueError: the repository or a patch of the issue can't be read.
        SandboxError: the sandboxes failed through no fault of the agent.
    """
    found = source(issue, tuple(packages))
    if grading == "isolated":
        return await _in_isolation(pool, issue, changed, found, packages, timeout_s)
    return await _by_command(pool, issue, changed, found, packages, timeout_s)


async def _in_isolation(
    pool: SandboxPool,
    issue: Issue,
    changed: Files,
    found: Source,
    packages: Sequence[str],
    timeout_s: float,
) -> tuple[bool, str]:
    layout = found.layout
    if not layout.modules:
        raise ValueError(
            f"{issue.folder} has no modules to test in isolation: name them in `modules`; if the "
            "code under test is no Python module, use grading=command"
        )
    inputs = {path: file for path, file in found.tests.items() if _is_below(path, issue.inputs)}
    report = await grade_repository(
        pool,
        await reading(
            lambda: repositories.code_under_test(
                layout, base=found.base, changed=changed, inputs=inputs
            )
        ),
        await reading(lambda: repositories.suite(layout, changed=changed, tests=found.tests)),
        modules=layout.modules,
        paths=layout.paths,
        packages=packages,
        run=issue.files,
        expected=issue.expected or None,
        timeout_s=timeout_s,
    )
    complete = report.result.exit in _COMPLETE and not report.result.limits_hit
    if report.passed or (issue.expected and not report.missing and complete):
        return True, ""
    why = f"not passed: {', '.join(report.missing)}\n{report.log}"
    if not report.missing and not complete:
        why = f"pytest was cut short\n{report.log}"
    if report.result.limits_hit:
        why = f"the tests were ended by their limit of {report.result.limits_hit[0]}; {why}"
    return False, why


async def _by_command(
    pool: SandboxPool,
    issue: Issue,
    changed: Files,
    found: Source,
    packages: Sequence[str],
    timeout_s: float,
) -> tuple[bool, str]:
    files = await reading(
        lambda: repositories.with_own_tests(
            found.layout, base=found.base, changed=changed, tests=found.tests
        )
    )
    runtime = verifiers_runtime(pool, timeout_s=timeout_s)
    await runtime.start()
    try:
        try:
            await put(runtime, files)
        except RuntimeError as error:  # the agent's fault: the original repository fits
            return False, str(error)
        variables = {"PYTHONPATH": ":".join([".", *found.layout.paths, *packages])}
        try:
            done = await runtime.run(list(issue.test_command), variables)
        except vf.SandboxError as error:
            if not pool.alive:
                raise
            return False, str(error)
    finally:
        await runtime.stop()
    return verdict(done, list(issue.expected))


def verdict(done: vf.ProgramResult, expected: list[str]) -> tuple[bool, str]:
    """Judge a test command by pytest's line for each expected test.

    Without expected tests, the exit code decides. With them, it may be 0 or 1, since other tests
    may fail; a command that ends with another code was cut short.

    Returns whether the tests passed, and the reason if they did not.
    """
    said = f"{done.stdout}\n{done.stderr}"
    if not expected:
        return done.exit_code == 0, "" if done.exit_code == 0 else said
    if done.exit_code not in _COMPLETE:
        return False, f"the test command was cut short: exit code {done.exit_code}\n{said}"
    outcomes: dict[str, set[str]] = {}
    for outcome, name in _OUTCOME.findall(done.stdout):
        outcomes.setdefault(name, set()).add(outcome)
    missing = [
        name
        for name in expected
        if outcomes.get(name) != {"PASSED"} or "ERROR" in outcomes.get(name.split("::", 1)[0], ())
    ]
    return not missing, f"not passed: {', '.join(missing)}\n{said}" if missing else ""


def _is_below(path: str, places: Sequence[str]) -> bool:
    return any(path == place or path.startswith(f"{place.rstrip('/')}/") for place in places)
