"""Objects of the tested code as a test has them: stand-ins, whose operators go to the other side.

A test must not tell the tested code which value it expects, and then believe the number that comes
back: an object whose ``-`` always gives 0.0 would pass ``abs(f(x) - 1.5) < 1e-9``. So arithmetic
with a plain value must give another object of the tested code, and no number is taken from that
one, nor from what arithmetic makes of it.
"""

import builtins
import json
import socket
from collections.abc import Iterator
from typing import Any

from primerl.sandbox.engine.work.subject import LONGEST_LINE
from primerl.sandbox.engine.work.values import decode, encode

_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor"),
    *("lshift", "rshift", "matmul"),
)
_COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")
_UNARY = ("neg", "pos", "invert", "abs", "round", "float", "int", "bool")
_CALLED = ("len", "str", "repr", "hash", "reversed")


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
        return StandIn(self, content["id"])

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
    """Stands for an object of the other side.

    It is informed if arithmetic made it that a plain value of the test's went into.
    """

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_informed", False)

    def __getattr__(self, name: str) -> Any:
        # numpy would read this process's memory where the tested code says.
        if name.startswith("__array_"):
            raise AttributeError(name)
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

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # The answer would end the test's own failures, too.
        self._operate("exit", None, None, None)

    def _operate(self, name: str, *args: Any) -> Any:
        encoded = [self._link.encode(value) for value in args]
        return self._link.ask(do="operate", of=self._number, name=name, args=encoded)

    def _calculate(self, name: str, *args: Any, informed: bool) -> Any:
        """As ``_operate``; what it makes with a plain value, or of such a thing, is informed."""
        answer = self._operate(name, *args)
        if not informed:
            return answer
        if not isinstance(answer, StandIn):
            raise TypeError(
                "arithmetic of the code under test with a plain value gave a plain value, which "
                "that code could have made to fit the test: compare what it returns with == "
                "instead, or convert it first, as in float(result)"
            )
        object.__setattr__(answer, "_informed", True)
        return answer


def _operator(name: str) -> Any:
    def operate(self: StandIn, *args: Any) -> Any:
        return self._operate(name, *args)

    return operate


def _unary(name: str) -> Any:
    def calculate(self: StandIn, *digits: Any) -> Any:
        return self._calculate(name, *digits, informed=self._informed)

    return calculate


def _binary(name: str) -> Any:
    def calculate(self: StandIn, other: Any) -> Any:
        informed = self._informed or not isinstance(other, StandIn) or other._informed
        return self._calculate(name, other, informed=informed)

    return calculate


def _comparison(name: str) -> Any:
    """With a plain value, the other side is not asked: it could claim to equal anything."""

    def compare(self: StandIn, other: Any) -> Any:
        if isinstance(other, StandIn):
            return self._operate(name, other)
        return {"eq": False, "ne": True}.get(name, NotImplemented)

    return compare


for _name in _COMPARE:
    setattr(StandIn, f"__{_name}__", _comparison(_name))
for _name in _CALLED:
    setattr(StandIn, f"__{_name}__", _operator(_name))
for _name in _UNARY:
    setattr(StandIn, f"__{_name}__", _unary(_name))
for _name in _BINARY:
    setattr(StandIn, f"__{_name.rstrip('_')}__", _binary(_name))
    setattr(StandIn, f"__r{_name.rstrip('_')}__", _binary(f"r_{_name}"))
