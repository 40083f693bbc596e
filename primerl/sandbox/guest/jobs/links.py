"""The tests' end of the connection to the code under test."""

import builtins
import collections.abc
import importlib.machinery
import io
import json
import os
import pickle
import socket
import sys
import threading
import types
import weakref
from typing import Any

from primerl.sandbox.guest.jobs import remote_objects, surroundings
from primerl.sandbox.guest.jobs.code_under_test import HEADER
from primerl.sandbox.guest.jobs.descriptions import native_attributes
from primerl.sandbox.guest.jobs.given_objects import (
    Copied,
    GivenObjects,
    RequestPickler,
    members_of,
)
from primerl.sandbox.guest.jobs.remote_objects import (
    CONTENTS,
    RemoteClass,
    RemoteObject,
    RemoteReference,
    reference_of,
)
from primerl.sandbox.guest.jobs.shared_containers import SharedContainers
from primerl.sandbox.guest.jobs.typed_values import decode, known_exception

_FUNCTIONS = ("function", "method", "builtin_function_or_method", "_lru_cache_wrapper")
LONGEST_LINE = 64 << 20  # of one reply; docs/sandbox.md names this cap
_MALFORMED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, IndexError)


class BrokenLinkError(Exception):
    """The code under test has ended, or broke the protocol."""


