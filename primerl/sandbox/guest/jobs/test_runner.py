"""The testing side of a test suite: pytest, with the code under test in another sandbox.

Importing a listed module returns a proxy whose attributes, calls and operators are executed by
``code_under_test.py``, at the other end of a socket. So the code under test never runs in this
process, and it can't reach the results that this process reports. Plain values are compared here.
"""

import importlib.abc
import importlib.machinery
import json
import os
import socket
import sys
import tempfile
import types
from collections.abc import Sequence
from typing import Any

from primerl.sandbox.guest.jobs.links import Link, RemoteModule, local_spec


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook that loads listed modules and their submodules from the code under test.

    A submodule that is not listed itself, and that has a file here, is imported from that file: it
    belongs to the tests.
    """

    def __init__(self, link: Link, modules: Sequence[str]) -> None:
        self._link = link
        self._modules = tuple(modules)

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a listed module or one of its submodules, else None."""
        del target
        if name.partition(".")[0] not in self._modules:
            return None
        local = local_spec(name, path)
        if local is not None and name not in self._modules:
            return local
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        if local is not None and local.submodule_search_locations is not None:
            spec.submodule_search_locations = list(local.submodule_search_locations)
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Import the module in the other sandbox, and return a proxy for it."""
        module = RemoteModule(spec.name)
        module.__dict__["_stand_in"] = self._link.ask(do="import", name=spec.name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module was executed in the other sandbox."""


class Reporter:
    """A pytest plugin that reports each test's outcome."""

    def __init__(self, channel: int, link: Link) -> None:
        self._channel = channel
        self._link = link
        self._outcomes: dict[str, str] = {}
        self._called: set[str] = set()

    def pytest_configure(self, config: Any) -> None:
        """Keep pytest-xdist from using other processes, which would lack the import hook."""
        if hasattr(config.option, "dist"):
            config.option.dist = "no"

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record the outcome of one phase of a test; the worst phase counts."""
        self._explain(report)
        name = report.nodeid
        before = self._outcomes.get(name, "passed")
        if report.outcome != "passed" and before in ("passed", "skipped"):
            self._outcomes[name] = report.outcome
        elif report.when == "call":
            self._called.add(name)
        elif report.when == "teardown" and name in self._called:
            # Not before: code under test can interrupt the session in the teardown.
            self._outcomes.setdefault(name, "passed")

    def pytest_collectreport(self, report: Any) -> None:
        """Explain why a file could not be collected."""
        self._explain(report)

    def _explain(self, report: Any) -> None:
        """Add the last traceback of the code under test to the report of a failure."""
        if report.failed and self._link.traceback:
            title = "Last traceback in the code under test"
            report.sections.append((title, self._link.traceback))
        self._link.traceback = ""

    def pytest_sessionfinish(self, session: Any) -> None:
        """Write each outcome to the channel as a line of JSON: its name, from here, and outcome."""
        named = session.config.cwd_relative_nodeid
        rows = (json.dumps([named(name), value]) for name, value in self._outcomes.items())
        data = "".join(f"{row}\n" for row in rows).encode()
        with open(self._channel, "wb", closefd=False) as file:
            file.write(data)


def main(header: dict[str, Any]) -> int:
    """Run pytest on ``header["run"]``; send outcomes to stdout and pytest's output to stderr."""
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    channel = os.dup(1)
    os.dup2(2, 1)
    link = Link(connection, folder=os.getcwd())
    sys.meta_path.insert(0, _Finder(link, header["modules"]))
    sys.path[:0] = [os.getcwd(), *map(os.path.abspath, header["paths"])]
    sys.path.extend(header["packages"])
    import pytest

    temporary = os.path.join(tempfile.gettempdir(), "pytest")  # as the link has set it
    options = ["-p", "no:cacheprovider", "-q", f"--basetemp={temporary}"]
    try:
        return int(pytest.main([*options, *header["run"]], plugins=[Reporter(channel, link)]))
    finally:
        sys.stdout.flush()  # this process ends without doing so
