"""Honest suites are graded in isolation as plain pytest grades them, and hostile ones fail."""

import asyncio
import subprocess
import sys
from pathlib import Path

import honest_suites
import pytest
from hostile_suites import BREAKING, SERVER, SUITES
from sandboxed import needed, with_pool

from primerl.sandbox import SandboxLimits, grade_repository

needed()

PACKAGES = str(Path(pytest.__file__).parents[1])
LIMITS = SandboxLimits(memory_bytes=1 << 30)
BEFORE_ALL = (
    "import fractions\nimport math\nimport unittest\nfrom unittest.mock import Mock\n"
    "import pytest\nimport {} as m\n"
)


def graded(*suites, **options):
    """The report of each suite, a pair of modules and tests by file name, one after another."""

    async def run(pool):
        reports = [
            grade_repository(
                pool,
                dict(modules.items()),
                tests,
                modules=[name.removesuffix(".py") for name in modules],
                packages=[PACKAGES],
                timeout_s=90,
                **options,
            )
            for modules, tests in suites
        ]
        return await asyncio.gather(*reports)

    return with_pool(run, readable=[PACKAGES], concurrency=1, warm=0, limits=LIMITS)


def suite(code, tests):
    return {"m.py": code.encode()}, {"test_m.py": (BEFORE_ALL.format("m") + tests).encode()}


@pytest.fixture(scope="module")
def right():
    [report] = graded((honest_suites.modules(buggy=False), honest_suites.tests()))
    return report


@pytest.fixture(scope="module")
def wrong():
    [report] = graded((honest_suites.modules(buggy=True), honest_suites.tests()))
    return report


def test_there_are_as_many_as_the_documentation_says():
    assert len(honest_suites.NAMES) == 59


@pytest.mark.parametrize("name", honest_suites.NAMES)
def test_honest_suite_passes(right, name):
    outcomes = {
        test: outcome
        for test, outcome in right.outcomes.items()
        if test.startswith(f"test_{name}.py::")
    }
    assert outcomes, right.log
    assert "failed" not in outcomes.values(), right.log


@pytest.mark.thorough
@pytest.mark.parametrize("name", honest_suites.NAMES)
def test_bug_is_found(wrong, name):
    assert name in honest_suites.failed(wrong.outcomes), wrong.log


@pytest.mark.thorough
@pytest.mark.parametrize("buggy", [False, True])
def test_plain_pytest_gives_the_same(tmp_path, buggy):
    files = honest_suites.modules(buggy=buggy) | honest_suites.tests()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", "-n0"]
    done = subprocess.run(
        [*command, "--import-mode=importlib", "--rootdir=.", "--tb=no"],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    outcomes = {line[1]: "failed" for line in lines if line[:1] == ["FAILED"]}
    assert done.returncode == int(buggy), done.stdout
    assert honest_suites.failed(outcomes) == set(honest_suites.NAMES if buggy else ())


@pytest.mark.thorough
def test_log_has_the_reason():
    code = "def f(x):\n    return inner(x)\ndef inner(x):\n    raise KeyError('from inside')\n"
    tests = """
import sys
def test_raises():
    assert m.f(1) == 1
def test_unsendable():
    m.f(sys._getframe())
"""
    ended = suite("import os\ndef f(): os.write(2, b'last words'); os._exit(3)\n", CALL)
    missing = suite("import no_such_module\n", CALL)
    stops = suite("raise SystemExit('at import')\n", CALL)
    reports = graded(suite(code, tests), ended, missing, stops)
    assert not any(report.passed for report in reports)
    raised, ended, missing, stops = [report.log for report in reports]
    assert "KeyError: 'from inside'" in raised
    assert "line 4, in inner" in raised  # the traceback in the code under test
    assert "a frame can't be passed to the code under test" in raised
    assert "exit code 3" in ended
    assert "last words" in ended
    assert "No module named 'no_such_module'" in missing
    assert "SystemExit: at import" in stops


@pytest.mark.thorough
def test_longest_reply():
    [report] = graded(suite("def f(): return 'x' * (70 << 20)\n", CALL))
    assert not report.passed
    assert "more than 64 MiB" in report.log


CALL = "def test_f():\n    assert m.f() == 1\n"


@pytest.fixture(scope="module")
def cheated():
    modules = {f"{name}.py": code.encode() for name, (code, _) in SUITES.items()}
    tests = {
        f"test_{name}.py": (BEFORE_ALL.format(name) + text).encode()
        for name, (_, text) in SUITES.items()
    }
    [report] = graded((modules, tests))
    return report


@pytest.mark.parametrize("name", SUITES)
def test_cheat_does_not_pass(cheated, name):
    outcomes = {
        test: outcome
        for test, outcome in cheated.outcomes.items()
        if test.startswith(f"test_{name}.py::")
    }
    assert outcomes, cheated.log
    assert set(outcomes.values()) == {"failed"}, cheated.log


@pytest.mark.thorough
def test_broken_protocol_fails():
    reports = graded(*(suite(SERVER + code, CALL) for code in BREAKING.values()))
    for name, report in zip(BREAKING, reports, strict=True):
        assert not report.passed, (name, report)
        assert report.outcomes.get("test_m.py::test_f") != "passed", (name, report)
        assert report.outcomes.get("test_m.py::test_f") != "skipped", (name, report)
