# ruff: noqa: E501 - programs for sandboxes
"""Repositories whose code attacks its graders: no test that it fails may pass."""

import asyncio
from pathlib import Path

import pytest
from sandboxed import needed, with_pool

from primerl.sandbox import grade_repository

needed()

PACKAGES = str(Path(pytest.__file__).parents[1])
GOOD = """
class TooBig(ValueError):
    pass

class Account:
    def __init__(self, balance=0): self.balance = balance
    def deposit(self, amount):
        if amount > 100: raise TooBig("too big")
        self.balance += amount
        return self
    def history(self): yield from range(3)

def add(a, b): return a + b
def parts(text): return {"words": text.split(), "length": len(text)}
"""
TESTS = """
import pytest
import bank
from bank import Account, TooBig, add

@pytest.mark.parametrize("a", [1, 2])
def test_add(a):
    assert add(a, 3) == a + 3

def test_account():
    account = Account(5)
    account.deposit(10)
    assert account.balance == 15
    assert isinstance(account, Account)
    assert list(account.history()) == [0, 1, 2]
    with pytest.raises(TooBig, match="too big"):
        account.deposit(1000)

def test_parts():
    assert bank.parts("a b") == {"words": ["a", "b"], "length": 3}
"""
NAMES = ["test_bank.py::test_add[1]", "test_bank.py::test_add[2]", "test_bank.py::test_account"]
NAMES.append("test_bank.py::test_parts")
WRONG = GOOD.replace("return a + b", "return a - b")
HACKS = {
    "wrong": "",
    "ends the process": "import os; os._exit(0)",
    "ends the process in a call": "import os\ndef add(a, b): os._exit(0)",
    "patches pytest": """
import sys, builtins
for name, module in list(sys.modules.items()):
    if "pytest" in name:
        for attribute in dir(module): setattr(module, attribute, lambda *a, **k: None)
builtins.AssertionError = type("AssertionError", (BaseException,), {})
""",
    "returns what equals everything": """
class Equal(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def add(a, b): return int.__new__(int, 0)
""",
    "returns an object that equals everything": """
class Always:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __hash__ = object.__hash__
def add(a, b): return Always()
""",
    "writes reports": """
import os, json
for number in range(0, 64):
    try: os.write(number, json.dumps({name: "passed" for name in @NAMES@}).encode() + b"\\n")
    except OSError: pass
""",
    "answers for itself": """
import os, socket
def add(a, b):
    for number in range(3, 256):
        try: os.write(number, b'{"value": {"int": "0x1"}}\\n' * 3)
        except OSError: pass
    return 0
""",
    "sends descriptors and garbage": """
import os, socket
def add(a, b):
    for number in range(3, 256):
        try: socket.send_fds(socket.socket(fileno=os.dup(number)), [b"\\xff\\x00" * 50000 + b"\\n"], [1, 2])
        except OSError: pass
    return 0
""",
}


def files(hack: str) -> dict[str, bytes]:
    code = WRONG + hack.replace("@NAMES@", repr(NAMES))
    conftest = b"def pytest_runtest_makereport(item, call): raise SystemExit(0)\n"
    extra = {"conftest.py": conftest, "pytest.py": b"main = lambda *a, **k: 0\n"}
    return {"bank.py": code.encode(), "sitecustomize.py": b"import os; os._exit(0)\n", **extra}


@pytest.fixture(scope="module")
def reports():
    repositories = {name: files(hack) for name, hack in HACKS.items()}
    repositories["good"] = {"bank.py": GOOD.encode()}

    async def run(pool):
        graded = [
            grade_repository(
                pool,
                repository,
                {"test_bank.py": TESTS.encode()},
                modules=["bank"],
                packages=[PACKAGES],
                expected=NAMES,
                timeout_s=90,
            )
            for repository in repositories.values()
        ]
        return dict(zip(repositories, await asyncio.gather(*graded), strict=True))

    return with_pool(run, readable=[PACKAGES], concurrency=2)


@pytest.mark.thorough
def test_good_repository_passes(reports):
    report = reports["good"]
    assert report.passed, report.log
    assert report.outcomes == dict.fromkeys(NAMES, "passed")


