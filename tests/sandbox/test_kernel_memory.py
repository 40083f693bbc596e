"""Memory that the kernel holds for a sandbox is counted or bounded; honest programs keep theirs."""

import asyncio
import os
import time

import pytest
from sandboxed import everybodys_python, needed

from primerl.sandbox import SandboxLimits, SandboxPool, SandboxUnavailable
from primerl.sandbox.guest import watchdog

needed()

PRELUDE = """
import ctypes, errno, fcntl, mmap, os, select, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
def kernel_kib(*names):
    sizes = dict(line.split(":") for line in open("/proc/meminfo"))
    return sum(int(sizes[name].split()[0]) for name in names)
"""
# Each prints "PWNED" if it could hold more than its limit of memory.
ATTACKS = {
    "buffers of sockets": (
        "memory",
        """
def fill():
    kept = []
    for _ in range(65):
        for end in (pair := socket.socketpair()):
            for name in (7, 8): end.setsockopt(1, name, 4 << 20)
            end.setblocking(False)
            try:
                while True: end.send(bytes(1 << 16))
            except BlockingIOError: pass
        kept.append(pair)
    time.sleep(5); os._exit(0)
for _ in range(7):
    if os.fork() == 0: fill()
time.sleep(5); print("PWNED")
""",
    ),
    "page tables": (
        "memory",
        """
for _ in range(4):
    if os.fork() == 0:
        for k in range(12000):  # one page every GiB: two tables each
            at = libc.mmap((1 << 40) + (k << 30), 4096, 3, 0x100022, -1, 0)
            if at == ctypes.c_void_p(-1).value: break
            ctypes.memset(at, 1, 1)
        time.sleep(5); os._exit(0)
time.sleep(5); print("PWNED")
""",
    ),
    "mappings": (
        "memory",
        """
for _ in range(6):
    if os.fork() == 0:
        at = libc.mmap(None, 25000 << 12, 3, 0x22, -1, 0)
        for k in range(0, 25000, 2): libc.mprotect(ctypes.c_void_p(at + (k << 12)), 4096, 1)
        time.sleep(5); os._exit(0)
time.sleep(5); print("PWNED")
""",
    ),
    "memory behind many mappings": (
        "memory",
        """
for _ in range(3):
    if os.fork() == 0:
        at = libc.mmap(None, 16000 << 12, 3, 0x22, -1, 0)
        for k in range(0, 16000, 2): libc.mprotect(ctypes.c_void_p(at + (k << 12)), 4096, 1)
        block = bytearray(56 << 20); block[::4096] = b"x" * len(block[::4096])
        time.sleep(5); os._exit(0)
time.sleep(5); print("PWNED")
""",
    ),
    "mappings of a program that can't be read": (
        "memory",
        """
with open("/usr/bin/sleep", "rb") as source, open("hidden", "wb") as copy: copy.write(source.read())
try: os.chmod("hidden", 0o111)
except OSError: os.kill(0, 9)  # in a tier that forbids it
os.execv("hidden", ["hidden", "5"])
""",
    ),
    "locks": (
        "files",
        """
for k in range(40):
    file = open(f"locked{k}", "w+b")
    for n in range(500): fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * n)
    globals()[f"kept{k}"] = file
time.sleep(2); print("PWNED")
""",
    ),
    # Each process is a child of the one before; their main threads have ended.
    "memory of threads without their main threads": (
        "memory",
        """
import _thread, threading
threading.stack_size(256 << 10)
def body(level):
    # The end of the main thread loads a library, and a fork in its middle breaks the loader.
    time.sleep(0.2)
    if level < 20 and os.fork() == 0: chain(level + 1)
    time.sleep(1)
    ctypes.memset(libc.mmap(None, 16 << 20, 3, 0x22, -1, 0), 1, 16 << 20)
    time.sleep(5); os._exit(0)
def chain(level):
    _thread.start_new_thread(body, (level,))
    libc.pthread_exit(None)
ctypes.CDLL("libgcc_s.so.1")
if os.fork() == 0: chain(0)
time.sleep(10); print("PWNED")
""",
    ),
    "descriptions of open files": (
        "files",
        """
poll = select.epoll()
try: kept = [open(f"/proc/self/fdinfo/{poll.fileno()}") for _ in range(30)]
except OSError: os.kill(0, 9)  # in a tier that forbids it
for file in kept: file.read()
time.sleep(2); print("PWNED")
""",
    ),
}
HONEST = {
    # vfork's child runs in its parent's memory, which counts once.
    "subprocesses of a large program": """
import subprocess
block = bytearray(110 << 20); block[::4096] = b"x" * len(block[::4096])
for _ in range(40): subprocess.run(["true"], check=True)
print("fine")
""",
    "buffers keep their size": """
a, b = socket.socketpair()
before = a.getsockopt(1, 7)
a.setsockopt(1, 7, 4 << 20)
a.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
print("fine" if a.getsockopt(1, 7) == before and a.getsockopt(1, 2) else a.getsockopt(1, 7))
""",
    "a few hundred sockets and locks": """
kept = [socket.socketpair() for _ in range(100)]
file = open("locked", "w+b")
for n in range(500): fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * n)
time.sleep(0.4); print("fine")
""",
    "flushing is without effect": """
r, w = os.pipe()
os.fsync(r); os.fdatasync(w)  # the kernel itself would refuse to flush a pipe
with open("file", "w+b") as file:
    file.write(b"x"); file.flush()
    with mmap.mmap(file.fileno(), 1) as mapped: mapped.flush()
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
# The kernel itself would refuse these arguments.
print("fine" if libc.msync(1, 1, 99) == 0 == libc.sync_file_range(99, -1, -1, 99) else "flushed")
""",
    "no synchronous writes to the host's disk": """
def refusal(work):
    try: work()
    except OSError as error: return error.errno
file = os.open("file", os.O_CREAT | os.O_WRONLY)
found = [
    refusal(lambda: os.open("file", os.O_WRONLY | os.O_SYNC)),
    refusal(lambda: os.open("file", os.O_WRONLY | os.O_DSYNC)),
    refusal(lambda: os.pwritev(file, [b"x"], 0, os.RWF_SYNC)),
    refusal(lambda: os.pwritev(file, [b"x"], 0, os.RWF_DSYNC)),
]
refused = [errno.EINVAL] * 2 + [errno.EOPNOTSUPP] * 2
in_memory = os.getcwd() == "/sandbox"
print("fine" if found == ([None] * 4 if in_memory else refused) else found)
""",
    "nothing is spliced, and copying works": """
import shutil
def refusal(work):
    try: work()
    except OSError as error: return error.errno
a, b = socket.socketpair()
r, w = os.pipe(); other = os.pipe()
os.write(w, b"xy")
with open("file", "w+b") as file:
    file.write(b"x"); file.flush()
    works = [
        lambda: os.splice(r, a.fileno(), 1),
        lambda: os.splice(file.fileno(), w, 1, offset_src=0),
        lambda: os.sendfile(a.fileno(), file.fileno(), 0, 1),
    ]
    found = [refusal(work) for work in works]
    if libc.tee(r, other[1], 1, 2) < 0: found.append(ctypes.get_errno())
shutil.copyfile("file", "copy")
copied = open("copy", "rb").read() == b"x"
print("fine" if copied and found == [errno.EINVAL] * 4 else found)
""",
    "extended attributes are not supported, and copying works": """
import shutil, subprocess
acl = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, 7, 2**32 - 1) for tag in (1, 4, 0x20)
)
open("file", "w").write("x")
try: os.setxattr("file", "system.posix_acl_access", acl); found = "set"
except OSError as error: found = error.errno
os.mkdir("folder")
if os.getcwd() == "/sandbox":  # in the other tier, attributes can't be copied at all
    shutil.copy2("file", "copy"); subprocess.run(["cp", "-a", "file", "folder"], check=True)
print("fine" if found == errno.EOPNOTSUPP else found)
""",
    "inotify is missing": """
print("fine" if libc.inotify_init1(0) < 0 and ctypes.get_errno() == errno.ENOSYS else "there")
""",
    "times of devices": """
before = os.stat("/dev/null").st_mtime_ns
try: os.utime("/dev/null")
except OSError: pass
with open("/dev/null", "w") as nothing: nothing.write("x")
os.close(os.open("/dev/null", os.O_RDWR | os.O_CREAT | os.O_TRUNC))
print("fine" if os.stat("/dev/null").st_mtime_ns == before else "changed")
""",
}


