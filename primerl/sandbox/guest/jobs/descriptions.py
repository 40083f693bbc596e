"""References to objects of the code under test, as its server sends them to the tests."""

import collections.abc
import itertools
import types
from typing import Any

from primerl.sandbox.guest.jobs import operators
from primerl.sandbox.guest.jobs.shared_containers import SharedContainers
from primerl.sandbox.guest.jobs.typed_values import encode, exception_name

MOST_OBJECTS = 1_000_000
_CONTENTS = (int, str, float, complex, bytes, tuple, frozenset)
_MUTABLE: tuple[Any, ...] = (list, dict, set, bytearray)
_VIEWS: tuple[type, ...] = (types.MappingProxyType, type({}.keys()), type({}.items()))
_SPECIAL = {f"__{name}__" for name in operators.ALL} | {"__call__", "__await__", "__missing__"}


class References:
    """The objects that the tests hold references to, by number, and the encoding of references."""

    def __init__(self, containers: SharedContainers) -> None:
        self._objects: dict[int, Any] = {}
        self._described: set[int] = set()
        self._containers = containers
        self._classes: list[Any] = []
        self.stubs: dict[int, int] = {}  # the tests' numbers of stubs of their objects, by id

    def find(self, number: int) -> Any:
        """Return the object with a number."""
        return self._objects[number]

    def forget(self, numbers: list[int]) -> None:
        """Forget objects to which the tests have no reference any more."""
        for number in numbers:
            self._objects.pop(number, None)

    def encode(self, value: Any) -> Any:
        """Encode a value by value or as a reference."""
        return encode(value, self._refer)

    def new_classes(self) -> list[Any]:
        """Return the descriptions of classes that are not sent yet, bases first."""
        classes, self._classes = self._classes, []
        return classes

    def changed_containers(self) -> list[Any]:
        """Return the changed containers, and those that they refer to."""
        return [
            [number, kind, [self.encode(item) for item in content]]
            for number, kind, content in self._containers.changes()
        ]

    def _refer(self, value: Any) -> Any:
        if (number := self._containers.number_of(value)) is not None:
            return {"shared": number}
        if content_kind(value) == "shared":
            return {"shared": self._containers.add(value)}
        if id(value) in self.stubs:
            return {"ours": self.stubs[id(value)]}
        if isinstance(value, type):
            return {"class": self._class(value)}
        if isinstance(value, BaseException):
            return {"error": self._error(value)}
        number = self.keep(value)
        kind = type(value)
        described = self._class(kind)
        base = next((one for one in _CONTENTS if isinstance(value, one)), None)
        if base is None:
            return {"object": [number, described]}
        return {"object": [number, described, self.encode(_plain(base, value))]}

    def keep(self, value: Any) -> int:
        """Keep an object alive, so that its number stays unique.

        Raises:
            MemoryError: the tests refer to too many objects.
        """
        if len(self._objects) > MOST_OBJECTS:
            raise MemoryError("the tests refer to too many objects of the code under test")
        self._objects[id(value)] = value
        return id(value)

    def _class(self, kind: type) -> int:
        number = self.keep(kind)
        if number in self._described:
            return number
        self._described.add(number)
        bases: list[Any] = []
        for base in kind.__bases__:
            if base in _CONTENTS:
                bases.append(base.__name__)
            elif issubclass(base, BaseException) and (name := exception_name(base)):
                bases.append(name)
            elif base is not object:
                bases.append(self._class(base))
        special = {name for name in _SPECIAL if any(name in vars(one) for one in kind.__mro__)}
        special -= {name for name in special if getattr(kind, name, None) is None}
        if kind.__hash__ is None:
            special.add("unhashable")
        names = [str(kind.__name__), str(kind.__qualname__), str(kind.__module__)]
        abstract = [
            name
            for name in collections.abc.__all__
            if name not in ("Hashable", "Callable") and _is_subclass(kind, name)
        ]
        overridden = sorted(_overridden(kind))
        self._classes.append([number, *names, bases, sorted(special), abstract, overridden])
        return number

    def _error(self, error: BaseException) -> Any:
        name = exception_name(type(error))
        made = error.__reduce__()[1] if type(error).__reduce__ in _REDUCTIONS else error.args
        known = next(kind for kind in type(error).__mro__ if exception_name(kind))
        state = {key: value for key, value in _state(error, known).items() if key.isidentifier()}
        return {
            "number": self.keep(error),
            "class": name if name else self._class(type(error)),
            "make": [self.encode(item) for item in made],
            "args": [self.encode(item) for item in error.args],
            "state": {key: self.encode(value) for key, value in state.items()},
            "cause": None if error.__cause__ is None else self.encode(error.__cause__),
        }


def _overridden(kind: type) -> set[str]:
    """Return the members of ``str``, ``int`` and so on that a subclass of them overrides."""
    base = next((one for one in _CONTENTS if issubclass(kind, one)), None)
    if base is None:
        return set()
    return {name for name in vars(kind) if hasattr(base, name) and name[0] != "_"}


def _is_subclass(kind: type, name: str) -> bool:
    try:
        return issubclass(kind, getattr(collections.abc, name))
    except TypeError:
        return False


_REDUCTIONS = (BaseException.__reduce__, OSError.__reduce__)


def _state(error: BaseException, known: type) -> dict[str, Any]:
    """Return the attributes of an exception that its built-in classes define, and its notes."""
    state = {name: getattr(error, name, None) for name in native_attributes(known)}
    if exception_name(type(error)):
        state |= {str(name): value for name, value in vars(error).items()}
    elif notes := getattr(error, "__notes__", None):
        state["__notes__"] = notes
    return state


def native_attributes(kind: type) -> set[str]:
    """Return the names of the attributes that built-in classes of exceptions define in C."""
    found = itertools.chain.from_iterable(vars(one).items() for one in kind.__mro__)
    kinds = (types.MemberDescriptorType, types.GetSetDescriptorType)
    return {name for name, value in found if isinstance(value, kinds) and name[0] != "_"} - {
        "args",
        "exceptions",
        "message",
    }


def content_kind(value: Any) -> str | None:
    """Tell how the content of a container is sent: "shared", "asked for", or None."""
    from primerl.sandbox.guest.jobs.shared_containers import kind_of

    if kind_of(value):
        return "shared"
    return "asked for" if isinstance(value, _MUTABLE + _VIEWS) else None


def plain_content(value: Any) -> Any:
    """Return the content of an instance of a subclass of a built-in container, else None."""
    if isinstance(value, type({}.keys())):
        return set(value)
    if isinstance(value, type({}.items())):
        return set(value)
    if isinstance(value, types.MappingProxyType):
        return dict(value)
    for kind in _MUTABLE:
        if isinstance(value, kind):
            return kind(_plain(kind, value)) if kind is not dict else dict(dict.items(value))
    return None


def _plain(kind: type, value: Any) -> Any:
    """Return the built-in value that an instance of a subclass contains, whatever it overrides."""
    if kind is str:
        return str.__str__(value)
    if kind is int:
        return int.__int__(value)
    if kind is float:
        return float.__float__(value)
    if kind is complex:
        return complex.__complex__(value)
    if kind is bytes:
        return bytes.__getitem__(value, slice(None)) + b""
    return kind(kind.__iter__(value))  # type: ignore[attr-defined]
