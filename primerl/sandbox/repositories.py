"""Grading a repository by its tests: pytest in one sandbox, the code under test in another.

Both sandboxes are new, so the session in which the code was written never sees the tests. A test
imports remote objects: proxies for the real objects of the code under test in the other sandbox
(``guest/jobs/test_runner.py``). The code under test never runs in pytest's process, and can't reach
the results.

A test uses functions, classes and objects of the code under test as if they were in its process.
``docs/sandbox.md`` lists the few things that can't work in two processes. Comparing two remote
objects calls the ``__eq__`` of the code under test; comparing plain values does not. Arithmetic of
a remote object with a plain value, which may be the value that the test expects, must return
another remote object, and that object can't be converted to a number. Context managers of the code
under test can't suppress exceptions of the test, and ``import *`` doesn't replace any name that the
test already has.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from primerl.sandbox import untrusted
from primerl.sandbox.errors import SandboxLost, SandboxNotStarted
from primerl.sandbox.pool import SandboxPool
from primerl.sandbox.results import Result
from primerl.sandbox.tiers.interface import Job, attempted

_LONGEST_OUTPUT = 4000  # of the code under test in the log
OUTCOMES = ("passed", "failed", "skipped")


@attrs.frozen
class Executable:
    """A file that may be executed."""

    content: bytes


@attrs.frozen
class SymbolicLink:
    """A symbolic link to the path ``target``."""

    target: str


@attrs.frozen(kw_only=True)
class TestReport:
    """The outcome of each test that pytest reported, and the reasons (``log``).

    The log has pytest's output, tracebacks in the code under test, and how that code ended.
    ``passed`` is true if every expected test passed, at least one test passed, and none failed.
    ``missing`` are the expected tests that did not pass.
    """

    __test__ = False  # tells pytest not to collect this class

    passed: bool
    outcomes: dict[str, str]
    missing: tuple[str, ...]
    log: str
    result: Result


async def grade_repository(
    pool: SandboxPool,
    repository: Mapping[str, bytes | Executable | SymbolicLink],
    tests: Mapping[str, bytes | Executable | SymbolicLink],
    *,
    modules: Sequence[str],
    paths: Sequence[str] = (),
    packages: Sequence[str] = (),
    run: Sequence[str] | None = None,
    expected: Sequence[str] | None = None,
    timeout_s: float = 60.0,
    memory_bytes: int | None = None,
) -> TestReport:
    """Run ``tests`` against ``repository`` and report the outcome of each test.

    Args:
        pool: the pool that provides the two sandboxes.
        repository: the files of the code under test, by path.
        tests: the test files by path, and all that they need beside the code under test, such as
            ``conftest.py``, helper modules, data and pytest's configuration.
        modules: the modules under test. Their submodules are under test, too, except those with a
            file among ``tests``.
        paths: folders of the repository from which modules are imported, such as ``src``, besides
            the repository itself.
        packages: folders with pytest and the other packages that the tests and the code under test
            import; the pool's sandboxes must be able to read them.
        run: the files that pytest runs; None means all of ``tests``.
        expected: tests that must pass, such as ``tests/test_add.py::test_small``, so that a suite
            that ends early does not pass.
        timeout_s: timeout of the whole suite.
        memory_bytes: memory limit of each sandbox; None means the pool's.

    Raises:
        ValueError: there are no tests or no modules.
        SandboxError: no sandbox could be created.
        SandboxLost: the hosts of all attempts were lost.
    """
    if not tests or not modules:
        raise ValueError("grade_repository needs at least one test file and one module under test")
    pool.check_able(
        "connections",
        "connections between them, which `grade_repository` needs: use `grade` instead",
    )
    limits: dict[str, Any] = {"timeout_s": timeout_s, "memory_bytes": memory_bytes}
    imports = {"paths": list(paths), "packages": list(packages)}
    named = {"modules": list(modules), "run": list(tests if run is None else run)}
    code = _job(pool, "code_under_test", imports, repository, limits)
    suite = _job(pool, "tests", imports | named, tests, limits)
    # Both run under one permit: with one each, the second might never get its own.
    async with pool.turn():
        done, served = await attempted(
            lambda: pool.run_connected(code, suite), errors=(SandboxNotStarted, SandboxLost)
        )
    return await _report(done, served, expected)


def _job(
    pool: SandboxPool,
    kind: str,
    header: dict[str, Any],
    files: Mapping[str, bytes | Executable | SymbolicLink],
    limits: dict[str, Any],
) -> Job:
    links = {path: file.target for path, file in files.items() if isinstance(file, SymbolicLink)}
    executable = [path for path, file in files.items() if isinstance(file, Executable)]
    contents = {
        path: file.content if isinstance(file, Executable) else file
        for path, file in files.items()
        if not isinstance(file, SymbolicLink)
    }
    header = header | {"links": links, "executable": executable}
    return pool.job(kind, header, files=contents, **limits)


async def _report(
    done: Result, served: Result | None, expected: Sequence[str] | None
) -> TestReport:
    outcomes = {
        row[0]: row[1]
        for row in await untrusted.rows(done.stdout)
        if isinstance(row, list)
        and len(row) == 2
        and isinstance(row[0], str)
        and row[1] in OUTCOMES
    }
    missing = tuple(name for name in expected or () if outcomes.get(name) != "passed")
    # pytest exits with 0 only if it ran to its end without collection errors.
    passed = done.ok and not missing and "failed" not in outcomes.values()
    passed = passed and "passed" in outcomes.values()
    log = await untrusted.text(done.stderr)
    if served is not None and (served.stderr or served.limits_hit or served.exit):
        log += (
            f"\nThe code under test ended with exit code {served.exit}, limits hit: "
            f"{', '.join(served.limits_hit) or 'none'}. Its output was:\n"
            f"{served.stderr[-_LONGEST_OUTPUT:].decode(errors='replace')}"
        )
    return TestReport(passed=passed, outcomes=outcomes, missing=missing, log=log, result=done)
