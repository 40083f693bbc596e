"""Makes sandboxes: started once per pool with an empty environment, it never runs untrusted code.

Run as ``zygote.main(descriptor)`` by a new interpreter; see ``primerl/sandbox/launching.py``.
"""

import gc
import json
import os
import platform
import select
import signal
import socket
import time
import traceback
from typing import Any, NoReturn

from primerl.sandbox.engine import (
    init,
    kernel,
    landlock,
    messages,
    namespaces,
    seccomp,
    skeleton,
)

# Users that no account has. One for each pool, so that limits that count by user hold for each.
_FIRST_USER = 2_000_000_000
# What most programs import; each further module makes every fork slower.
_PRELOADED = (
    *("collections", "itertools", "functools", "heapq", "bisect", "math", "re", "string"),
    *("random", "typing", "copy", "io", "linecache", "threading"),
)


def main(descriptor: int) -> NoReturn:
    """Become keeper and zygote; both end when their owner does, or lets go of the socket."""
    connection = socket.socket(fileno=descriptor)
    data, _ = messages.receive(connection)
    config = json.loads(data)
    owner = os.pidfd_open(config["owner"])
    if os.getppid() != config["owner"]:  # it died before that call
        os._exit(1)
    keeper = os.getpid()
    zygote = os.fork()
    if zygote == 0:
        _run(connection, config, owner, keeper)
    connection.close()
    _keep(zygote, owner, config["folder"])


def _keep(zygote: int, owner: int, folder: str) -> NoReturn:
    """Wait for the end of the zygote, or end it with its owner; then remove the pool's folder."""
    import shutil

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its owner, not with its terminal
    handle = os.pidfd_open(zygote)
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    poll.register(handle, select.POLLIN)
    poll.poll()
    signal.pidfd_send_signal(handle, signal.SIGTERM)
    poll.unregister(owner)
    if not poll.poll(2000):
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    os.waitpid(zygote, 0)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _run(connection: socket.socket, config: dict[str, Any], owner: int, keeper: int) -> NoReturn:
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        zygote = _prepared(connection, config, owner)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() == keeper:
            zygote.serve()
            code = 0
    except Exception as error:  # reported to the owner, whatever it is
        failure = {"failed": str(error), "errno": getattr(error, "errno", None) or 0}
        if not isinstance(error, OSError):
            failure["failed"] = traceback.format_exc()
        connection.send(json.dumps(failure).encode()[: messages.LARGEST])
    finally:
        os._exit(code)


def _prepared(connection: socket.socket, config: dict[str, Any], owner: int) -> "Zygote":
    for name in _PRELOADED:
        __import__(name)
    filter_program = seccomp.program(platform.machine(), sockets=True)
    with_landlock = landlock.version() > 0
    user = free_user()  # other than 0 only for real root, which must not own a sandbox
    skeleton.enter_namespaces(as_root=user != 0)
    # Written to through a shared mapping, /dev/zero gives memory that nothing counts.
    devices = [name for name in skeleton.DEVICES if name != "zero" or with_landlock]
    skeleton.build(
        f"{config['folder']}/skeleton",
        readable=config["readable"],
        roots=f"{config['folder']}/roots",
        devices=devices,
    )
    if user != 0:
        skeleton.become_user(user)
    if not os.access(os.__file__, os.R_OK):
        raise PermissionError(f"sandboxes can't read the interpreter's library, {os.__file__}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # so that forks share these pages
    gc.disable()  # until code of a sandbox runs: see the interpreter
    settings = config["settings"] | {"landlock": with_landlock}
    return Zygote(connection, settings, owner, user, filter_program, config["lease_s"])


class Zygote:
    """Makes one sandbox a request, and ends if its owner is gone or silent for ``lease_s``."""

    def __init__(
        self,
        connection: socket.socket,
        settings: dict[str, Any],
        owner: int,
        user: int,
        filter_program: bytes,
        lease_s: float,
    ) -> None:
        self._connection = connection
        self._settings = settings
        self._owner = owner
        self._user = user
        self._filter = filter_program
        self._lease_s = lease_s

    def serve(self) -> None:
        """Serve until the owner ends, closes the connection, or is silent for too long."""
        ready = {"ready": True, "landlock": self._settings["landlock"], "user": self._user}
        self._connection.send(json.dumps(ready).encode())
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._owner, select.POLLIN)
        heard = time.monotonic()
        while time.monotonic() < heard + self._lease_s:
            events = [fd for fd, _ in poll.poll(1000 * self._lease_s / 4)]
            if self._owner in events:
                return
            if self._connection.fileno() in events:
                data, _ = messages.receive(self._connection)
                if not data:
                    return
                heard = time.monotonic()
                request = json.loads(data)
                if "sandbox" in request:
                    self._make(request)

    def _make(self, request: dict[str, Any]) -> None:
        """Make one sandbox; its control socket and a handle of its first process go to the
        owner.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = kernel.fork_into_namespaces(namespaces.FLAGS)
        except OSError as error:
            answer = {"sandbox": request["sandbox"], "failed": str(error), "errno": error.errno}
            self._connection.send(json.dumps(answer).encode())
            ours.close()
            theirs.close()
            return
        if pid == 0:
            ours.close()
            self._become_sandbox(theirs, request)
        theirs.close()
        handle = os.pidfd_open(pid)
        answer = {"sandbox": request["sandbox"], "pid": pid}
        socket.send_fds(self._connection, [json.dumps(answer).encode()], [ours.fileno(), handle])
        ours.close()
        os.close(handle)

    def _become_sandbox(self, control: socket.socket, request: dict[str, Any]) -> NoReturn:
        code = 1
        try:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))
            self._connection.close()
            os.close(self._owner)
            settings = self._settings | request["settings"]
            library = os.stat(os.__file__)
            try:
                listener = namespaces.set_up(settings, uid=self._user, gid=self._user)
            except OSError as error:
                failure = {"failed": str(error), "errno": error.errno or 0}
                control.send(json.dumps(failure).encode()[: messages.LARGEST])
                os._exit(1)
            kernel.prctl(kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))
            listeners = [] if listener is None else [listener.fileno()]
            socket.send_fds(control, [b'{"ready": true}'], listeners)
            if listener is not None:
                listener.close()
            init.main(control, settings, filter_program=self._filter, shared=_same_library(library))
            code = 0
        except BaseException:  # never back into the zygote's loop
            traceback.print_exc()
        finally:
            os._exit(code)


def _same_library(before: os.stat_result) -> bool:
    """Whether this interpreter's library is still the one under its path."""
    try:
        return os.path.samestat(before, os.stat(os.__file__))
    except OSError:
        return False


def free_user() -> int:
    """A user that no account and no other pool has, or 0 for an ordinary user.

    0 is also how an ordinary user is called in its own user namespace; so is the only user of a
    container that maps no other.
    """
    if os.getuid() != 0:
        return 0
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    wanted = _FIRST_USER + os.getpid()
    if any(first <= wanted < first + count for first, _, count in ranges):
        return wanted
    first, _, count = max(ranges, key=lambda entry: entry[2])
    return first + 1 + (count // 2 + os.getpid()) % (count - 1) if count > 1 else 0
