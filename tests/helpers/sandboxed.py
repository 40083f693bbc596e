"""Where sandboxes can be made, and what they leave behind."""

import asyncio
import os
import stat
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from primerl.sandbox import SandboxPool, SandboxUnavailable


def reason_against() -> str:
    """Why no sandbox can be made here, or an empty string."""

    async def attempt() -> str:
        try:
            async with SandboxPool(concurrency=1):
                return ""
        except SandboxUnavailable as error:
            return str(error)

    return asyncio.run(attempt())


def needed() -> None:
    """Skip the test, or the test module, with the reason, where no sandbox can be made."""
    if reason := reason_against():
        pytest.skip(f"no sandboxes here: {reason}", allow_module_level=True)


def everybodys_python() -> str:
    """An interpreter that sandboxes can read, whoever they belong to."""
    own = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    closed = [path for path in Path(own).parents if not path.stat().st_mode & stat.S_IXOTH]
    return "/usr/bin/python3" if closed else own


def with_pool(test: Callable[[SandboxPool], Coroutine[Any, Any, Any]], **arguments: Any) -> Any:
    """The result of ``test`` with a running pool."""

    async def run() -> Any:
        async with SandboxPool(**arguments) as pool:
            return await test(pool)

    return asyncio.run(run())


def processes_with(mark: str) -> list[str]:
    """Process ids whose command line holds ``mark``."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if mark.encode() in file.read():
                    found.append(name)
        except OSError:
            pass
    return found
