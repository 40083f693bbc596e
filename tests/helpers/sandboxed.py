"""Test helpers for sandboxes: skip conditions, pools and leftover processes."""

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
    """Return the reason why no sandbox can be created here, or an empty string."""

    async def attempt() -> str:
        try:
            async with SandboxPool(concurrency=1):
                return ""
        except SandboxUnavailable as error:
            return str(error)

    return asyncio.run(attempt())


def needed() -> None:
    """Skip the test or the test module, with the reason, if no sandbox can be created."""
    if reason := reason_against():
        pytest.skip(f"no sandboxes here: {reason}", allow_module_level=True)


def everybodys_python() -> str:
    """Return an interpreter that sandboxes of any user can read."""
    own = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    closed = [path for path in Path(own).parents if not path.stat().st_mode & stat.S_IXOTH]
    return "/usr/bin/python3" if closed else own


def with_pool(test: Callable[[SandboxPool], Coroutine[Any, Any, Any]], **arguments: Any) -> Any:
    """Run ``test`` with a running pool, and return its result."""

    async def run() -> Any:
        async with SandboxPool(**arguments) as pool:
            return await test(pool)

    return asyncio.run(run())


def processes_with(mark: str) -> list[str]:
    """Return the ids of processes whose command line contains ``mark``."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if mark.encode() in file.read():
                    found.append(name)
        except OSError:
            pass
    return found
