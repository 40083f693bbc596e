"""The testing side of a test suite: pytest, with the code under test in another sandbox.

``import`` of a listed module gives a stand-in, whose attributes, calls and operators are carried
out by ``subject.py`` at the other end of a socket. So nothing of the tested code ever runs in this
process, and it has no way to the results that this one reports. Plain values are compared here.
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

from primerl.sandbox.engine.work.stand_ins import Link, StandIn


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports listed modules, and those below them, from the other side."""

    def __init__(self, link: Link, modules: Sequence[str]) -> None:
        self._link = link
        self._modules = tuple(modules)

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        del path, target  # a top-level module decides for all below it
        if name.partition(".")[0] in self._modules:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Ask the other side to import it."""
        module = _Module(spec.name)
        module.__dict__["_stand_in"] = self._link.ask(do="import", name=spec.name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: the module was executed on the other side."""


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__all__", "__version__"):
            raise AttributeError(name)
        stand_in = self.__dict__["_stand_in"]
        asking = sys._getframe(1)
        if name == "__all__" and asking.f_locals is asking.f_globals:  # by import *, for its module
            return _starred(stand_in, taken={*dir(builtins), *asking.f_globals})
        return getattr(stand_in, name)


def _starred(module: StandIn, *, taken: set[str]) -> list[str]:
    """The names for ``import *``, but for taken ones: a test's ``abs`` and ``pytest`` stay so."""
    try:
        names = module.__all__
    except AttributeError:
        names = [name for name in module._operate("dir") if not name.startswith("_")]
    return [name for name in names if name not in taken]


class Reporter:
    """A plugin of pytest's that reports one line per test."""

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note the outcome of a phase of a test: the worst counts."""
        before = self._outcomes.get(report.nodeid, "passed")
        if report.outcome != "passed" and before in ("passed", "skipped"):
            self._outcomes[report.nodeid] = report.outcome
        elif report.when == "call":
            self._outcomes[report.nodeid] = before

    def pytest_sessionfinish(self) -> None:
        """Report all outcomes at once."""
        data = json.dumps(self._outcomes).encode()
        with open(self._channel, "wb", closefd=False) as file:
            file.write(data)


def main(modules: list[str], packages: list[str], files: list[str]) -> int:
    """Run pytest over ``files``; outcomes go to stdout, what pytest prints to stderr."""
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    channel = os.dup(1)
    os.dup2(2, 1)
    sys.meta_path.insert(0, _Finder(Link(connection), modules))
    sys.path.extend(packages)
    import pytest

    options = ["-p", "no:cacheprovider", "-q", "--import-mode=importlib", "-o", "addopts="]
    return int(pytest.main([*options, *files], plugins=[Reporter(channel)]))
