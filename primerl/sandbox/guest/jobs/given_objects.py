"""Objects of the tests that the code under test may use, because a test passed them to it.

The code under test gets a number for each of these objects. It may call functions that the test
file defines, and use the attributes and operators of objects whose classes the test file defines.
It can't use the standard library of this process: functions and classes of the standard library are
sent by name, and values are copied.
"""

import functools
import io
import itertools
import operator
import os
import pickle
import sys
import types
from typing import Any

from primerl.sandbox.guest.jobs import operators
from primerl.sandbox.guest.jobs.remote_objects import own_members
from primerl.sandbox.guest.jobs.shared_containers import SharedContainers, kind_of
from primerl.sandbox.guest.jobs.stubs import SPECIAL

_COPIED = (  # modules whose instances are copied, besides built-in values
    *("array", "collections", "datetime", "decimal", "enum", "fractions", "functools", "http"),
    "inspect",
    *("ipaddress", "logging", "operator", "pathlib", "random", "re", "types", "uuid", "zoneinfo"),
)
_KEY: Any = type(functools.cmp_to_key(operator.sub))
_BUILT_IN_VALUES = (
    *(type(None), bool, int, float, complex, str, bytes, tuple, frozenset, range, slice),
    *(type(Ellipsis), type(NotImplemented), memoryview),
)
_ITERATORS: tuple[Any, ...] = (
    *(types.GeneratorType, type(iter([])), type(iter(())), type(iter({})), type(iter("")), map),
    *(filter, zip, enumerate, reversed, type(iter(range(0))), itertools.count, itertools.cycle),
    *(itertools.chain, itertools.islice, itertools.repeat),
)
_STREAMS = (io.StringIO, io.BytesIO, io.TextIOWrapper, io.BufferedIOBase, io.RawIOBase)
_USABLE = (_KEY, *_STREAMS, *_ITERATORS, types.CoroutineType)
_METHODS_OF = (
    list,
    dict,
    set,
    bytearray,
    str,
    bytes,
    int,
)  # built-in methods of these
_USED_OF_STREAMS = (
    *("read", "read1", "readline", "readlines", "write", "writelines", "seek", "tell", "truncate"),
    *("flush", "close", "closed", "readable", "writable", "seekable", "isatty", "getvalue"),
    *("name", "mode", "encoding", "errors", "newlines"),
)
_WRAPPED = (type(functools.lru_cache(len)),)
_REFERRED: tuple[Any, ...] = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinMethodType,
    types.CoroutineType,
)
_REFERRED += (*_WRAPPED, _KEY)
_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType)
_READABLE = ("__name__", "__doc__", "__qualname__", "__module__")


def _is_standard(module: Any) -> bool:
    return str(module).partition(".")[0] in sys.stdlib_module_names


