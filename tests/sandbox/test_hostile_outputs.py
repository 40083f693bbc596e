# ruff: noqa: E501 - programs for sandboxes
"""What comes out of a sandbox is read within bounds, and a bad output is that run's outcome."""

import asyncio
import time

import pytest
from sandboxed import needed, with_pool

from primerl.sandbox import Case, CaseVerdict, Result, grade, untrusted

needed()

LONG = """
def f():
    return {"long": [list(range(3000)), 1.5, (b"x",), {1, 2}]}
"""
EXPECTED = {"long": [[*range(3000)], 1.5, (b"x",), {1, 2}]}


def graded(code, expected, **arguments):
    case = Case(expected=expected)
    [verdict] = with_pool(
        lambda pool: grade(pool, code, [case], function="f", **arguments), concurrency=1
    )
    return verdict


def test_long_value_is_compared_elsewhere():
    verdict = graded(LONG, EXPECTED)
    assert (verdict.passed, verdict.value, verdict.reason) == (True, None, "")
    wrong = graded(LONG, EXPECTED | {"long": []})
    assert (wrong.passed, wrong.reason) == (False, "wrong value")
    assert graded(LONG, object()).reason == "wrong value"


FORGED = """
import atexit, os, sys
def f():
    frame = sys._getframe(1)
    os.write(1, ("\\n" + frame.f_locals["job"]["mark"] + {} + "\\n").encode())
    os._exit(0)
"""


@pytest.mark.parametrize(
    "said",
    [
        """'{"list":[' + ','.join(['{"int":"0x%x"}' % (k * (2**61 - 1)) for k in range(9000)]) + ']}'""",
        """'{"set":[' + ','.join(['{"int":"0x%x"}' % (k * (2**61 - 1)) for k in range(9000)]) + ']}'""",
        """'[' * 100000""",
        """'{"list":' * 100000""",
        """'{"int":"' + '0' * 100000 + '"}x'""",
        """'same' * 5000""",
    ],
)
def test_forged_long_values_fail_their_own_case(said):
    verdict = graded(FORGED.replace("{}", said), 1)
    assert not verdict.passed
    assert verdict.value is None


def test_loop_is_free_while_long_values_arrive():
    """The loop's own share of the work: processor time of its thread, not of a clock."""
    said = """'{"list":[' + ','.join(['{"list":[]}'] * 400000) + ']}'"""

    async def run(pool):
        before = time.thread_time()
        [verdict] = await grade(
            pool, FORGED.replace("{}", said), [Case(expected=1)], function="f", timeout_s=60
        )
        assert not verdict.passed
        return time.thread_time() - before

    # To decode it takes 0.8 s. What is left is to pass 4 MB on.
    assert with_pool(run, concurrency=1) < 0.4


def test_verdict_of_a_huge_number_can_be_shown():
    verdict = graded("def f(): return 1 << 30000", 1)
    assert "too large to show" in repr(verdict)
    result = Result(stdout=b"", stderr=b"", exit=0)
    nested = CaseVerdict(passed=False, value=[10**5000], reason="", result=result)
    assert "list" in repr(nested)


def test_rows_end_with_the_first_bad_one():
    rows = lambda said: asyncio.run(untrusted.rows(said))  # noqa: E731
    assert rows(b'["a","passed"]\n["b","failed"]\n') == [["a", "passed"], ["b", "failed"]]
    assert rows(b'["a"]\n' + b"[" * 5000 + b'\n["b"]\n') == [["a"]]
    assert rows(b'["a"]\n' + b"1" * 5000 + b'\n["b"]\n') == [["a"]]
    assert rows(b'["a"]\n' + b"[" + b" " * 100000 + b']\n["b"]\n') == [["a"]]
    assert rows(b"[]") == []


def test_text_is_decoded_in_parts():
    said = "ä€😀".encode() * 30000 + b"\xff\xf0\x9f"
    assert asyncio.run(untrusted.text(said)) == said.decode(errors="replace")
    assert asyncio.run(untrusted.text(b"")) == ""


def test_snapshot_of_holes_is_refused():
    async def run(pool):
        async with pool.session() as session:
            code = "for k in range(9): open(f'hole{k}', 'wb').truncate(120 << 20)"
            assert (await session.run(code)).ok
            with pytest.raises(OSError, match="holes"):
                await session.snapshot("/sandbox")
            return await session.run(["true"])

    assert with_pool(run, concurrency=1).ok


def test_bad_snapshot_is_an_error_of_its_session():
    async def run(pool):
        async with pool.session() as session:
            await session.write("a", b"x")
            snapshot = await session.snapshot()
            object.__setattr__(snapshot, "archive", b"9" * 80_000)
            with pytest.raises(OSError, match="snapshot"):
                await session.restore(snapshot, timeout_s=10)
        return await pool.run("print(1)")

    assert with_pool(run, concurrency=1).ok
