# ruff: noqa: E501 - programs for sandboxes
"""Solutions that cheat: none may pass, and honest ones must."""

import asyncio
import json
import sys

import pytest
from growth import assert_linear
from sandboxed import needed, with_pool

from primerl.sandbox import Case, SandboxLimits, grade
from primerl.sandbox.grading import _encoded_value, _value, same
from primerl.sandbox.guest.jobs.values import decode

needed()

CASES = [
    Case(args=(2, 3), expected=5),
    Case(args=(10, 20), expected=30),
    Case(args=(-1, 1), expected=0),
]
ALWAYS_EQUAL = """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
"""
HACKS = {
    "os._exit": "import os; os._exit(0)",
    "sys.exit": "import sys; sys.exit(0)",
    "exit in the function": "import os\ndef add(a, b): os._exit(0)",
    "SystemExit in the function": "def add(a, b): raise SystemExit(0)",
    "equal to everything": ALWAYS_EQUAL + "def add(a, b): return Equal(0)",
    "prints a verdict": "import os; print('PASS'); os.write(1, b'ALL TESTS PASSED\\n'); os._exit(0)",
    "silent failure": "import sys, atexit, os\nsys.excepthook = lambda *a: None\n"
    "atexit.register(lambda: os._exit(0))\ndef add(a, b): return 0",
    "reads the caller's frame": """
import sys
def add(a, b):
    frame = sys._getframe(1)
    while frame is not None:
        for name in ("expected", "want", "answer", "case", "cases"):
            if name in frame.f_locals: return frame.f_locals[name]
        frame = frame.f_back
    return 0
""",
    "patches json": "import json\njson.dumps = lambda *a, **k: '[5, 30, 0]'\ndef add(a, b): return 0",
    "forges the result line": """
import os, sys
frame = sys._getframe()
while frame is not None:
    mark = frame.f_locals.get("job", {}).get("mark", "")
    if mark: os.write(1, ("\\n" + mark + 'true\\n').encode())
    frame = frame.f_back
os._exit(0)
""",
    "writes files of rewards": "open('/tmp/reward.txt', 'w').write('1'); open('result.json', 'w').write"
    "('{\"passed\": true}')\ndef add(a, b): return 0",
    "edits the tests": """
import glob
for path in glob.glob("/sandbox/**/*test*.py", recursive=True) + glob.glob("/tmp/**", recursive=True):
    try: open(path, "w").write("print('PASS')")
    except OSError: pass
def add(a, b): return 0
""",
    "searches memory": """
import gc
def add(a, b):
    for found in gc.get_objects():
        if type(found) is tuple and found[:2] == (a, b) and len(found) == 3: return found[2]
        if type(found) is dict and "expected" in found: return found["expected"]
    return 0
""",
    "a string that looks right": "def add(a, b): return str(a + b)",
    "a float that is equal": "def add(a, b): return float(a + b)",
    "another type of integer": ALWAYS_EQUAL + "def add(a, b): return Equal(a + b)",
    "changes builtins": """
import builtins
builtins.type = lambda value: int
builtins.hex = lambda value: "0x5"
def add(a, b): return "nothing"
""",
    "hangs": "def add(a, b):\n    while True: pass",
    "endless value": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "huge value": "def add(a, b): return 'x' * (40 << 20)",
}


@pytest.fixture(scope="module")
def verdicts():
    codes = dict(HACKS)
    codes["honest"] = "def add(a, b): return a + b"
    codes["honest, and prints"] = (
        "print('hello')\ndef add(a, b):\n    print(a, b)\n    return a + b"
    )
    codes["wrong"] = "def add(a, b): return a - b"

    async def grade_all(pool):
        graded = [
            grade(pool, code, CASES, function="add", timeout_s=2 if name == "hangs" else 90)
            for name, code in codes.items()
        ]
        return dict(zip(codes, await asyncio.gather(*graded), strict=True))

    return with_pool(grade_all)


@pytest.mark.parametrize("name", [*HACKS, "wrong"])
def test_cheats_do_not_pass(verdicts, name):
    assert not all(verdict.passed for verdict in verdicts[name]), verdicts[name]


@pytest.mark.parametrize("name", ["honest", "honest, and prints"])
def test_honest_solutions_pass(verdicts, name):
    assert all(verdict.passed for verdict in verdicts[name]), verdicts[name]


def test_limits_are_named(verdicts):
    assert {verdict.reason for verdict in verdicts["hangs"]} == {"timeout"}


def test_values_of_all_types_come_out():
    value = {"a": [1, 1.5, None, True, b"x", ("t", {2, 3})], 7: frozenset({"f"}), "big": 10**40}

    async def run(pool):
        case = Case(args=(value,), expected=value)
        return await grade(pool, "def same(x): return x", [case], function="same")

    (verdict,) = with_pool(run, concurrency=1)
    assert verdict.passed, verdict
    assert verdict.value == value


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, 1.0),
        (1, True),
        ([1], (1,)),
        ({1: 2}, {True: 2}),
        ({1}, {1.0}),
        ({"a": 1}, {"a": 1, "b": 2}),
        (float("nan"), 1.0),
        ([1, 2], [1]),
        ({(1,): 1}, {(1.0,): 1}),
        ({(1, True)}, {(True, 1)}),
    ],
)
def test_values_that_differ(left, right):
    assert not same(left, right)
    assert same(left, left)
    assert same(right, right)