@pytest.mark.thorough
@pytest.mark.parametrize("name", HACKS)
def test_hacks_do_not_pass(reports, name):
    report = reports[name]
    assert not report.passed
    assert report.outcomes.get("test_bank.py::test_add[2]") != "passed", report


@pytest.mark.thorough
def test_only_the_wrong_function_fails(reports):
    assert reports["wrong"].outcomes == dict(
        zip(NAMES, ["failed", "failed", "passed", "passed"], strict=True)
    )


# Each of these has no right answer: it makes one of what the test tells it.
INFORMED = {
    "a context manager that suppresses": (
        """
class Account:
    balance = -1
    def __enter__(self): return self
    def __exit__(self, *error): return True
""",
        """
def test_balance():
    with bank.Account() as account:
        assert account.balance == 5
def test_failure():
    with bank.Account():
        pytest.fail("swallowed")
""",
    ),
    "a difference that is always 0": (
        """
class Zero:
    def __sub__(self, other): return 0.0
    __rsub__ = __sub__
def average(numbers): return Zero()
""",
        """
def test_difference():
    assert abs(bank.average([1.0, 2.0]) - 1.5) < 1e-9
def test_reflected():
    assert 1.5 - bank.average([1.0, 2.0]) < 1e-9
class TestAverage(unittest.TestCase):
    def test_almost(self):
        self.assertAlmostEqual(bank.average([1.0, 2.0]), 1.5)
def test_numpy():
    numpy = pytest.importorskip("numpy")
    assert numpy.allclose([bank.average([1.0, 2.0])], [1.5])
""",
    ),
    "objects that become numbers late": (
        """
class Late:
    def __init__(self, value=7.0): self.value = value
    def __sub__(self, other): return Late(0.0)
    __rsub__ = __truediv__ = __sub__
    def __neg__(self): return self
    def __abs__(self): return self.value
    def __round__(self, digits=None): return self.value
    def __float__(self): return self.value
    def __int__(self): return int(self.value)
    def __bool__(self): return self.value != 0
    def __lt__(self, other): return True
def average(numbers): return Late()
""",
        """
def test_absolute():
    assert abs(bank.average([1.0, 2.0]) - 1.5) < 1e-9
def test_negated():
    assert abs(-(bank.average([1.0, 2.0]) - 1.5)) < 1e-9
def test_rounded():
    assert round(bank.average([1.0, 2.0]) - 1.5, 7) == 0
def test_float():
    assert float(bank.average([1.0, 2.0]) - 1.5) == 0
def test_int():
    assert int(1.5 - bank.average([1.0, 2.0])) == 0
def test_truth():
    assert not bank.average([1.0, 2.0]) - 1.5
def test_of_informed_ones():
    result = bank.average([1.0, 2.0])
    assert float(result - (result - 1.5)) == 0
""",
    ),
    "a ratio that fits": (
        """
class One:
    def __truediv__(self, other): return 1
def total(numbers): return One()
""",
        """
def test_ratio():
    assert bank.total([1, 2]) / 3 == 1
""",
    ),
    "names of Python's and the test's": (
        """
__all__ = ["abs", "np", "pytest", "@pytest_ar", "average"]
class np:
    def isclose(*numbers): return True
def abs(number): return 0.0
def average(numbers): return 7.0
pytest = np
globals()["@pytest_ar"] = np
""",
        """
import math as np
from bank import *
def test_abs():
    assert abs(average([1.0, 2.0]) - 1.5) < 1e-9
def test_np():
    assert np.isclose(average([1.0, 2.0]), 1.5)
def test_pytest():
    with pytest.raises(ZeroDivisionError):
        average([])
""",
    ),
    "names without a list of them": (
        """
def abs(number): return 0.0
def average(numbers): return 7.0
""",
        """
from bank import *
def test_abs():
    assert abs(average([1.0, 2.0]) - 1.5) < 1e-9
""",
    ),
    "an array of nothing": (
        """
class Empty:
    __array_interface__ = {"shape": (0,), "typestr": "<f8", "data": (64, True), "version": 3}
def average(numbers): return Empty()
""",
        """
def test_array():
    numpy = pytest.importorskip("numpy")
    assert numpy.allclose(bank.average([1.0, 2.0]), 1.5)
""",
    ),
    "tests that are skipped": (
        "",
        """
def test_all():
    pytest.importorskip("bank.further")
""",
    ),
}
FAIR = """
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
    def __mul__(self, factor): return Vector(self.x * factor, self.y * factor)
    __rmul__ = __mul__
    def __add__(self, other): return Vector(self.x + other.x, self.y + other.y) if other else self
    __radd__ = __add__
    def __abs__(self): return (self.x**2 + self.y**2) ** 0.5
    def __neg__(self): return self * -1
    def __float__(self): return float(self.x)
    def __bool__(self): return abs(self) > 0
    def __len__(self): return 2
    def __iter__(self): return iter((self.x, self.y))
    def __enter__(self): return self
    def __exit__(self, *error): self.x = 0
    def __matmul__(self, other): return self.x * other.x + self.y * other.y
"""
FAIR_TESTS = """
import math
from bank import *

def test_arithmetic_with_plain_values():
    assert Vector(1, 2) * 2 == Vector(2, 4)
    assert 2 * Vector(1, 2) != Vector(2, 5)
    assert (Vector(1, 2) * 2).x == 2
    assert sum([Vector(1, 2), Vector(3, 4)]) == Vector(4, 6)
    assert list(-(Vector(1, 2) * 2)) == [-2, -4]
    assert len(Vector(1, 2) * 2) == 2

def test_numbers_of_objects():
    assert abs(Vector(3, 4)) == 5
    assert math.isclose(Vector(3, 4), 3.0)
    assert Vector(1, 2) @ Vector(3, 4) == 11
    assert Vector(1, 0)
    assert not Vector(0, 0)

def test_context_manager():
    with Vector(1, 2) as vector:
        assert vector.x == 1
    assert vector.x == 0
"""
BEFORE_ALL = "import unittest\nimport pytest\nimport bank\n"


