"""Remote objects: a test's proxies for objects of the code under test, in the other sandbox.

A test must not reveal its expected value to the code under test and then trust the number that
comes back: an object whose ``-`` always returns 0.0 would pass ``abs(f(x) - 1.5) < 1e-9``.
Therefore arithmetic of a remote object with a plain value must return another remote object.
Neither that object, nor the results of further arithmetic on it, can be converted to numbers, or
have the content of a number.

An instance of a subclass of ``str``, ``int``, ``tuple`` and so on comes with its plain content,
which is compared with plain values in this process. The built-in operators also calculate with it
here: a number or a set that its own operators give must have the same content.
"""

import numbers
from collections.abc import Iterator
from typing import Any

from primerl.sandbox.guest.jobs import operators

CONTENTS: dict[str, type] = {
    kind.__name__: kind for kind in (int, str, float, complex, bytes, tuple, frozenset)
}
# With these, the code under test could make numpy read any address of this process.
_REFUSED = "__array_"


class RemoteReference:
    """Identity of a remote object: the link to its sandbox, and its number there.

    It is "informed" if the object is the result of arithmetic with a plain value of the test,
    directly or through other informed objects.
    """

    def __init__(self, link: Any, number: int) -> None:
        self.link = link
        self.number = number
        self.informed = False
        self.computed = False  # whether its content is what the built-in operators give
        self.steps: Any = None  # of awaiting a coroutine


def reference_of(value: Any) -> RemoteReference | None:
    """Return the identity of a remote object or class; None for all other values."""
    if isinstance(type(value), RemoteClass):
        try:
            return object.__getattribute__(value, "_remote")  # type: ignore[no-any-return]
        except AttributeError:
            return None
    if isinstance(value, RemoteClass):
        return own_members(value).get("_remote_class")  # type: ignore[no-any-return]
    return None


def own_members(kind: type) -> Any:
    """Return the members of a class in this process, whatever its metaclass."""
    return type.__dict__["__dict__"].__get__(kind)


def ask(value: Any, do: str, **request: Any) -> Any:
    """Send a request about a remote object or class to its sandbox."""
    reference = reference_of(value)
    if reference is None:
        raise TypeError(f"{do} needs an object of the code under test")
    return reference.link.ask(do=do, of=value, **request)


