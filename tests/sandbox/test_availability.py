"""Machines that can't make sandboxes are told what is missing, and what to do."""

import asyncio
import errno
import os
import platform
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from sandboxed import needed, with_pool

from primerl.sandbox import SandboxPool, SandboxUnavailable, probe
from primerl.sandbox.guest.isolation import seccomp, subordinate_users, syscalls

REPOSITORY = Path(__file__).parents[2]

# Enters a pool where a seccomp filter refuses new namespaces, as a container's does. The
# filter is the sandbox's own, as it happens.
CONTAINER = """
import asyncio, platform
from primerl.sandbox import SandboxPool, SandboxUnavailable
from primerl.sandbox.guest.isolation import seccomp

async def main():
    seccomp.install(seccomp.program(platform.machine(), sockets=True))
    try:
        async with SandboxPool(): print("no refusal")
    except SandboxUnavailable as error:
        print(error)
        print([probe.errno for probe in error.probes if not probe.ok])

asyncio.run(main())
"""


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")

    async def enter():
        async with SandboxPool(python=sys.executable):
            pass

    with pytest.raises(
        SandboxUnavailable, match=r"Linux machine.*darwin|darwin.*Linux machine"
    ) as info:
        asyncio.run(enter())
    assert "virtual machine" in str(info.value)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs seccomp")
def test_container_without_namespaces_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", CONTAINER],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        env=dict(os.environ, PYTHONPATH=str(REPOSITORY)),
    )
    assert "EPERM" in done.stdout, done
    assert "user namespace" in done.stdout
    assert "--security-opt" in done.stdout
    assert f"{int(errno.EPERM)}" in done.stdout.splitlines()[-1]
    assert "no refusal" not in done.stdout


def test_probes_say_what_works():
    needed()
    probes = {found.name: found for found in asyncio.run(probe())}
    assert probes["user namespace"].ok
    assert probes["seccomp filter"].ok


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_has_a_table_for(machine):
    program = seccomp.program(machine, sockets=True)
    assert len(program) % 8 == 0
    assert len(program) // 8 < 4096  # the kernel's limit
    numbers = syscalls.allowed(machine, sockets=True, attributes=True)
    assert len(set(numbers)) == len(numbers)


def test_tables_agree_with_the_headers():
    """Against the C library's own numbers, where its headers are installed."""
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    generic = Path("/usr/include/asm-generic/unistd.h")
    if not header.exists() or not generic.exists():
        pytest.skip("the kernel's headers are not installed")
    names = {"x86_64": header, "aarch64": generic}
    checked = 0
    for column, path in enumerate(names.values()):
        known = {}
        for line in path.read_text().splitlines():
            parts = line.split()
            if len(parts) == 3 and parts[0] == "#define" and parts[2].isdigit():
                name = parts[1].removeprefix("__NR3264_").removeprefix("__NR_")
                known[name] = int(parts[2])
        known["newfstatat"] = known.get("newfstatat", known.get("fstatat", -1))
        tables = (syscalls._FILES, syscalls._ATTRIBUTES, syscalls._TIMES, syscalls._PROC)
        for table in (*tables, syscalls._NET, syscalls._SEND, syscalls._CHECKED):
            for entry in table.split():
                name, *numbers = entry.split(":")
                if numbers[column] != "-" and name in known:
                    assert int(numbers[column]) == known[name], name
                    checked += 1
    assert checked > 250


def test_other_machines_are_refused():
    with pytest.raises(ValueError, match="riscv64"):
        seccomp.program("riscv64", sockets=True)


def test_isolation_is_described():
    needed()

    async def describe(pool):
        return pool.isolation

    isolation = with_pool(describe, concurrency=1)
    assert isolation.tier == "namespaces"
    assert isolation.shared_kernel
    assert "watchdog" in isolation.memory
    assert "kernel" in str(isolation)
    assert platform.system() == "Linux"


@pytest.mark.parametrize(
    ("lines", "granted"),
    [
        ("other:1:5\n{name}:100000:65536\n{name}:1:2", ("100000", "65536")),
        ("{uid}:7:2", ("7", "2")),
        ("{name}:7:1", None),  # one for each sandbox is too few
        ("{name}:x:65536\n{name}:7\n\n", None),
        ("", None),
    ],
)
def test_subordinate_users_are_read_from_their_file(tmp_path, lines, granted):
    user = pwd.getpwuid(os.getuid())
    (tmp_path / "subuid").write_text(lines.format(name=user.pw_name, uid=user.pw_uid))
    assert subordinate_users._granted(str(tmp_path / "subuid")) == granted
    assert subordinate_users._granted(str(tmp_path / "missing")) is None
