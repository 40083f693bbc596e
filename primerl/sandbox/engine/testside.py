"""The testing side of a test suite: pytest, with the code under test in another sandbox.

``import`` of a listed module gives a stand-in, whose attributes, calls and operators are carried
out by ``subject.py`` at the other end of a socket. So nothing of the tested code ever runs in this
process, and it has no way to the results that this one reports. Plain values are compared here.
"""

import builtins
import importlib.abc
import importlib.machinery
import json
import os
import socket
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from primerl.sandbox.engine.subject import LONGEST_LINE, decode, encode

_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor"),
    *("lshift", "rshift", "matmul"),
)
_COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")
_UNARY = ("neg", "pos", "invert")
_CALLED = ("len", "str", "repr", "hash", "bool", "float", "int", "abs", "reversed", "round")


class Broken(Exception):
    """The other side has gone, or does not speak the protocol."""


class Link:
    """The connection to the code under test."""

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile("rwb")
        self._classes: dict[int, type[BaseException]] = {}

    def ask(self, **request: Any) -> Any:
        """Have a request carried out; raises what the code under test raises."""
        try:
            self._lines.write(json.dumps(request).encode() + b"\n")
            self._lines.flush()
            line = self._lines.readline(LONGEST_LINE)
            if not line.endswith(b"\n"):
                raise Broken("the code under test has ended, or said too much at once")
            answer = json.loads(line)
            if "value" in answer:
                return decode(answer["value"], self._find)
            raised = decode(answer["raised"], self._find)(str(answer["text"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Broken(f"the code under test does not answer properly: {error}") from None
        if not isinstance(raised, BaseException):
            raise Broken("the code under test does not answer properly")
        raise raised

    def encode(self, value: Any) -> Any:
        """An argument for the other side.

        Raises:
            TypeError: it is neither a plain value nor came from there.
        """
        return encode(value, _refer)

    def _find(self, kind: str, content: Any) -> Any:
        if kind != "object" or type(content) is not dict or type(content["id"]) is not int:
            raise ValueError("a malformed reference")
        if "bases" in content:
            return self._exception_class(content)
        if "error" in content:
            return decode(content["error"], self._find)
        return StandIn(self, content["id"], str(content["type"]))

    def _exception_class(self, about: dict[str, Any]) -> type[BaseException]:
        """A class of this side's for one of the other's: a built-in one, or one derived from it."""
        number = about["id"]
        if number not in self._classes:
            names = [str(name) for name in about["bases"]]
            known = [getattr(builtins, name, None) for name in names]
            base = next(k for k in known if isinstance(k, type) and issubclass(k, BaseException))
            # SystemExit and its like would end the tests.
            base = base if issubclass(base, Exception) else Exception
            found = base if base.__name__ == names[0] else type(names[0], (base,), {})
            self._classes[number] = found
        return self._classes[number]


def _refer(value: Any) -> Any:
    if isinstance(value, StandIn):
        return {"object": object.__getattribute__(value, "_number")}
    raise TypeError(
        f"a {type(value).__name__} can't be passed to code under test, which is in another "
        "sandbox: only plain values, and what came from there"
    )


class StandIn:
    """Stands for an object of the other side."""

    def __init__(self, link: Link, number: int, kind: str) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_kind", kind)

    def __getattr__(self, name: str) -> Any:
        return self._link.ask(do="get", of=self._number, name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask(do="set", of=self._number, name=name, args=[self._link.encode(value)])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Have it called on the other side."""
        encoded = [self._link.encode(value) for value in args]
        names = {name: self._link.encode(value) for name, value in kwargs.items()}
        return self._link.ask(do="call", of=self._number, args=encoded, kwargs=names)

    def __instancecheck__(self, other: Any) -> bool:
        encoded = [self._link.encode(other)]
        return self._link.ask(do="isinstance", of=self._number, args=encoded) is True

    def __iter__(self) -> Iterator[Any]:
        iterator = self._operate("iter")
        while True:
            try:
                yield iterator._operate("next") if isinstance(iterator, StandIn) else next(iterator)
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._operate("next")

    def __getitem__(self, key: Any) -> Any:
        return self._operate("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._operate("setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        self._operate("delitem", key)

    def __contains__(self, value: Any) -> bool:
        return self._operate("contains", value) is True

    def __enter__(self) -> Any:
        return self._operate("enter")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return bool(self._operate("exit", None, None, None))

    def _operate(self, name: str, *args: Any) -> Any:
        encoded = [self._link.encode(value) for value in args]
        return self._link.ask(do="operate", of=self._number, name=name, args=encoded)


def _operator(name: str) -> Any:
    def operate(self: StandIn, *others: Any) -> Any:
        return self._operate(name, *others)

    return operate


def _comparison(name: str) -> Any:
    """With a plain value, the other side is not asked: it could claim to equal anything."""

    def compare(self: StandIn, other: Any) -> Any:
        if isinstance(other, StandIn):
            return self._operate(name, other)
        return {"eq": False, "ne": True}.get(name, NotImplemented)

    return compare


for _name in _COMPARE:
    setattr(StandIn, f"__{_name}__", _comparison(_name))
for _name in (*_BINARY, *_UNARY, *_CALLED):
    setattr(StandIn, f"__{_name.rstrip('_')}__", _operator(_name))
for _name in _BINARY:
    setattr(StandIn, f"__r{_name.rstrip('_')}__", _operator(f"r_{_name}"))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports listed modules, and those below them, from the other side."""

    def __init__(self, link: Link, modules: Sequence[str]) -> None:
        self._link = link
        self._modules = tuple(modules)

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        del path, target  # a top-level module decides for all below it
        if name.partition(".")[0] in self._modules:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Ask the other side to import it."""
        module = _Module(spec.name)
        module.__dict__["_stand_in"] = self._link.ask(do="import", name=spec.name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: the module was executed on the other side."""


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__all__", "__version__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_stand_in"], name)


class Reporter:
    """A plugin of pytest's that reports one line per test."""

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note the outcome of a phase of a test: the worst counts."""
        before = self._outcomes.get(report.nodeid, "passed")
        if report.outcome != "passed" and before in ("passed", "skipped"):
            self._outcomes[report.nodeid] = report.outcome
        elif report.when == "call":
            self._outcomes[report.nodeid] = before

    def pytest_sessionfinish(self) -> None:
        """Report all outcomes at once."""
        data = json.dumps(self._outcomes).encode()
        with open(self._channel, "wb", closefd=False) as file:
            file.write(data)


def main(modules: list[str], packages: list[str], files: list[str]) -> int:
    """Run pytest over ``files``; outcomes go to stdout, what pytest prints to stderr."""
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    channel = os.dup(1)
    os.dup2(2, 1)
    sys.meta_path.insert(0, _Finder(Link(connection), modules))
    sys.path.extend(packages)
    import pytest

    options = ["-p", "no:cacheprovider", "-q", "--import-mode=importlib", "-o", "addopts="]
    return int(pytest.main([*options, *files], plugins=[Reporter(channel)]))