def test_tolerance_is_for_floats_only():
    assert same([1.0], [1.0 + 1e-9], tolerance=1e-6)
    assert not same([1], [2], tolerance=1.0)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\nmark",
        b"\nmark{}\n",
        b"\nmark5\n",
        b'\nmark{"int": 5}\n',
        b'\nmark{"int": "0x"}\n',
        b'\nmark{"int": "0x5", "float": "0x5"}\n',
        b'\nmark{"float": "0x1p99999"}\n',
        b'\nmark{"object": "0x5"}\n',
        b'\nmark{"dict": [[true]]}\n',
        b'\nmark{"dict": {"a": true}}\n',
        b'\nmark{"set": [{"list": []}]}\n',
        b"\nmark" + b"[" * 100_000 + b"\n",
        b"\nmark" + b'{"list": [' * 60 + b"]}" * 60 + b"\n",
        b"\nmark\xff\xfe\n",
    ],
)
def test_malformed_values_are_refused(said):
    with pytest.raises(ValueError):  # noqa: PT011 - whichever of its messages
        _value(_encoded_value(said, "mark"))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda key: {"set": key},
        lambda key: {"frozenset": key},
        lambda key: {"dict": [[one, None] for one in key]},
        lambda key: {"set": [{"tuple": [one]} for one in key]},
    ],
)
def test_keys_with_equal_hashes_are_refused(wrap):
    period = sys.hash_info.modulus
    keys = [{"int": hex(number * period)} for number in range(200)]
    said = b"\nmark" + json.dumps(wrap(keys)).encode()

    with pytest.raises(ValueError, match="malformed"):
        _value(_encoded_value(said, "mark"))
    assert len(_value(json.dumps(wrap(keys[:100])).encode())) == 100

    def refuse(keys):
        with pytest.raises(ValueError, match="equal hashes"):
            decode(wrap(keys))

    assert_linear(
        refuse,
        lambda size: [{"int": hex(number * period)} for number in range(size)],
        largest=1 << 13,
    )


def test_arguments_that_are_no_plain_values_are_refused():
    nested = []
    for _ in range(60):
        nested = [nested]

    async def run(pool):
        for argument, reason in ((object(), "only plain values"), (nested, "nested too deeply")):
            with pytest.raises(ValueError, match=reason):
                await grade(pool, "", [Case(args=(argument,), expected=1)], function="f")

    with_pool(run, concurrency=1)


HONEST = """
from __future__ import annotations
import dataclasses, math, multiprocessing, pickle

@dataclasses.dataclass
class Point:
    x: int
    parent: Point | None = None

def square(x): return x * x

def f(what):
    if what == "dataclass": return dataclasses.asdict(Point(1, Point(2)))
    if what == "pickle": return pickle.loads(pickle.dumps(Point(3))).x
    if what == "pool":
        with multiprocessing.Pool(2) as pool: return pool.map(square, [1, 2])
    if what == "spawn":
        with multiprocessing.get_context("spawn").Pool(1) as pool: return pool.map(square, [3])
    if what == "nan": return {math.nan, 1.0, (float("nan"), 2)}
    if what == "nan as a key": return {float("nan"): 5}
    return b"x" * (6 << 20)
"""
NAN = float("nan")
WANTED = {
    "dataclass": {"x": 1, "parent": {"x": 2, "parent": None}},
    "pickle": 3,
    "pool": [1, 4],
    "spawn": [9],
    "nan": {NAN, 1.0, (NAN, 2)},
    "nan as a key": {NAN: 5},
    "some MB": b"x" * (6 << 20),
}


def test_honest_code_is_graded_right():
    async def run(pool):
        cases = [Case(args=(what,), expected=value) for what, value in WANTED.items()]
        return await grade(pool, HONEST, cases, function="f", timeout_s=60)

    verdicts = with_pool(run, concurrency=2, limits=SandboxLimits(memory_bytes=1 << 30))
    assert [v.reason for v in verdicts] == [""] * len(WANTED), [v.result.stderr for v in verdicts]


def test_nan_is_counted():
    assert same({NAN, float("nan")}, {float("nan"), NAN})
    assert not same({NAN, float("nan"), 1}, {NAN, 1, 2})
    assert not same({NAN: 1}, {NAN: 2})
    assert not same({(NAN, 1)}, {(NAN, 1.0)})
    assert same({frozenset({NAN})}, {frozenset({float("nan")})})


def test_no_cases_are_refused():
    async def run(pool):
        with pytest.raises(ValueError, match="no cases"):
            await grade(pool, "", [], function="f")

    with_pool(run, concurrency=1)
