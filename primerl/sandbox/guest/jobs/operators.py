"""The operators and built-in functions that are forwarded between tests and code under test."""

import builtins
import operator
from typing import Any

BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"),
    *("lshift", "rshift", "matmul", "divmod"),
)
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
UNARY: tuple[str, ...] = (
    "neg",
    "pos",
    "invert",
    "abs",
    "round",
    "trunc",
    "floor",
    "ceil",
    "float",
    "int",
    "complex",
)
UNARY += ("index", "bool")
OTHER = (
    *("len", "str", "repr", "hash", "reversed", "iter", "next", "contains", "getitem", "setitem"),
    *("delitem", "format", "bytes", "fspath", "dir", "length_hint"),
    *("aiter", "anext", "aenter", "aexit", "enter", "exit", "get", "set", "delete", "set_name"),
)
INPLACE = tuple(f"i{name}" for name in BINARY if name != "divmod")
_BUILT_IN = (
    *("len", "iter", "next", "str", "repr", "hash", "bool", "float", "int", "abs", "reversed"),
    *("round", "dir", "complex", "format", "bytes", "divmod"),
)
_SPECIAL = (
    *("enter", "exit", "aiter", "anext", "aenter", "aexit", "get", "set", "delete", "set_name"),
    *("length_hint", "trunc", "floor", "ceil", "fspath"),
)
ALL = (*BINARY, *(f"r{name}" for name in BINARY), *INPLACE, *COMPARISONS, *UNARY, *OTHER)


def operate(name: str, target: Any, arguments: list[Any]) -> Any:
    """Apply an operator or a built-in function, such as ``add`` or ``len``, to an object.

    Raises:
        ValueError: there is no operator with this name.
    """
    if name not in ALL:
        raise ValueError(f"unknown operator: {name!r}")
    if name in _BUILT_IN:
        return getattr(builtins, name)(target, *arguments)
    if name in _SPECIAL:
        return getattr(type(target), f"__{name}__")(target, *arguments)
    if name.startswith("r") and name[1:] in BINARY:
        return _binary(name[1:])(arguments[0], target)
    return _binary(name)(target, *arguments)


def _binary(name: str) -> Any:
    if name == "pow":
        return pow
    return divmod if name == "divmod" else getattr(operator, f"__{name}__")
