"""The server for the code under test, in a sandbox without the tests; see ``test_runner.py``.

It serves requests to import modules, get attributes, call functions and so on. Each request is one
line of JSON on a socket, which is stdin. Plain values are sent by value, and every other object as
a number that identifies it. To the testing side, all replies are untrusted data: that side alone
decides which tests passed.
"""

import builtins
import importlib
import json
import operator
import os
import socket
import sys
from typing import Any

from primerl.sandbox.guest.jobs.values import decode, encode

LONGEST_LINE = 8 << 20
_MOST_OBJECTS = 1_000_000
_BUILT_IN = (
    *("len", "iter", "next", "str", "repr", "hash", "bool", "float", "int", "abs", "reversed"),
    *("round", "dir"),
)


class CodeUnderTest:
    """The server's table of objects that tests may refer to, and its operations on them."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve a request; return its value, or the exception that the code under test raised."""
        try:
            return {"value": self.encode(self._carry_out(request))}
        except BaseException as error:  # even SystemExit: it must not end the server
            return {"raised": self.encode(error), "text": str(error)[:10000]}

    def _carry_out(self, request: dict[str, Any]) -> Any:
        kind = request["do"]
        if kind == "import":
            return importlib.import_module(request["name"])
        target = self._objects[request["of"]]
        if kind == "get":
            return getattr(target, request["name"])
        arguments = [decode(item, self._find) for item in request.get("args", [])]
        if kind == "set":
            return setattr(target, request["name"], *arguments)
        if kind == "call":
            names = {key: decode(item, self._find) for key, item in request["kwargs"].items()}
            return target(*arguments, **names)
        if kind == "isinstance":
            return isinstance(arguments[0], target)
        return self._operate(request["name"], target, arguments)

    @staticmethod
    def _operate(name: str, target: Any, arguments: list[Any]) -> Any:
        """Apply an operator or a built-in function, such as ``add`` or ``len``, to an object."""
        if name in _BUILT_IN:
            return getattr(builtins, name)(target, *arguments)
        if name.startswith("r_"):
            return getattr(operator, name[2:])(arguments[0], target)
        if name in ("enter", "exit"):
            return getattr(type(target), f"__{name}__")(target, *arguments)
        return getattr(operator, name)(target, *arguments)

    def encode(self, value: Any) -> Any:
        """Encode a value for the testing side."""
        return encode(value, self._refer)

    def _refer(self, value: Any) -> Any:
        if len(self._objects) > _MOST_OBJECTS:
            raise MemoryError(
                "the tests hold references to too many objects of the code under test"
            )
        self._objects[id(value)] = value  # kept alive, so that its id stays unique
        about: dict[str, Any] = {"id": id(value)}
        if isinstance(value, type) and issubclass(value, BaseException):
            about["bases"] = [base.__name__ for base in value.__mro__]
        elif isinstance(value, BaseException):
            about["error"] = encode(type(value), self._refer)
        return {"object": about}

    def _find(self, kind: str, content: Any) -> Any:
        if kind != "object":
            raise ValueError(f"unknown kind of value: {kind!r}")
        return self._objects[content]


def main() -> None:
    """Serve requests from the socket on stdin until it closes."""
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path.insert(0, os.getcwd())
    code = CodeUnderTest()
    with connection, connection.makefile("rwb") as lines:
        while line := lines.readline(LONGEST_LINE):
            answer = code.answer(json.loads(line))
            lines.write(json.dumps(answer).encode() + b"\n")
            lines.flush()
