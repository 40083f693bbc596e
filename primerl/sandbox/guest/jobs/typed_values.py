"""Values that the code under test sends to the tests: a typed JSON encoding and its strict decoder.

The tests' process decodes what untrusted code wrote. Nothing here imports a module or calls a
function that a message names: names are looked up in fixed tables. ``values.py`` is the smaller
encoding for the host.
"""

import builtins
import functools
import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

_MOST_DEPTH = 50
_SIMPLE = (type(None), bool, str)
# Classes that a message may name, besides those of ``builtins``.
_CLASSES = {
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "ipaddress": ("IPv4Address", "IPv4Network", "IPv6Address", "IPv6Network"),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath"),
    "types": ("NoneType", "SimpleNamespace"),
    "uuid": ("UUID",),
}
_TEXTS = ("decimal", "ipaddress", "pathlib", "uuid")  # values of these modules are sent as text
_SINGLETONS = {
    "builtins": ("Ellipsis", "NotImplemented"),
    "dataclasses": ("MISSING", "_FIELD", "_FIELD_CLASSVAR", "_FIELD_INITVAR"),
}
# Modules whose exceptions the tests' process may raise. ``unittest.SkipTest`` must not be among
# them: raising it would skip a test that fails.
_EXCEPTION_MODULES = (
    *("builtins", "_csv", "_pickle", "_queue", "argparse", "asyncio.exceptions", "binascii"),
    *("concurrent.futures._base", "configparser", "copy", "dataclasses", "decimal"),
    *("email.errors", "graphlib", "http.client", "http.cookies", "io", "ipaddress"),
    *("json.decoder", "lzma", "pickle", "queue", "re", "shutil", "socket", "sqlite3"),
    *("statistics", "string", "struct", "subprocess", "tarfile", "threading", "tokenize"),
    *("tomllib", "urllib.error", "xml.etree.ElementTree", "zipfile", "zlib", "zoneinfo"),
)


