"""Remote objects: a test's proxies for objects of the code under test, in the other sandbox.

A test must not reveal its expected value to the code under test and then trust the number that
comes back: an object whose ``-`` always returns 0.0 would pass ``abs(f(x) - 1.5) < 1e-9``.
Therefore arithmetic of a remote object with a plain value must return another remote object.
Neither that object, nor the results of further arithmetic on it, can be converted to numbers.
"""

import builtins
import json
import socket
from collections.abc import Iterator
from typing import Any

from primerl.sandbox.guest.jobs.code_under_test import LONGEST_LINE
from primerl.sandbox.guest.jobs.values import decode, encode

_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor"),
    *("lshift", "rshift", "matmul"),
)
_COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")
_UNARY = ("neg", "pos", "invert", "abs", "round", "float", "int", "bool")
_CALLED = ("len", "str", "repr", "hash", "reversed")


class Broken(Exception):
    """The code under test has ended, or broke the protocol."""


class Link:
    """The connection to the sandbox of the code under test."""

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile("rwb")
        self._classes: dict[int, type[BaseException]] = {}

    def ask(self, **request: Any) -> Any:
        """Send a request and return its result, or raise the exception of the code under test."""
        try:
            self._lines.write(json.dumps(request).encode() + b"\n")
            self._lines.flush()
            line = self._lines.readline(LONGEST_LINE)
            if not line.endswith(b"\n"):
                raise Broken("the code under test has ended, or sent too long a message")
            answer = json.loads(line)
            if "value" in answer:
                return decode(answer["value"], self._find)
            raised = decode(answer["raised"], self._find)(str(answer["text"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Broken(f"the code under test sent a malformed reply: {error}") from None
        if not isinstance(raised, BaseException):
            raise Broken("the code under test sent a malformed reply")
        raise raised

    def encode(self, value: Any) -> Any:
        """Encode an argument of a request.

        Raises:
            TypeError: the value is neither plain nor a remote object.
        """
        return encode(value, _refer)

    def _find(self, kind: str, content: Any) -> Any:
        if kind != "object" or type(content) is not dict or type(content["id"]) is not int:
            raise ValueError("a message holds a malformed reference to an object")
        if "bases" in content:
            return self._exception_class(content)
        if "error" in content:
            return decode(content["error"], self._find)
        return RemoteObject(self, content["id"])

    def _exception_class(self, about: dict[str, Any]) -> type[BaseException]:
        """Return the local class for a remote exception class: built-in, or a new subclass."""
        number = about["id"]
        if number not in self._classes:
            names = [str(name) for name in about["bases"]]
            known = [getattr(builtins, name, None) for name in names]
            base = next(k for k in known if isinstance(k, type) and issubclass(k, BaseException))
            # SystemExit and similar exceptions would end the tests.
            base = base if issubclass(base, Exception) else Exception
            found = base if base.__name__ == names[0] else type(names[0], (base,), {})
            self._classes[number] = found
        return self._classes[number]


def _refer(value: Any) -> Any:
    if isinstance(value, RemoteObject):
        return {"object": object.__getattribute__(value, "_number")}
    raise TypeError(
        f"a {type(value).__name__} can't be passed to the code under test, which is in another "
        "sandbox: pass plain values, or objects that came from that code"
    )


class RemoteObject:
    """A remote object: a proxy for an object of the code under test.

    It is "informed" if it is the result of arithmetic with a plain value of the test, directly or
    through other informed objects.
    """

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_informed", False)

    def __getattr__(self, name: str) -> Any:
        # With these, the code under test could make numpy read any address of this process.
        if name.startswith("__array_"):
            raise AttributeError(name)
        return self._link.ask(do="get", of=self._number, name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask(do="set", of=self._number, name=name, args=[self._link.encode(value)])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object in the sandbox of the code under test."""
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
                yield (
                    iterator._operate("next")
                    if isinstance(iterator, RemoteObject)
                    else next(iterator)
                )
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
        # The result is ignored: a true value would also suppress the test's own failures.
        self._operate("exit", None, None, None)

    def _operate(self, name: str, *args: Any) -> Any:
        encoded = [self._link.encode(value) for value in args]
        return self._link.ask(do="operate", of=self._number, name=name, args=encoded)

    def _calculate(self, name: str, *args: Any, informed: bool) -> Any:
        """Do arithmetic in the other sandbox, and return its result.

        If ``informed``, the result must be a remote object, and becomes informed (see the class).

        Raises:
            TypeError: the operation is informed, but its result is a plain value.
        """
        answer = self._operate(name, *args)
        if not informed:
            return answer
        if not isinstance(answer, RemoteObject):
            raise TypeError(
                "arithmetic of the code under test with a plain value gave a plain value, which "
                "that code could have faked to pass the test: compare its objects with == "
                "instead, or convert them first, as in float(result)"
            )
        object.__setattr__(answer, "_informed", True)
        return answer


def _operator(name: str) -> Any:
    def operate(self: RemoteObject, *args: Any) -> Any:
        return self._operate(name, *args)

    return operate


def _unary(name: str) -> Any:
    def calculate(self: RemoteObject, *digits: Any) -> Any:
        return self._calculate(name, *digits, informed=self._informed)

    return calculate


def _binary(name: str) -> Any:
    def calculate(self: RemoteObject, other: Any) -> Any:
        informed = self._informed or not isinstance(other, RemoteObject) or other._informed
        return self._calculate(name, other, informed=informed)

    return calculate


def _comparison(name: str) -> Any:
    """Return a comparison that calls the code under test for remote objects only.

    For plain values, that code is not asked: it could claim to equal anything.
    """

    def compare(self: RemoteObject, other: Any) -> Any:
        if isinstance(other, RemoteObject):
            return self._operate(name, other)
        return {"eq": False, "ne": True}.get(name, NotImplemented)

    return compare


for _name in _COMPARE:
    setattr(RemoteObject, f"__{_name}__", _comparison(_name))
for _name in _CALLED:
    setattr(RemoteObject, f"__{_name}__", _operator(_name))
for _name in _UNARY:
    setattr(RemoteObject, f"__{_name}__", _unary(_name))
for _name in _BINARY:
    setattr(RemoteObject, f"__{_name.rstrip('_')}__", _binary(_name))
    setattr(RemoteObject, f"__r{_name.rstrip('_')}__", _binary(f"r_{_name}"))
