"""Grading a repository by its tests: pytest in one sandbox, the code under test in another.

Both are new, so the tests enter after whoever wrote the code has left. What a test imports from the
code under test is a stand-in for the real thing in the other sandbox
(``engine/work/testside.py``): none of the tested code runs in pytest's process, and none of it can
reach the results.

A test can call functions, make and use objects, read attributes, and expect exceptions. It can't
share files or monkeypatch internals, subclass a class of the code under test, or pass it functions:
such a test fails with a TypeError that says so. Comparing objects of the tested code asks that code
(``__eq__``); comparing plain values doesn't. Its arithmetic with a plain value, which may be what
the test expects, must give another object, from which no number is taken. Its context managers
can't suppress exceptions of the test, and ``import *`` replaces none of the test's names.
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
    """Outcomes by test, of those that pytest reported, and what it printed.

    ``passed`` is true if every expected test passed, at least one did, and none failed.
    """

    __test__ = False  # no test, for pytest

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
    """Run ``tests`` against ``repository``, files by their paths, and report each test's outcome.

    ``modules`` are the top-level modules under test; ``packages`` the folders (readable in the
    pool's sandboxes) that have pytest and what the tests need. ``expected`` names tests that must
    be reported, such as ``tests/test_add.py::test_small``; a suite that is cut short doesn't pass.

    Raises:
        ValueError: there are no tests or no modules.
        SandboxError: no sandbox could be made.
    """
    if not tests or not modules:
        raise ValueError("grading a repository needs tests, and the modules that they test")
    pool.check_able("connections", "connection to one another, which this needs; use `grade`")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    limits: dict[str, Any] = {"timeout_s": timeout_s, "memory_bytes": memory_bytes}
    header = {"modules": list(modules), "packages": list(packages)}
    subject = pool.order("subject", {}, files=repository, **limits)
    suite = pool.order("tests", header, files=tests, **limits)
    with ours, theirs:
        async with pool.turn(), pool.session() as tested, pool.session() as testing:
            # Each end is then in one sandbox only: if one ends, the other sees it.
            subject = attrs.evolve(subject, connection=ours.detach())
            suite = attrs.evolve(suite, connection=theirs.detach())
            answering = asyncio.ensure_future(tested.execute_at_once(subject))
            try:
                # Both in the one turn: each waits for the other.
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
    # pytest's exit code is 0 only if it ran to its end, without errors of collection.
    passed = done.ok and not missing and "failed" not in outcomes.values()
    passed = passed and "passed" in outcomes.values()
    log = done.stderr.decode(errors="replace")
    return TestReport(passed=passed, outcomes=outcomes, missing=missing, log=log, result=done)
