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


def test_good_repository_passes(reports):
    report = reports["good"]
    assert report.passed, report.log
    assert report.outcomes == dict.fromkeys(NAMES, "passed")


@pytest.mark.parametrize("name", HACKS)
def test_hacks_do_not_pass(reports, name):
    report = reports[name]
    assert not report.passed
    assert report.outcomes.get("test_bank.py::test_add[2]") != "passed", report


def test_only_the_wrong_function_fails(reports):
    assert reports["wrong"].outcomes == dict(
        zip(NAMES, ["failed", "failed", "passed", "passed"], strict=True)
    )
