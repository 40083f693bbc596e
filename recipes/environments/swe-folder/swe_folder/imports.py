"""Imports and assertions of Python files, read without executing them."""

import ast
from functools import lru_cache
from typing import Any

_IMPORTING = ("import_module", "importorskip", "__import__")
_PLUGINS = "pytest_plugins"
_TEST_TOOLS = ("pytest", "unittest", "hypothesis", "doctest", "nose")


def imported(path: str, file: Any) -> frozenset[str]:
    """Return the dotted names that a file imports; each name may be a module or an attribute."""
    return _read(path, file)[0] if isinstance(file, bytes) else frozenset()


def is_test_code(path: str, file: Any) -> bool:
    """Check whether a file uses test tools or has assertions."""
    return isinstance(file, bytes) and _read(path, file)[1]


@lru_cache(maxsize=4096)
def _read(path: str, content: bytes) -> tuple[frozenset[str], bool]:
    names: set[str] = set()
    asserts = False
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset(), False
    package = path.split("/")[:-1]
    for node in ast.walk(tree):
        asserts |= isinstance(node, ast.Assert)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *(node.module or "").split(".")]).strip(".")
            names |= {origin, *(f"{origin}.{alias.name}".strip(".") for alias in node.names)}
        elif isinstance(node, ast.Assign) and _PLUGINS in map(_name, node.targets):
            names |= {
                part.value
                for part in ast.walk(node.value)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            }
        elif isinstance(node, ast.Call) and node.args and _name(node.func) in _IMPORTING:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                names.add(argument.value)
    tests = any(name.partition(".")[0] in _TEST_TOOLS for name in names)
    return frozenset(names), asserts or tests


def _name(function: ast.expr) -> str | None:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None