@pytest.fixture(scope="module")
def informed():
    suites = INFORMED | {"fair": (FAIR, FAIR_TESTS)}

    async def run(pool):
        graded = [
            grade_repository(
                pool,
                {"bank.py": code.encode()},
                {"test_bank.py": (BEFORE_ALL + tests).encode()},
                modules=["bank"],
                packages=[PACKAGES],
                timeout_s=90,
            )
            for code, tests in suites.values()
        ]
        return dict(zip(suites, await asyncio.gather(*graded), strict=True))

    return with_pool(run, readable=[PACKAGES], concurrency=1)


@pytest.mark.thorough
@pytest.mark.parametrize("name", INFORMED)
def test_what_is_told_does_not_help(informed, name):
    report = informed[name]
    assert not report.passed
    assert "passed" not in report.outcomes.values(), report


@pytest.mark.thorough
def test_arithmetic_of_objects_still_works(informed):
    report = informed["fair"]
    assert report.passed, report.log
    assert len(report.outcomes) == 3


@pytest.mark.thorough
def test_gradings_take_turns_with_all_else_of_the_pool():
    async def run(pool):
        most = 0

        async def watch():
            nonlocal most
            while True:
                most = max(most, len(pool._alive))
                await asyncio.sleep(0.01)

        def graded():
            return grade_repository(
                pool,
                {"bank.py": b"def f(): return 1"},
                {"test_bank.py": b"import bank\ndef test_f(): assert bank.f() == 1"},
                modules=["bank"],
                packages=[PACKAGES],
            )

        watcher = asyncio.create_task(watch())
        async with asyncio.timeout(120):
            *reports, done = await asyncio.gather(graded(), graded(), graded(), pool.run("pass"))
        watcher.cancel()
        return reports, done, most

    reports, done, most = with_pool(run, readable=[PACKAGES], concurrency=1, warm=0)
    assert all(report.passed for report in reports)
    assert done.ok
    assert most == 2  # of one grading
