"""Grading a repository by its tests: pytest in one sandbox, the code under test in another.

Both sandboxes are new, so the session in which the code was written never sees the tests. A test
imports remote objects: proxies for the real objects of the code under test in the other sandbox
(``guest/jobs/test_runner.py``). The code under test never runs in pytest's process, and can't reach
the results.

A test can call functions, create and use objects, read attributes, and expect exceptions. It can't
share files with the code under test, monkeypatch its internals, subclass its classes, or pass it
functions: such a test fails with a TypeError that says so. Comparing two remote objects calls the
``__eq__`` of the code under test; comparing plain values does not. Arithmetic of a remote object
with a plain value, which may be the value that the test expects, must return another remote object,
and that object can't be converted to a number. Context managers of the code under test can't
suppress exceptions of the test, and ``import *`` doesn't replace any name that the test already
has.
"""

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from primerl.sandbox.pool import SandboxPool
from primerl.sandbox.results import Result

OUTCOMES = ("passed", "failed", "skipped")


@attrs.frozen(kw_only=True)
class TestReport:
    """The outcome of each test that pytest reported, and pytest's own output (``log``).

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
    repository: Mapping[str, bytes],
    tests: Mapping[str, bytes],
    *,
    modules: Sequence[str],
    packages: Sequence[str] = (),
    expected: Sequence[str] | None = None,
    timeout_s: float = 60.0,
    memory_bytes: int | None = None,
) -> TestReport:
    """Run ``tests`` against ``repository`` and report the outcome of each test.

    Args:
        pool: the pool that provides the two sandboxes.
        repository: the files of the code under test, by path.
        tests: the test files, by path.
        modules: the top-level modules under test.
        packages: folders with pytest and the other packages that the tests import; the pool's
            sandboxes must be able to read them.
        expected: tests that must pass, such as ``tests/test_add.py::test_small``, so that a suite
            that ends early does not pass.
        timeout_s: timeout of the whole suite.
        memory_bytes: memory limit of each sandbox; None means the pool's.

    Raises:
        ValueError: there are no tests or no modules.
        SandboxError: no sandbox could be created.
    """
    if not tests or not modules:
        raise ValueError("grade_repository needs at least one test file and one module under test")
    pool.check_able(
        "connections",
        "connections between them, which `grade_repository` needs: use `grade` instead",
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    limits: dict[str, Any] = {"timeout_s": timeout_s, "memory_bytes": memory_bytes}
    header = {"modules": list(modules), "packages": list(packages)}
    code = pool.job("code_under_test", {}, files=repository, **limits)
    suite = pool.job("tests", header, files=tests, **limits)
    with ours, theirs:
        async with pool.turn(), pool.session() as tested, pool.session() as testing:
            # Detached, so that each end is open in one sandbox only: if that sandbox ends, the
            # other one sees the connection close.
            code = attrs.evolve(code, connection=ours.detach())
            suite = attrs.evolve(suite, connection=theirs.detach())
            answering = asyncio.ensure_future(tested.execute_at_once(code))
            try:
                # Both run under one permit: with one each, the second might never get its own.
                done = await testing.execute_at_once(suite)
            finally:
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
    return _report(done, expected)


def _report(done: Result, expected: Sequence[str] | None) -> TestReport:
    try:
        said = json.loads(done.stdout)
    except (ValueError, RecursionError):
        said = None
    outcomes: dict[str, str] = {}
    if isinstance(said, dict):
        outcomes = {name: outcome for name, outcome in said.items() if outcome in OUTCOMES}
    missing = tuple(name for name in expected or () if outcomes.get(name) != "passed")
    # pytest exits with 0 only if it ran to its end without collection errors.
    passed = done.ok and not missing and "failed" not in outcomes.values()
    passed = passed and "passed" in outcomes.values()
    log = done.stderr.decode(errors="replace")
    return TestReport(passed=passed, outcomes=outcomes, missing=missing, log=log, result=done)