class Link:
    """The connection to the sandbox of the code under test, and the proxies for its objects."""

    def __init__(self, connection: socket.socket, *, folder: str) -> None:
        self._stream = connection.makefile("rwb")
        self._given = GivenObjects(folder)
        self._containers = SharedContainers(sign=-1)
        self._classes: dict[int, RemoteClass] = {}
        self._objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._lasting: dict[int, Any] = {}
        self._released: list[int] = []
        self._turn = threading.RLock()
        self._surroundings = surroundings.OfTests()
        self.traceback = ""  # of the last exception of the code under test, for the log
        remote_objects.connect(self)

    def ask(self, **request: Any) -> Any:
        """Send a request and return its result, or raise the exception of the code under test.

        Raises:
            BrokenLinkError: the code under test has ended, or sent a malformed reply.
            TypeError: the request holds something that can't be sent.
        """
        with self._turn:
            self._send(request)
            while True:
                answer = self._receive()
                if "call" not in answer:
                    break
                done = self._serve(answer["call"])
                try:
                    self._send(done)
                except TypeError as error:  # the result can't be sent
                    self._send({"do": "answer", "value": None, "raised": error})
            try:
                if "value" in answer:
                    value = self._decode(answer["value"])
                    self._surroundings.warn()
                    return value
                raised = self._decode(answer["raised"])
                if not isinstance(raised, BaseException):
                    raise BrokenLinkError("the code under test sent a malformed reply")
                if not isinstance(raised, StopIteration):
                    self.traceback = str(answer["traceback"])
                if request["do"] == "import" and not isinstance(raised, Exception):
                    # At this point, pytest would end if one of these were raised.
                    raised = ImportError(f"importing it raised {type(raised).__name__}: {raised}")
            except _MALFORMED as error:
                raise _malformed(error) from None
        raise raised

    def released(self, number: int) -> None:
        """Tell the code under test, with the next request, that a proxy no longer exists."""
        self._released.append(number)

    def subclass(self, made: RemoteClass, keywords: dict[str, Any]) -> None:
        """Create the class that stands for a test's subclass of classes of the code under test."""
        members = Copied()
        for kind in reversed(made.__mro__):
            if kind is made or (not isinstance(kind, RemoteClass) and self._given.is_own(kind)):
                members |= members_of(kind, stub=False)
        members |= {"__module__": made.__module__, "__qualname__": made.__qualname__}
        bases = tuple(base for base in made.__bases__ if reference_of(base) is not None)
        for base in bases:
            for kind in base.__mro__:
                if isinstance(kind, RemoteClass) and kind is not RemoteObject:
                    remote_objects.inherit(kind)
        number, _ = self.ask(
            do="subclass", name=made.__name__, args=(bases, members), kwargs=keywords
        )
        type.__setattr__(made, "_remote_class", RemoteReference(self, number))
        self._classes[number] = made
        for name, value in list(remote_objects.own_members(made).items()):
            if (
                not hasattr(value, "__get__")
                and not name.startswith("__")
                and name != "_remote_class"
            ):
                type.__delattr__(made, name)  # an instance may have an attribute of this name

    def _send(self, request: dict[str, Any]) -> None:
        forget, self._released = self._released, []
        forget = [number for number in forget if number not in self._objects]
        if "kwargs" in request:
            request["kwargs"] = Copied(request["kwargs"])
        self._given.begin()
        data = self._dumped(Copied(request))
        shared = [
            (number, kind, self._dumped(content))
            for number, kind, content in self._containers.changes()
        ]
        message = {
            "request": data,
            "shared": shared,
            "forget": forget,
            "unused": self._containers.forget_unused(),  # only now that their changes are sent
            "surroundings": self._surroundings.news(),
        }
        encoded = pickle.dumps(message)
        try:
            self._stream.write(HEADER.pack(len(encoded)) + encoded)
            self._stream.flush()
        except OSError as error:
            raise _malformed(error) from None
        self._given.sent()

    def _dumped(self, value: Any) -> bytes:
        file = io.BytesIO()
        pickler = RequestPickler(file, self._given, self._containers, _number_of)
        try:
            pickler.dump(value)
        except TypeError:
            raise
        except Exception as error:
            raise TypeError(f"a value can't be sent to the code under test: {error}") from error
        return file.getvalue()

    def _receive(self) -> dict[str, Any]:
        try:
            line = self._stream.readline(LONGEST_LINE)
            if not line.endswith(b"\n"):
                raise BrokenLinkError(
                    "the code under test has ended: its output is at the end of the log"
                    if len(line) < LONGEST_LINE
                    else f"the code under test sent a reply of more than {LONGEST_LINE >> 20} MiB"
                )
            message = json.loads(line)
            for described in message["classes"]:
                self._describe(*described)
            for number, kind, _ in message["shared"]:
                if not self._containers.holds(number):
                    self._containers.create(number, kind)
            for number, _, content in message["shared"]:
                self._containers.replace(number, [self._decode(item) for item in content])
            self._surroundings.update(message, self._decode)
        except _MALFORMED as error:
            raise _malformed(error) from None
        return message  # type: ignore[no-any-return]

    def _serve(self, call: Any) -> dict[str, Any]:
        """Do what the code under test asks of an object of the tests."""
        try:
            args = [self._decode(item) for item in call["args"]]
            kwargs = {str(key): self._decode(item) for key, item in call["kwargs"].items()}
            do, of, name = str(call["do"]), call["of"], call.get("name", "")
            if do == "input":
                value = self._surroundings.read_input(str(name), args)
            else:
                value = self._given.carry_out(do=do, of=of, name=name, args=args, kwargs=kwargs)
        except BaseException as error:  # it is raised in the code under test
            return {"do": "answer", "value": None, "raised": error}
        return {"do": "answer", "value": value, "raised": None}

    def _decode(self, encoded: Any) -> Any:
        return decode(encoded, self._find)

    def _find(self, kind: str, content: Any) -> Any:
        if kind == "shared":
            return self._containers.container(content)
        if kind == "ours":
            return self._given.find(content)
        if kind == "class":
            return self._classes[content]
        if kind == "error":
            return self._error(content)
        if kind == "object":
            return self._object(*content)
        raise ValueError(f"unknown kind of value: {kind!r}")

    def _object(self, number: int, described: int, content: Any = None) -> Any:
        found = self._objects.get(number, self._lasting.get(number))
        kind = self._classes[described]
        if type(found) is kind:
            return found
        base = next((one for one in CONTENTS.values() if one in kind.__mro__), None)
        made = base.__new__(kind, self._decode(content)) if base else object.__new__(kind)  # type: ignore[arg-type, call-overload]
        return self._register(number, made)

    def _register(self, number: int, made: Any) -> Any:
        if type(number) is not int:
            raise ValueError("a message holds a malformed reference to an object")
        object.__setattr__(made, "_remote", RemoteReference(self, number))
        try:
            self._objects[number] = made
        except TypeError:  # of a subclass of int, tuple or bytes
            self._lasting[number] = made
        return made

    def _describe(
        self,
        number: int,
        name: str,
        qualname: str,
        module: str,
        bases: Any,
        special: list[str],
        abstract: list[str],
        overridden: list[str],
    ) -> None:
        """Create the proxy for a class of the code under test."""
        if number in self._classes:
            raise ValueError("a message describes a class again")
        found = [self._base(base) for base in bases]
        if not any(isinstance(base, RemoteClass) for base in found):
            found.insert(0, RemoteObject)
        content = next((k for k in CONTENTS.values() if any(issubclass(b, k) for b in found)), None)
        is_error = any(BaseException in base.__mro__ for base in found)
        names: dict[str, Any] = {"__module__": str(module), "__qualname__": str(qualname)}
        if not is_error and str(name) in _FUNCTIONS:
            names["__module__"] = remote_objects.forwarded_attribute("__module__")
        special = ["__str__"] if is_error else [str(one) for one in special]
        for one in overridden:
            if str(one).startswith("_") or content is None or not hasattr(content, str(one)):
                raise ValueError("a message names a member that a class can't override")
            names[str(one)] = remote_objects.Overridden(str(one))
        namespace = names | remote_objects.namespace_of(special, content, is_error=is_error)
        reference = RemoteReference(self, number)
        try:
            made = RemoteClass.proxy(reference, str(name), tuple(found), namespace)
        except TypeError:  # an order of bases that proxies can't have
            made = RemoteClass.proxy(reference, str(name), tuple(found[:1]), namespace)
        self._classes[number] = made
        for one in abstract:
            if one in collections.abc.__all__:
                getattr(collections.abc, one).register(made)

    def _base(self, base: Any) -> Any:
        if type(base) is int:
            return self._classes[base]
        if base in CONTENTS:
            return CONTENTS[base]
        found = known_exception(str(base))
        if found is None:
            raise ValueError("a message names an unknown base class")
        return found

    def _error(self, about: dict[str, Any]) -> BaseException:
        """Return the local exception for one of the code under test."""
        number = about["number"]
        if number in self._objects and isinstance(self._objects[number], BaseException):
            return self._objects[number]  # type: ignore[no-any-return]
        kind = about["class"]
        found: Any = known_exception(kind) if type(kind) is str else self._classes[kind]
        known: Any = next(
            k for k in found.__mro__ if known_exception(f"{k.__module__}.{k.__name__}") is k
        )
        args, made = ([self._decode(item) for item in about[part]] for part in ("args", "make"))
        error = _created(found, known, made)
        BaseException.args.__set__(error, tuple(args))  # type: ignore[attr-defined]
        settable = native_attributes(known)
        for name, value in about["state"].items():
            if (type(kind) is str and not name.startswith("__")) or name in settable | {
                "__notes__"
            }:
                if value is None and getattr(error, name, None) is None:
                    continue  # setting it would change the text of an OSError
                try:
                    object.__setattr__(error, name, self._decode(value))
                except (AttributeError, TypeError):  # read-only, or never set
                    continue
        if about["cause"] is not None:
            error.__cause__ = self._decode(about["cause"])
        if type(kind) is int:
            self._register(number, error)
        return error