class GivenObjects:
    """The objects that the tests gave, by number, and the operations that are allowed on them."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.join(folder, "")
        self._given: dict[int, Any] = {}
        self._described: set[int] = set()
        self._in_message: set[int] = set()
        self._awaited: dict[int, Any] = {}  # what each coroutine waits for

    def find(self, number: Any) -> Any:
        """Return the object with a number.

        Raises:
            KeyError: the tests gave none with this number.
        """
        return self._given[number]

    def reference(self, value: Any) -> Any:
        """Return a reference to an object, with a description if it is new.

        Raises:
            TypeError: the code under test may not use such an object.
        """
        if id(value) in self._described or id(value) in self._in_message:
            return ("ours", id(value), None)
        about = Copied(self._about(value))
        self._given[id(value)] = value  # kept alive, so that its id stays unique
        self._in_message.add(id(value))
        return ("ours", id(value), about)

    def begin(self) -> None:
        """Begin a message, whatever became of the last one."""
        self._in_message.clear()

    def sent(self) -> None:
        """Note that the message was sent, together with its descriptions."""
        self._described |= self._in_message

    def _about(self, value: Any) -> dict[str, Any]:
        function = _unwrapped(getattr(value, "__func__", value))
        if isinstance(function, types.FunctionType) and self.is_own(function):
            return _of_function(value, function)
        if isinstance(value, types.BuiltinMethodType) and (
            type(value.__self__) in _METHODS_OF
            or (isinstance(value.__self__, _STREAMS) and value.__name__ in _USED_OF_STREAMS)
        ):
            return _of_function(value, None)
        kind = value if isinstance(value, type) else type(value)
        if isinstance(value, type) and self.is_own(kind):
            bases = tuple(b for b in kind.__bases__ if self.is_own(b) or BaseException in b.__mro__)
            return _of_class(kind, bases)
        if not isinstance(value, type) and self._may_be_used(value):
            if self.is_own(kind):
                args = value.args if isinstance(value, BaseException) else ()
                return {"kind": "object", "class": kind, "args": args}
            special = tuple(name for name in SPECIAL if getattr(kind, name, None) is not None)
            return {"kind": "object", "class": None, "name": kind.__name__, "special": special}
        raise TypeError(
            f"a {type(value).__name__} can't be passed to the code under test, which is in another "
            "sandbox: pass values, functions and objects of the test file, or objects that came "
            "from that code; a suite that needs more can be graded in one process, as with "
            'swe-folder\'s grading="command"'
        )

    def carry_out(
        self, *, do: str, of: Any, name: str = "", args: Any = (), kwargs: Any = None
    ) -> Any:
        """Do what the code under test asked for.

        Raises:
            AttributeError: it may not use this attribute.
        """
        target = self._given[of]
        if do == "call" and callable(target):
            return target(*args, **(kwargs or {}))
        if do == "step" and isinstance(target, types.CoroutineType):
            return self._step(target)
        if do == "operate" and isinstance(name, str):
            if isinstance(target, _ITERATORS) and name not in ("iter", "next"):
                raise AttributeError(f"the iterator of the test has no {name!r}")
            return operators.operate(name, target, list(args))
        if do in ("get", "set") and isinstance(name, str) and self._may_be_named(target, name, do):
            return getattr(target, name) if do == "get" else setattr(target, name, *args)
        raise AttributeError(f"{type(target).__name__!r} object of the test has no usable {name!r}")

    def is_own(self, made: Any) -> bool:
        """Whether the test files define a function or a class, rather than a library."""
        if isinstance(made, types.FunctionType):
            file = made.__code__.co_filename
        else:
            file = getattr(sys.modules.get(made.__module__), "__file__", None) or ""
        return os.path.abspath(file).startswith(self._folder) if file else False

    def _may_be_used(self, value: Any) -> bool:
        kind = type(value)
        unittest = sys.modules.get("unittest")
        if unittest is not None and isinstance(value, unittest.TestCase):
            return False  # the code under test could replace its assertions
        return kind is object or isinstance(value, _USABLE) or _is_mock(value) or self.is_own(kind)

    def _may_be_named(self, target: Any, name: str, do: str) -> bool:
        """Whether the code under test may read or set an attribute of one of the tests' objects."""
        if name in _READABLE:
            return do == "get"
        if isinstance(target, (*_ITERATORS, types.CoroutineType, types.MethodType)):
            return False  # their public attributes lead to the test's variables
        if isinstance(target, _STREAMS):
            usable = name in _USED_OF_STREAMS or (name[0] != "_" and self.is_own(type(target)))
            return do == "get" and usable
        if _is_mock(target):
            return name[0] != "_" and (do == "get" or not hasattr(type(target), name))
        if name.startswith("__"):
            return name == "__dict__" and do == "get" and self.is_own(type(target))
        if isinstance(target, type | types.FunctionType):
            return do == "get" and self.is_own(target)  # setting them would change later tests
        return self.is_own(type(target))

    def _step(self, coroutine: Any) -> Any:
        """Run a coroutine up to its next pause; return whether it is done, and its result."""
        awaited = self._awaited.pop(id(coroutine), None)
        if awaited is None or awaited.done():
            try:
                awaited = coroutine.send(None)
            except StopIteration as stop:
                return (True, stop.value)
        if awaited is not None:
            awaited._asyncio_future_blocking = False  # as a task that took notice of it sets it
            self._awaited[id(coroutine)] = awaited
        return (False, None)


def _unwrapped(value: Any) -> Any:
    """Return the function below decorators such as ``functools.lru_cache``."""
    while isinstance(value, _WRAPPED):
        value = value.__wrapped__
    return value


def _is_mock(value: Any) -> bool:
    mock = sys.modules.get("unittest.mock")
    return mock is not None and isinstance(value, mock.NonCallableMock)


def _of_function(value: Any, function: Any) -> dict[str, Any]:
    import inspect

    try:
        signature: Any = inspect.signature(value).replace(return_annotation=inspect.Signature.empty)
        parameters = [
            one.replace(annotation=one.empty, default=_default(one.default, one.empty))
            for one in signature.parameters.values()
        ]
        signature = signature.replace(parameters=parameters)
    except (TypeError, ValueError):
        signature = None
    return {
        "kind": "function",
        "name": getattr(value, "__name__", "function"),
        "qualname": getattr(value, "__qualname__", "function"),
        "doc": getattr(value, "__doc__", None),
        "module": getattr(value, "__module__", None) or "tests",
        "is_async": inspect.iscoroutinefunction(function),
        "signature": signature,
        "annotations": _sendable(getattr(function, "__annotations__", {})),
        "attributes": _sendable(getattr(function, "__dict__", {})),
    }


def _default(value: Any, empty: Any) -> Any:
    return value if type(value) in _BUILT_IN_VALUES or value is empty else None


