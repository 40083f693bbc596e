"""The testing side of a test suite: pytest, with the code under test in another sandbox.

Importing a listed module returns a proxy whose attributes, calls and operators are executed by
``code_under_test.py``, at the other end of a socket. So the code under test never runs in this
process, and it can't reach the results that this process reports. Plain values are compared here.
"""

import builtins
import importlib.abc
import importlib.machinery
import json
import os
import socket
import sys
import types
from collections.abc import Sequence
from typing import Any

from primerl.sandbox.guest.jobs.remote_objects import Link, RemoteObject


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook that loads listed modules and their submodules from the code under test."""

    def __init__(self, link: Link, modules: Sequence[str]) -> None:
        self._link = link
        self._modules = tuple(modules)

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a listed module or one of its submodules, else None."""
        del path, target  # the top-level name decides for all submodules
        if name.partition(".")[0] in self._modules:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Import the module in the other sandbox, and return a proxy for it."""
        module = _Module(spec.name)
        module.__dict__["_stand_in"] = self._link.ask(do="import", name=spec.name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module was executed in the other sandbox."""


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__all__", "__version__"):
            raise AttributeError(name)
        stand_in = self.__dict__["_stand_in"]
        asking = sys._getframe(1)
        if name == "__all__" and asking.f_locals is asking.f_globals:  # import * at module level
            return _starred(stand_in, taken={*dir(builtins), *asking.f_globals})
        return getattr(stand_in, name)


def _starred(module: RemoteObject, *, taken: set[str]) -> list[str]:
    """Return the names for ``import *``, without those in ``taken``, such as ``abs``."""
    try:
        names = module.__all__
    except AttributeError:
        names = [name for name in module._operate("dir") if not name.startswith("_")]
    return [name for name in names if name not in taken]


class Reporter:
    """A pytest plugin that reports each test's outcome."""

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record the outcome of one phase of a test; the worst phase counts."""
        before = self._outcomes.get(report.nodeid, "passed")
        if report.outcome != "passed" and before in ("passed", "skipped"):
            self._outcomes[report.nodeid] = report.outcome
        elif report.when == "call":
            self._outcomes[report.nodeid] = before

    def pytest_sessionfinish(self) -> None:
        """Write all outcomes to the channel as JSON."""
        data = json.dumps(self._outcomes).encode()
        with open(self._channel, "wb", closefd=False) as file:
            file.write(data)


def main(modules: list[str], packages: list[str], files: list[str]) -> int:
    """Run pytest on ``files``; send outcomes to stdout and pytest's own output to stderr."""
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    channel = os.dup(1)
    os.dup2(2, 1)
    sys.meta_path.insert(0, _Finder(Link(connection), modules))
    sys.path.extend(packages)
    import pytest

    options = ["-p", "no:cacheprovider", "-q", "--import-mode=importlib", "-o", "addopts="]
    return int(pytest.main([*options, *files], plugins=[Reporter(channel)]))