class RemoteClass(type):
    """Metaclass of the proxies for classes of the code under test."""

    def __new__(cls, name: str, bases: tuple[Any, ...], namespace: Any, **keywords: Any) -> Any:
        """Create a test's subclass of a remote class, here and in the other sandbox."""
        made = super().__new__(cls, name, bases, namespace)
        base = next((one for one in bases if reference_of(one) is not None), None)
        if base is not None:
            reference_of(base).link.subclass(made, keywords)  # type: ignore[union-attr]
        return made

    def __init__(cls, *args: Any, **_keywords: Any) -> None:
        """Do nothing: keywords are for the class in the other sandbox."""
        super().__init__(*args)

    @classmethod
    def proxy(cls, reference: RemoteReference, name: str, bases: Any, namespace: Any) -> Any:
        """Create the proxy for a class of the code under test."""
        made = type.__new__(cls, name, bases, namespace)
        type.__setattr__(made, "_remote_class", reference)
        return made

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Call the class in the sandbox of the code under test."""
        return ask(cls, "call", args=args, kwargs=kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith(_REFUSED) or reference_of(cls) is None:
            raise AttributeError(name)
        return ask(cls, "get", name=name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name in ("__abstractmethods__", "__module__"):
            super().__setattr__(name, value)
        else:
            ask(cls, "set", name=name, args=(value,))

    def __delattr__(cls, name: str) -> None:
        ask(cls, "delete", name=name)

    def __instancecheck__(cls, other: Any) -> bool:
        if reference_of(cls) is None or issubclass(cls, BaseException):
            return super().__instancecheck__(other)
        return ask(cls, "isinstance", args=(other,)) is True

    def __subclasscheck__(cls, other: Any) -> bool:
        if super().__subclasscheck__(other):
            return True
        # The code under test may answer for its own classes only. The abstract classes of the
        # standard library call this for every class of this process.
        if reference_of(cls) is None or reference_of(other) is None:
            return False
        return BaseException not in cls.__mro__ and ask(cls, "issubclass", args=(other,)) is True

    @property  # type: ignore[misc]
    def __dict__(cls) -> Any:  # type: ignore[override]
        return own_members(cls) if reference_of(cls) is None else ask(cls, "members")

    def __iter__(cls) -> Iterator[Any]:
        return iter(ask(cls, "operate", name="iter"))

    def __len__(cls) -> int:
        return int(ask(cls, "operate", name="len"))

    def __bool__(cls) -> bool:
        return True

    def __contains__(cls, value: Any) -> bool:
        return ask(cls, "operate", name="contains", args=(value,)) is True

    def __getitem__(cls, key: Any) -> Any:
        return ask(cls, "operate", name="getitem", args=(key,))

    def __reversed__(cls) -> Any:
        return ask(cls, "operate", name="reversed")

    def __or__(cls, other: Any) -> Any:
        return ask(cls, "operate", name="or", args=(other,))

    def __dir__(cls) -> list[str]:
        return list(ask(cls, "operate", name="dir"))

    def __reduce__(cls) -> Any:
        return _restored, (ask(cls, "dumps"),)


class RemoteObject(metaclass=RemoteClass):
    """A remote object: a proxy for an object of the code under test.

    Its class is the proxy for the object's class, and has the operators of that class.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Accept the keywords of a class, which are for the class in the other sandbox."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_REFUSED) or reference_of(self) is None:  # not yet registered
            raise AttributeError(name)
        return ask(self, "get", name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("__traceback__", "__context__", "__cause__") or name.startswith("_pytest"):
            object.__setattr__(self, name, value)
        else:
            ask(self, "set", name=name, args=(value,))

    def __delattr__(self, name: str) -> None:
        ask(self, "delete", name=name)

    def __del__(self) -> None:
        reference = reference_of(self)
        if reference is not None:
            reference.link.released(reference.number)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return ask(self, "get", name="__dict__")

    def __copy__(self) -> Any:
        return ask(self, "copy")

    def __deepcopy__(self, memo: Any) -> Any:
        return ask(self, "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (ask(self, "dumps"),)


def forwarded_attribute(name: str) -> Any:
    """Return a property that reads an attribute which classes define anyway."""
    return property(lambda self: ask(self, "get", name=name))


class Overridden:
    """A member that a class of the code under test overrides, so that the built-in one isn't used.

    A subclass of ``str``, for example, may have its own ``upper``.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, kind: Any) -> Any:
        if instance is None:
            return ask(kind, "get", name=self._name)
        reference = reference_of(instance)
        if reference is not None and reference.computed:
            raise TypeError(_FAKED)
        return ask(instance, "get", name=self._name)


_LINKS: list[Any] = []  # the link of this process, for unpickling


def _restored(data: bytes) -> Any:
    return _LINKS[0].ask(do="loads", args=(data,))


def connect(link: Any) -> None:
    """Let remote objects that are unpickled use this link."""
    _LINKS[:] = [link]


def content_of(value: Any) -> Any:
    """Return the content of an instance of a subclass of str, int and so on, else None."""
    for kind in CONTENTS.values():
        if isinstance(value, kind):
            return _converted(kind, value)
    return None


def _converted(kind: type, value: Any) -> Any:
    if kind is tuple or kind is frozenset:
        return kind(kind.__iter__(value))
    if kind is bytes:
        return bytes.__getitem__(value, slice(None))
    name = {str: "__str__", int: "__int__", float: "__float__", complex: "__complex__"}[kind]
    return getattr(kind, name)(value)


_FAKED = (
    "arithmetic of the code under test with a plain value gave a value that this code could have "
    "faked to pass the test: compare its objects with == instead, or convert them first, as in "
    "float(result)"
)
# Operators that concatenate or format text and lists, or merge dictionaries. Unlike a difference,
# no result of these shows whether the value that the code under test was told is the right one.
_BUILDS = {f"{way}{name}" for way in ("", "i", "r") for name in ("add", "mul", "mod", "truediv")}
_MERGES = ("or", "ior", "ror")


def _plain(value: Any) -> Any:
    """Return the content of a remote object, and any other value as it is."""
    return value if reference_of(value) is None else content_of(value)


def _content_beside(value: Any, other: Any) -> Any:
    """Return the plain content of a remote object, asking for that of a container; None without."""
    content = content_of(value)
    if content is None and isinstance(other, list | dict | set | frozenset | bytearray):
        content = ask(value, "content")
    return content


def _is_built(name: str, other: Any, answer: Any) -> bool:
    """Whether an operator gave text, a list or a dictionary that contains its operands."""
    if name in _MERGES:
        return isinstance(other, dict)
    if name not in _BUILDS or isinstance(other, numbers.Number):
        return False
    return isinstance(other, list) or isinstance(_plain(answer), str | bytes)


def _checked(answer: Any, computed: Any) -> Any:
    """Return the answer to arithmetic with a plain value, if it can't be faked.

    ``computed`` is what the built-in operator gives for the plain content of the operands; None if
    they have none. The answer is marked as informed.

    Raises:
        TypeError: the answer is plain or has the content of a number, text or a set, and nothing
            was computed to compare it with, or that differs.
    """
    if type(answer) is tuple and answer and all(map(reference_of, answer)):  # of divmod
        parts = computed if type(computed) is tuple else [None] * len(answer)
        return tuple(map(_checked, answer, parts))
    reference = reference_of(answer)
    if reference is None:
        if computed is None:
            raise TypeError(_FAKED)
        return computed
    content = content_of(answer)
    # Functions written in C would read these without asking the proxy.
    if isinstance(content, int | float | complex | str | bytes | frozenset):
        if computed is None or content != computed:
            raise TypeError(_FAKED)
        reference.computed = True
    reference.informed = True
    return answer


def _binary(name: str) -> Any:
    def calculate(self: Any, other: Any, *more: Any) -> Any:
        theirs = reference_of(other)
        reference: Any = reference_of(self)
        informed = reference.informed or theirs is None or theirs.informed
        trusted = not reference.informed or reference.computed
        mine = _content_beside(self, other) if informed and trusted else None  # asked beforehand
        answer = ask(self, "operate", name=name, args=(other, *more))
        if not informed or answer is NotImplemented or _is_built(name, other, answer):
            return answer
        if mine is None or _plain(other) is None:
            return _checked(answer, None)
        try:
            computed = operators.operate(name, mine, [_plain(other), *more])
        except (TypeError, ArithmeticError):  # the class has more operators than its content
            computed = None
        return _checked(answer, computed)

    return calculate


def _unary(name: str) -> Any:
    def calculate(self: Any, *digits: Any) -> Any:
        reference: Any = reference_of(self)
        mine = content_of(self)
        conversion = not reference.informed and name in ("int", "float", "index")
        if mine is not None and (reference.computed or conversion):
            return operators.operate(name, mine, list(digits))
        answer = ask(self, "operate", name=name, args=digits)
        return _checked(answer, None) if reference.informed else answer

    return calculate


def _comparison(name: str) -> Any:
    """Return a comparison that calls the code under test for remote objects only.

    For plain values, that code is not asked: it could claim to equal anything. Its content is
    compared here, except of an informed object.
    """

    def compare(self: Any, other: Any) -> Any:
        if reference_of(other) is not None:
            return ask(self, "operate", name=name, args=(other,))
        reference: Any = reference_of(self)
        mine = _content_beside(self, other)
        if mine is not None:
            if reference.informed and not reference.computed:
                raise TypeError(_FAKED)
            return operators.operate(name, mine, [other])
        if name not in ("eq", "ne"):
            answer = ask(self, "operate", name=name, args=(other,))
            if reference_of(answer) is not None:
                return _checked(answer, None)
        return {"eq": False, "ne": True}.get(name, NotImplemented)

    return compare


def _forwarded(name: str) -> Any:
    def operate(self: Any, *args: Any) -> Any:
        return ask(self, "operate", name=name, args=args)

    return operate


def _iter(self: Any) -> Iterator[Any]:
    iterator = ask(self, "operate", name="iter")
    if iterator is self:
        return self  # type: ignore[no-any-return]
    return iter(iterator)


def _contains(self: Any, value: Any) -> bool:
    return ask(self, "operate", name="contains", args=(value,)) is True


def _exit(self: Any, _kind: Any, error: Any, _trace: Any) -> None:
    # The result is ignored: a true value would also suppress the test's own failures.
    try:
        ask(self, "operate", name="exit", args=_told(error))
    except Exception:
        if not _is_failure(error):
            raise


async def _aexit(self: Any, _kind: Any, error: Any, _trace: Any) -> None:
    try:
        await ask(self, "operate", name="aexit", args=_told(error))
    except Exception:
        if not _is_failure(error):
            raise


def _is_failure(error: Any) -> bool:
    """Whether an exception is a failure of the test, which nothing else may replace."""
    return error is not None and (
        isinstance(error, AssertionError) or not isinstance(error, Exception)
    )


def _told(error: Any) -> tuple[Any, Any, None]:
    """Return what a context manager is told of an exception; of a failure, nothing else."""
    told = AssertionError() if _is_failure(error) else error
    return (None if told is None else type(told), told, None)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return ask(self, "call", args=args, kwargs=kwargs)


def _await(self: Any) -> Any:
    task = ask(self, "start")
    while True:
        done, value = ask(task, "step")
        if done:
            return value
        try:
            yield
        except GeneratorExit:
            ask(task, "cancel")
            raise
        except BaseException:  # as when the test's task is cancelled
            ask(task, "cancel")


def _send(self: Any, value: Any) -> Any:
    reference: Any = reference_of(self)
    if reference.steps is None:
        reference.steps = _await(self)
    return reference.steps.send(value)


def _throw(self: Any, *error: Any) -> Any:
    reference: Any = reference_of(self)
    if reference.steps is None:
        raise error[0]
    return reference.steps.throw(*error)


def _close(self: Any) -> None:
    reference: Any = reference_of(self)
    if reference.steps is None:
        ask(self, "get", name="close")()
    else:
        reference.steps.close()


_METHODS: dict[str, Any] = {
    **{name: _forwarded(name) for name in operators.OTHER},
    **{name: _unary(name) for name in operators.UNARY},
    **{name: _binary(name) for name in (*operators.BINARY, *operators.INPLACE)},
    **{f"r{name}": _binary(f"r{name}") for name in operators.BINARY},
    **{name: _comparison(name) for name in operators.COMPARISONS},
    "iter": _iter,
    "contains": _contains,
    "exit": _exit,
    "aexit": _aexit,
    "call": _call,
}
_ALWAYS = ("__str__", "__repr__", "__eq__", "__ne__", "__format__", "__dir__", "__bool__")


class _Inherited:
    """A member of a remote class that a test's subclass inherits, so that ``super()`` finds it."""

    def __init__(self, owner: RemoteClass, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, instance: Any, kind: Any) -> Any:
        if instance is None:
            return ask(kind, "get", name=self._name)
        return ask(instance, "inherited", name=self._name, args=(self._owner,))


def inherit(kind: RemoteClass) -> None:
    """Make the functions of a remote class visible to ``super()`` in a test's subclass."""
    for name in ask(kind, "functions"):
        if name not in own_members(kind) and name not in _NOT_INHERITED:
            type.__setattr__(kind, name, _Inherited(kind, name))


_NOT_INHERITED: tuple[str, ...] = (
    "__new__",
    "__getattr__",
    "__getattribute__",
    "__setattr__",
    "__delattr__",
)
_NOT_INHERITED += ("__init_subclass__", "__class_getitem__", "__hash__", "__dict__", "__weakref__")


def namespace_of(
    special: list[str], content: type | None, *, is_error: bool = False
) -> dict[str, Any]:
    """Return the members of a proxy for a class with these special methods."""
    if is_error:
        found = {name: _METHODS[name[2:-2]] for name in ("__str__", "__repr__")}
        return found | {"__doc__": Overridden("__doc__")}
    names = {*special, *_ALWAYS}
    found = {name: _METHODS[name[2:-2]] for name in names if name[2:-2] in _METHODS}
    found["__doc__"] = Overridden("__doc__")
    if content is not None:
        found["__hash__"] = content.__hash__
    elif "unhashable" in names:
        found["__hash__"] = None
    if "__await__" in names:
        found |= {"__await__": _await, "send": _send, "throw": _throw, "close": _close}
    return found