def encode(value: Any, refer: Callable[[Any], Any], depth: int = 0) -> Any:
    """Encode a value for JSON; ``refer`` encodes values that are not sent by value."""
    kind = type(value)
    if kind in _SIMPLE:
        return value
    if kind is int:
        return {"int": hex(value)}
    if kind in (float, bytes, memoryview):
        return {kind.__name__: value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind in (tuple, frozenset) and depth < _MOST_DEPTH:
        return {kind.__name__: [encode(item, refer, depth + 1) for item in value]}
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in _WAYS and kind is _class(name):
        text = _WAYS[name][0](value)
        if text is not None:
            return {"text": [name, text]}
    if (listed := _name(value)) is not None:
        return {"named": listed}
    return refer(value)


def decode(encoded: Any, find: Callable[[str, Any], Any], depth: int = 0) -> Any:
    """Decode a value; ``find`` decodes what ``refer`` encoded.

    Raises:
        ValueError: the encoded value is malformed.
    """
    if type(encoded) in _SIMPLE:
        return encoded
    if type(encoded) is not dict or len(encoded) != 1 or depth > _MOST_DEPTH:
        raise ValueError("a message holds a malformed value: expected one type and its content")
    ((kind, content),) = encoded.items()
    if kind in ("tuple", "frozenset"):
        items = [decode(item, find, depth + 1) for item in _checked(content, list)]
        return tuple(items) if kind == "tuple" else frozenset(items)
    if kind == "int":
        return int(_checked(content, str), 16)
    if kind == "float":
        return _float(content)
    if kind in ("bytes", "memoryview"):
        data = bytes.fromhex(_checked(content, str))
        return data if kind == "bytes" else memoryview(data)
    if kind == "complex":
        real, imaginary = _checked(content, list)
        return complex(_float(real), _float(imaginary))
    if kind == "text":
        name, text = _checked(content, list)
        return _WAYS[_checked(name, str)][1](_class(name), _checked(text, str))
    if kind == "named":
        return _named()[_checked(content, str)]
    return find(kind, content)


def _checked(content: Any, kind: type) -> Any:
    if type(content) is not kind:
        raise ValueError(f"a message holds a malformed value: expected a {kind.__name__}")
    return content


def _float(content: Any) -> float:
    number = float.fromhex(_checked(content, str))
    if number != number:
        import math

        return (
            math.nan
        )  # the same object each time: [math.nan] == [math.nan] is true in one process
    return number


def _class(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _pair(value: Any) -> str:
    return f"{value.numerator}/{value.denominator}"


def _ratio(kind: Any, text: str) -> Any:
    numerator, denominator = text.split("/")
    return kind(int(numerator), int(denominator))


def _numbers(*names: str) -> Any:
    def written(value: Any) -> str:
        return ",".join(hex(getattr(value, name)) for name in names)

    return written, lambda kind, text: kind(*(int(part, 16) for part in text.split(",")))


def _iso(value: Any) -> str | None:
    zone = getattr(value, "tzinfo", None)
    known = zone is None or f"{type(zone).__module__}.{type(zone).__name__}" == "datetime.timezone"
    return value.isoformat() if known else None


def _from_iso(kind: Any, text: str) -> Any:
    return kind.fromisoformat(text)


def _zone(kind: Any, text: str) -> Any:
    import datetime

    offset, _, name = text.partition(" ")
    delta = datetime.timedelta(microseconds=int(offset))
    return kind(delta, name) if name else kind(delta)


def _zone_text(value: Any) -> str:
    import datetime

    offset = value.utcoffset(None) // datetime.timedelta(microseconds=1)
    name = value.tzname(None)
    return (
        f"{offset} {name}"
        if name != type(value)(value.utcoffset(None)).tzname(None)
        else str(offset)
    )


def _array(kind: Any, text: str) -> Any:
    code, _, data = text.partition(" ")
    return kind(code, bytes.fromhex(data))


_WAYS: dict[str, Any] = {
    "fractions.Fraction": (_pair, _ratio),
    "datetime.date": (_iso, _from_iso),
    "datetime.datetime": (_iso, _from_iso),
    "datetime.time": (_iso, _from_iso),
    "datetime.timedelta": _numbers("days", "seconds", "microseconds"),
    "datetime.timezone": (_zone_text, _zone),
    "builtins.range": _numbers("start", "stop", "step"),
    "array.array": (lambda value: f"{value.typecode} {value.tobytes().hex()}", _array),
    **{
        f"{module}.{name}": (str, lambda kind, text: kind(text))
        for module in _TEXTS
        for name in _CLASSES[module]
    },
}


@functools.cache
def _named() -> dict[str, Any]:
    """Return the classes and singletons that a message may name."""
    found = {
        f"builtins.{name}": value
        for name, value in vars(builtins).items()
        if isinstance(value, type) and value is not type
    }
    for module, names in (_CLASSES | _SINGLETONS).items():
        for name in [*names, *_SINGLETONS.get(module, ())]:
            place = importlib.import_module(module)
            if hasattr(place, name):
                found[f"{module}.{name}"] = getattr(place, name)
    return found


def _name(value: Any) -> str | None:
    """Return the name of a listed class or singleton."""
    try:
        return _names().get(value)
    except TypeError:  # it has no hash
        return None


class _Identities:
    def __init__(self, named: dict[str, Any]) -> None:
        self._names = {id(value): name for name, value in named.items()}

    def get(self, value: Any) -> str | None:
        return self._names.get(id(value))


@functools.cache
def _names() -> _Identities:
    return _Identities(_named())


def exception_name(kind: type[BaseException]) -> str | None:
    """Return the name of a class of exceptions that the tests' process may raise."""
    name = f"{kind.__module__}.{kind.__name__}"
    return name if known_exception(name) is kind else None


@functools.cache
def known_exception(name: str) -> type[BaseException] | None:
    """Return the class of exceptions with this name, if it is one that may be raised."""
    module, _, attribute = name.rpartition(".")
    if module not in _EXCEPTION_MODULES or not re.fullmatch(r"[A-Za-z]\w*", attribute):
        return None
    if module not in sys.modules:
        importlib.import_module(module)
    found: Any = getattr(sys.modules[module], attribute, None)
    is_exception = isinstance(found, type) and issubclass(found, BaseException)
    # Modules also hold exceptions of other modules, under their names.
    return found if is_exception and found.__name__ == attribute else None