def _created(kind: Any, known: Any, made: list[Any]) -> BaseException:
    """Create an exception without calling code under test; ``known`` is its built-in class."""
    try:
        error = known.__new__(kind, *made)
        known.__init__(error, *made)
    except (TypeError, ValueError):  # its constructor takes other arguments
        error = known.__new__(kind)
    return error  # type: ignore[no-any-return]


def _number_of(value: Any) -> int | None:
    if isinstance(value, RemoteModule):
        value = value.__dict__["_stand_in"]
    reference = reference_of(value)
    return None if reference is None else reference.number


def local_spec(name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
    """Return a spec for a module of the tests, or for a folder of such modules, else None."""
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is None or spec.loader is not None:
        return spec
    below = (
        file
        for place in spec.submodule_search_locations or ()
        for _, _, files in os.walk(place)
        for file in files
    )
    return spec if any(file.endswith(".py") for file in below) else None


class RemoteModule(types.ModuleType):
    """The proxy for a module of the code under test."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__all__", "__version__", "__author__"):
            raise AttributeError(name)
        # The code under test must not replace modules of the tests that are in its packages.
        place = self.__dict__.get("__path__")
        if place and local_spec(f"{self.__name__}.{name}", place) is not None:
            return importlib.import_module(f"{self.__name__}.{name}")
        stand_in = self.__dict__["_stand_in"]
        asking = sys._getframe(1)
        if name == "__all__" and asking.f_locals is asking.f_globals:  # import * at module level
            return _starred(stand_in, taken={*dir(builtins), *asking.f_globals})
        return getattr(stand_in, name)

    def __setattr__(self, name: str, value: Any) -> None:
        full = f"{self.__name__}.{name}"
        submodule = isinstance(value, types.ModuleType) and value.__name__ == full
        if name.startswith("__") or submodule:
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__["_stand_in"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["_stand_in"], name)

    def __dir__(self) -> list[str]:
        return dir(self.__dict__["_stand_in"])


def _starred(module: Any, *, taken: set[str]) -> list[str]:
    """Return the names for ``import *``, without those in ``taken``, such as ``abs``."""
    try:
        names = module.__all__
    except AttributeError:
        names = [name for name in dir(module) if not name.startswith("_")]
    return [name for name in names if name not in taken]


def _malformed(error: Exception) -> BrokenLinkError:
    return BrokenLinkError(f"the code under test sent a malformed reply: {error!r}")