def outcomes(tier, programs, **options):
    async def run():
        limits = SandboxLimits(memory_bytes=160 << 20)
        python = everybodys_python()
        async with SandboxPool(tier=tier, limits=limits, python=python, concurrency=1) as pool:
            found = {}
            for name, program in programs.items():
                found[name] = await pool.run(PRELUDE + program, timeout_s=60, **options)
            return found

    try:
        return asyncio.run(run())
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("tier", ["namespaces", "landlock"])
def test_kernel_memory_is_limited(tier):
    found = outcomes(tier, {name: program for name, (_, program) in ATTACKS.items()})
    for name, (limit, program) in ATTACKS.items():
        result = found[name]
        forbidden = result.exit == -9 and "in a tier that forbids it" in program
        assert result.limits_hit == (limit,) or forbidden, (name, result)


class OnlyThis:
    """As processes of a sandbox: this one, which has no filter of system calls."""

    def listed(self):
        return [str(os.getpid())]

    def kill(self):
        raise AssertionError


def test_process_that_is_not_confined_yet_hides_nothing(monkeypatch):
    """However long that takes: a new process can't be read before, and runs only our own code."""
    monkeypatch.setattr(watchdog, "_lines", lambda *_, **__: None)
    monkeypatch.setattr(watchdog, "_COUNTS_AT_LEAST_S", 0.0)
    limits = {"all_open_files": 1 << 20, "disk_bytes": 1 << 30, "files": 100, "processes": 8}
    limits["session"] = False
    dog = watchdog.Watchdog(
        memory_bytes=1 << 40,
        limits=limits,
        processes=OnlyThis(),
        written=lambda: (0, 0),
        sockets=lambda _: 0,
    )
    time.sleep(watchdog._COUNTS_EVERY_S)
    assert [dog.exceeded() for _ in range(3)] == [None] * 3
    monkeypatch.setattr(watchdog, "_is_confined", lambda _: True)
    assert dog.exceeded() == "memory"


@pytest.mark.parametrize("tier", ["namespaces", "landlock"])
def test_honest_programs_are_not_touched(tier):
    for name, result in outcomes(tier, HONEST).items():
        assert (result.stdout, result.limits_hit) == (b"fine\n", ()), (name, result)
