"""The server for the code under test, in a sandbox without the tests; see ``test_runner.py``.

It serves the requests of the tests: to import modules, get attributes, call functions and so on.
While it serves one, the code under test may call functions that a test passed to it: the tests'
side then answers before the request is done. Requests are pickled, because this side may trust the
tests; replies are lines of JSON, which the tests' side treats as untrusted data. That side alone
decides which tests passed.
"""

import copy
import importlib
import io
import json
import os
import pickle
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from primerl.sandbox.guest.jobs import operators, surroundings
from primerl.sandbox.guest.jobs.descriptions import References, plain_content
from primerl.sandbox.guest.jobs.shared_containers import SharedContainers
from primerl.sandbox.guest.jobs.stubs import Stubs, subclass

HEADER = struct.Struct("!Q")
_STEP_S = 0.001  # how long coroutines run before the tests' own coroutines run again
_LONGEST_TRACEBACK = 20_000


class CodeUnderTest:
    """The server's side of the connection, and its operations on the code under test."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rwb")
        self._containers = SharedContainers(sign=1)
        self._references = References(self._containers)
        self._stubs = Stubs(self._references, self.call_test)
        self._surroundings = surroundings.OfCode(self.call_test)
        self._turn = threading.RLock()  # held by the thread that reads and writes
        self._loop: Any = None

    def serve(self) -> None:
        """Serve requests until the connection closes."""
        with self._turn:
            while (request := self._receive()) is not None:
                self._send(self._answer(request))

    def call_test(self, **call: Any) -> Any:
        """Let the tests' side carry out an operation on one of its objects; return the result."""
        with self._turn:
            encode = self._references.encode
            call["args"] = [encode(value) for value in call.get("args", ())]
            call["kwargs"] = {key: encode(value) for key, value in call.get("kwargs", {}).items()}
            self._send({"call": call})
            while (request := self._receive()) is not None:
                if request["do"] == "answer":
                    if request["raised"] is not None:
                        raise request["raised"]
                    return request["value"]
                self._send(self._answer(request))
        os._exit(0)  # the tests have ended

    def _receive(self) -> Any:
        header = self._stream.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        message = pickle.loads(self._stream.read(HEADER.unpack(header)[0]))
        try:
            return self._request(message)
        except Exception as error:  # what the test sent can't be built here: the test is told
            return {"do": "refuse", "args": (error,)}

    def _request(self, message: dict[str, Any]) -> Any:
        for number, kind, _ in message["shared"]:
            if not self._containers.holds(number):
                self._containers.create(number, kind)
        request = self._load(message["request"])  # first, as it was encoded first
        for number, _, content in message["shared"]:
            self._containers.replace(number, self._load(content))
        self._surroundings.update(message["surroundings"])
        self._references.forget(message["forget"])
        self._containers.forget(message["unused"])
        return request

    def _load(self, data: bytes) -> Any:
        unpickler = pickle.Unpickler(io.BytesIO(data))
        unpickler.persistent_load = self._find  # type: ignore[method-assign]
        return unpickler.load()

    def _find(self, reference: Any) -> Any:
        kind, content = reference[0], reference[1:]
        if kind == "theirs":
            return self._references.find(*content)
        if kind == "shared":
            return self._containers.container(*content)
        if kind == "module":
            return importlib.import_module(*content)
        return self._stubs.find(*content)

    def _send(self, message: dict[str, Any]) -> None:
        message["shared"] = self._references.changed_containers()
        message["classes"] = self._references.new_classes()
        message |= self._surroundings.news(self._references.encode)
        self._stream.write(json.dumps(message).encode() + b"\n")
        self._stream.flush()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve a request; return its value, or the exception that the code under test raised."""
        self._turn.release()  # other threads of the code under test may call the tests meanwhile
        try:
            try:
                value = self._carry_out(**request)
            finally:
                self._turn.acquire()
            return {"value": self._references.encode(value)}
        except BaseException as error:  # even SystemExit: it must not end the server
            text = "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:]
            return {"raised": self._references.encode(error), "traceback": text}

    def _carry_out(
        self, *, do: str, of: Any = None, name: str = "", args: Any = (), kwargs: Any = None
    ) -> Any:
        if do == "import":
            return importlib.import_module(name)
        if do == "get":
            return getattr(of, name)
        if do == "set":
            return setattr(of, name, *args)
        if do == "delete":
            return delattr(of, name)
        if do == "call":
            return of(*args, **kwargs)
        if do == "operate":
            return operators.operate(name, of, list(args))
        if do in ("isinstance", "issubclass"):
            return (isinstance if do == "isinstance" else issubclass)(args[0], of)
        if do == "subclass":
            made = subclass(name, args[0], args[1], kwargs)
            return self._references.keep(made), made
        if do == "inherited":
            return _inherited(of, name, *args)
        return self._further(do, of, args)

    def _further(self, do: str, of: Any, args: Any) -> Any:
        if do == "functions":
            return [name for name, value in vars(of).items() if hasattr(value, "__get__")]
        if do == "members":
            return dict(vars(of))
        if do == "content":
            return plain_content(of)
        if do == "copy":
            return copy.copy(of)
        if do == "deepcopy":
            return copy.deepcopy(of)
        if do == "dumps":
            return pickle.dumps(of)
        if do == "loads":
            return pickle.loads(*args)
        if do == "start":
            return self._event_loop().create_task(_awaited(of))
        if do == "cancel":
            return of.cancel()
        if do == "step":
            return self._step(of)
        if do == "refuse":
            raise TypeError(f"what the test passed can't be created here: {args[0]!r}")
        raise ValueError(f"unknown request: {do!r}")

    def _event_loop(self) -> Any:
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
        return self._loop

    def _step(self, task: Any) -> Any:
        """Run coroutines for a short time; return whether the task is done, and its result."""
        loop = self._event_loop()
        if not task.done():
            timer = loop.call_later(_STEP_S, loop.stop)
            task.add_done_callback(_stop)
            loop.run_forever()
            task.remove_done_callback(_stop)
            timer.cancel()
        return (True, task.result()) if task.done() else (False, None)


def _inherited(instance: Any, name: str, owner: type) -> Any:
    """Return what ``owner`` defines by this name, bound to an instance of a subclass."""
    order = type(instance).__mro__
    before = order.index(owner) - 1
    return getattr(instance, name) if before < 0 else getattr(super(order[before], instance), name)


def _stop(task: Any) -> None:
    task.get_loop().stop()


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def main(paths: Sequence[str], packages: Sequence[str]) -> None:
    """Serve requests from the socket on stdin until it closes.

    Modules are imported from the working folder, from ``paths`` below it, and from ``packages``.
    """
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path[:0] = [os.getcwd(), *map(os.path.abspath, paths)]
    sys.path.extend(packages)
    with connection:
        CodeUnderTest(connection).serve()