def _sendable(values: Any) -> dict[str, Any]:
    """Return the entries that are classes or plain values, in a dictionary that is not shared."""
    return Copied(
        (key, value)
        for key, value in values.items()
        if type(value) in _BUILT_IN_VALUES or isinstance(value, type)
    )


class Copied(dict[str, Any]):
    """A dictionary that is copied, not shared."""

    def __reduce__(self) -> Any:
        return (dict, (tuple(self.items()),))


def _of_class(kind: type, bases: tuple[type, ...]) -> dict[str, Any]:
    return {
        "kind": "class",
        "name": kind.__name__,
        "module": kind.__module__,
        "bases": bases,
        "members": members_of(kind, stub=True),
    }


def members_of(kind: type, *, stub: bool) -> dict[str, Any]:
    """Describe the members of a class that the test file defines.

    A ``stub`` gets the operators of the class. The real class that stands for a subclass of the
    code under test gets its functions, bound to nothing.
    """
    found: dict[str, Any] = Copied()
    for name, value in own_members(kind).items():
        if stub and name in SPECIAL and value is not None:
            found[name] = ("primerl", ("operator", SPECIAL[name]))
        elif (
            name
            in (
                "__dict__",
                "__weakref__",
                "__module__",
                "__slots__",
                "__new__",
                "__qualname__",
            )
            or (stub and (name == "__init__" or name in _INSPECTED))
            or isinstance(value, types.MemberDescriptorType)
        ):
            continue
        elif stub and not hasattr(type(value), "__get__"):
            found[name] = ("primerl", ("value", name, value))
        else:
            found[name] = _member(value)
    if stub and issubclass(kind, io.IOBase):
        for name in SPECIAL.keys() - found.keys():
            if getattr(kind, name, None) is not None:
                found[name] = ("primerl", ("operator", SPECIAL[name]))
    return found


_INSPECTED: tuple[str, ...] = (
    "__setattr__",
    "__getattr__",
    "__getattribute__",
    "__delattr__",
    "__init_subclass__",
)
_INSPECTED += ("__dataclass_fields__", "__dataclass_params__", "__match_args__", "__annotations__")


def _member(value: Any) -> Any:
    if isinstance(value, property):
        return ("primerl", ("property", value.fget, value.fset, value.fdel))
    if isinstance(value, functools.cached_property):
        return ("primerl", ("cached_property", value.func))
    if isinstance(value, classmethod | staticmethod):
        return ("primerl", (type(value).__name__, value.__func__))
    return value


class RequestPickler(pickle.Pickler):
    """Encodes requests: values are copied, everything else is a reference."""

    def __init__(
        self, file: Any, given: GivenObjects, containers: SharedContainers, number_of: Any
    ) -> None:
        super().__init__(file, protocol=5)
        self._given, self._containers, self._number_of = given, containers, number_of

    def reducer_override(self, value: Any) -> Any:
        """Copy a memoryview as its bytes, and the state of an object with the object."""
        if type(value) is memoryview:
            return (memoryview, (bytes(value),))
        if isinstance(value, (type, Copied, types.BuiltinFunctionType, *_REFERRED)):
            return NotImplemented
        reduced = value.__reduce_ex__(4)
        if not isinstance(reduced, tuple) or len(reduced) < 3:
            return reduced
        return (*reduced[:2], _copied(reduced[2]), *reduced[3:])

    def persistent_id(self, value: Any) -> Any:
        """Return the reference to an object that is not copied."""
        kind = type(value)
        if kind in _BUILT_IN_VALUES or kind is Copied:
            return None
        if (number := self._number_of(value)) is not None:
            return ("theirs", number)
        if (shared := self._containers.number_of(value)) is not None:
            return ("shared", shared)
        if kind_of(value):
            return ("shared", self._containers.add(value))
        if isinstance(value, types.ModuleType):
            if _is_standard(value.__name__):
                return ("module", value.__name__)
        elif isinstance(value, _DESCRIPTORS) or (
            isinstance(value, type | types.FunctionType | types.BuiltinFunctionType)
            and (_is_standard(value.__module__) and _is_importable(value))
        ):
            return None
        elif _is_standard(kind.__module__) and kind.__module__.partition(".")[0] in _COPIED:
            if not isinstance(value, _REFERRED):
                return None
        elif isinstance(value, BaseException) and not self._given.is_own(kind):
            return None
        return self._given.reference(value)


def _copied(state: Any) -> Any:
    if isinstance(state, tuple):
        return tuple(map(_copied, state))
    return Copied(state) if type(state) is dict else state


def _is_importable(value: Any) -> bool:
    module = sys.modules.get(value.__module__ or "")
    try:
        return operator.attrgetter(value.__qualname__)(module) is value
    except AttributeError:
        return False
