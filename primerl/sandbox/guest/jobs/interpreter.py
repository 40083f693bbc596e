"""A forked interpreter that runs code as if it had just been started.

Forking takes a tenth of the time of starting a new interpreter. Modules that were loaded before the
fork stay loaded.
"""

import builtins
import gc
import io
import random
import sys
import threading
import traceback
import types

from primerl.sandbox.guest.isolation import shared_root

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": shared_root.HOME,
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_REHEARSAL = """
def double(number):
    return 2 * number
assert double(1) == 2
"""


def run(code: str, home: str) -> int:
    """Run a program as the main module of this interpreter; return its exit code."""
    forget_guest()
    module = fresh_main(code, home)
    status = 0
    try:
        exec(compile(code, "main.py", "exec"), module.__dict__)
    except SystemExit as stop:
        status = _exit_code(stop)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.settrace(None)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # an interpreter does this before it exits
        _run_at_exit()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        status = status or 120
    return status


def rehearse() -> None:
    """Run a small program, to warm up what every program needs."""
    path = sys.path[:]
    module = fresh_main("", "")
    exec(compile(_REHEARSAL, "main.py", "exec"), module.__dict__)
    sys.path[:] = path


def fresh_main(code: str, home: str) -> types.ModuleType:
    """Create a new ``__main__``, with streams, path and random state as in a new interpreter."""
    import linecache

    gc.enable()
    random.seed()
    sys.argv = ["main.py"]
    sys.path.insert(0, home)
    sys.path_importer_cache.clear()
    streams = {name: _stream(number) for number, name in enumerate(("stdin", "stdout", "stderr"))}
    for name, stream in streams.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    lines = code.splitlines(keepends=True)
    linecache.cache["main.py"] = (len(code), None, lines, "main.py")
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return module


def _stream(number: int) -> io.TextIOWrapper:
    mode = "r" if number == 0 else "w"
    errors = "backslashreplace" if number == 2 else "surrogateescape"
    stream = open(number, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115 - stays open
    assert isinstance(stream, io.TextIOWrapper)
    if number == 2:
        stream.reconfigure(line_buffering=True)
    return stream


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    sys.stderr.write(f"{stop.code}\n")
    return 1


def _run_at_exit() -> None:
    import atexit

    atexit._run_exitfuncs()


def forget_guest() -> None:
    """Unload the guest code, so that ``import primerl`` can't return the guest's modules."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "primerl"]:
        del sys.modules[name]
    sys.path[:] = sys.path[1:]  # drops the guest code's own path: see ``tiers/guest_files.py``
