"""Stubs, on the side of the code under test, of functions, classes and objects of the tests.

A function is a Python function, a class is a class, and an object is an instance of such a class.
Each call is carried out on the tests' side.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

from primerl.sandbox.guest.jobs import operators
from primerl.sandbox.guest.jobs.descriptions import References


class Stubs:
    """The stubs by the tests' numbers."""

    def __init__(self, references: References, call_test: Callable[..., Any]) -> None:
        self._references = references
        self._call_test = call_test
        self._made: dict[int, Any] = {}

    def find(self, number: int, about: dict[str, Any] | None) -> Any:
        """Return the stub with a number; ``about`` describes it if it is not known yet."""
        if number not in self._made:
            assert about is not None
            made = self._make(number, about)
            self._made[number] = made  # kept alive, so that its id stays unique
            self._references.stubs[id(made)] = number
        return self._made[number]

    def _make(self, number: int, about: dict[str, Any]) -> Any:
        if about["kind"] == "function":
            return _function(self._call_test, number, about)
        if about["kind"] == "class":
            members = about["members"] | {
                "_primerl_call": staticmethod(self._call_test),
                "_primerl_number": number,
                "__module__": about["module"],
            }
            bases = about["bases"]
            if not any(issubclass(base, TestObject) for base in bases):
                bases = (TestObject, *bases)
            return _created(about["name"], bases, members, {})
        kind = about["class"]
        if kind is None:  # an object such as a StringIO, whose class no test file defines
            members = {name: special_method(SPECIAL[name]) for name in about["special"]}
            members["_primerl_call"] = staticmethod(self._call_test)
            kind = _created(about["name"], (TestObject,), members, {})
        base = next(one for one in kind.__mro__ if one.__module__ == "builtins")
        made = base.__new__(kind)  # of the built-in exception, if it is one
        if isinstance(made, BaseException):
            object.__setattr__(made, "args", about["args"])  # of the stub, not of the test's object
        object.__setattr__(made, "_primerl_number", number)
        return made


def _function(call_test: Callable[..., Any], number: int, about: dict[str, Any]) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call_test(do="call", of=number, args=args, kwargs=kwargs)

    async def forward_async(*args: Any, **kwargs: Any) -> Any:
        coroutine = call_test(do="call", of=number, args=args, kwargs=kwargs)
        return await coroutine

    made: Any = forward_async if about["is_async"] else forward
    made.__name__, made.__qualname__ = about["name"], about["qualname"]
    made.__doc__, made.__module__ = about["doc"], about["module"]
    made.__annotations__ = about["annotations"]
    if about["signature"] is not None:
        made.__signature__ = about["signature"]
    made.__dict__.update(about["attributes"])
    return made


class TestObject:
    """Base of the stubs of the tests' classes, which forwards everything to the tests' side."""

    __test__ = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an instance on the tests' side."""
        call = cls._primerl_call  # type: ignore[attr-defined]
        return call(do="call", of=cls._primerl_number, args=args, kwargs=kwargs)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the tests' side has initialized the object."""

    def __getattr__(self, name: str) -> Any:
        call = type(self)._primerl_call  # type: ignore[attr-defined]
        return call(do="get", of=object.__getattribute__(self, "_primerl_number"), name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        call = type(self)._primerl_call  # type: ignore[attr-defined]
        call(do="set", of=self._primerl_number, name=name, args=[value])

    def __await__(self) -> Any:
        call = type(self)._primerl_call  # type: ignore[attr-defined]
        while True:
            done, value = call(do="step", of=self._primerl_number)
            if done:
                return value
            yield

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        call = type(self)._primerl_call  # type: ignore[attr-defined]
        return call(do="get", of=object.__getattribute__(self, "_primerl_number"), name="__dict__")


class _ClassValue:
    """A value in a class of the tests, which an instance may have replaced."""

    def __init__(self, name: str, value: Any) -> None:
        self._name, self._value = name, value

    def __get__(self, instance: Any, kind: Any) -> Any:
        if instance is None:
            return self._value
        call, number = kind._primerl_call, object.__getattribute__(instance, "_primerl_number")
        return call(do="get", of=number, name=self._name)


def special_method(name: str) -> Any:
    """Return a method of stubs that lets the tests' side apply an operator."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = type(self)._primerl_call
        return call(do="call", of=self._primerl_number, args=args, kwargs=kwargs)

    def operate(self: Any, *args: Any) -> Any:
        call = type(self)._primerl_call
        return call(do="operate", of=self._primerl_number, name=name, args=args)

    return forward if name == "call" else operate


def subclass(name: str, bases: tuple[Any, ...], members: dict[str, Any], keywords: Any) -> Any:
    """Create the real class of a class that a test derived from the code under test."""
    return _created(name, bases, members, keywords)


def _created(name: str, bases: tuple[Any, ...], members: dict[str, Any], keywords: Any) -> Any:
    made = {key: _member(value) for key, value in members.items()}
    return types.new_class(name, bases, keywords, lambda namespace: namespace.update(made))


def _member(value: Any) -> Any:
    """Create a member of a class from its description by the tests' side."""
    if not isinstance(value, tuple) or len(value) != 2 or value[0] != "primerl":
        return value
    kind, *parts = value[1]
    if kind == "value":
        return _ClassValue(*parts)
    if kind == "operator":
        return special_method(parts[0])
    if kind == "property":
        return property(*parts)
    if kind == "cached_property":
        return functools.cached_property(parts[0])
    return {"classmethod": classmethod, "staticmethod": staticmethod}[kind](parts[0])


SPECIAL = {f"__{name}__": name for name in (*operators.ALL, "call")}
