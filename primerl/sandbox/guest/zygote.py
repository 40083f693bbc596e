"""The zygote and its keeper: forks sandboxes, and cleans up when the owner ends.

A new interpreter with an almost empty environment runs ``zygote.main(descriptor)`` once per pool;
see ``tiers/local/zygote_process.py``. Neither process ever runs untrusted code.
"""

import gc
import json
import os
import select
import signal
import socket
import time
import traceback
from typing import Any, NoReturn

from primerl.sandbox.guest import messages, processes, removal
from primerl.sandbox.guest.isolation import kernel, landlock
from primerl.sandbox.guest.isolation.landlock_sandbox import LandlockSandbox
from primerl.sandbox.guest.isolation.namespace_sandbox import NamespaceSandbox

_SWEEP_S = 5.0
# Modules that most programs import. Each additional module makes every fork slower.
_PRELOADED = (
    *("collections", "itertools", "functools", "heapq", "bisect", "math", "re", "string"),
    *("random", "typing", "copy", "io", "linecache", "threading", "atexit"),
)

Way = NamespaceSandbox | LandlockSandbox
_WAYS: dict[str, type[Way]] = {"namespaces": NamespaceSandbox, "landlock": LandlockSandbox}


def main(descriptor: int) -> NoReturn:
    """Fork the zygote, and become its keeper; both end if the owner ends or closes the socket."""
    os.umask(0o022)  # another user may have to enter folders made here
    connection = socket.socket(fileno=descriptor)
    data, _ = messages.receive(connection)
    config = json.loads(data)
    owner = os.pidfd_open(config["owner"])
    if os.getppid() != config["owner"]:  # the owner died before pidfd_open
        os._exit(1)
    keeper = os.getpid()
    zygote = os.fork()
    if zygote == 0:
        _run(connection, config, owner, keeper)
    connection.close()
    _keep(zygote, owner, config["folder"])


def _keep(zygote: int, owner: int, folder: str) -> NoReturn:
    """Wait until the zygote or the owner ends; then end the zygote and remove the pool's folder."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a terminal's signals must not end the keeper
    # Processes of sandboxes that survive their init process and the zygote become its children.
    left = processes.Descendants()
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
    processes.end(left, within_s=_SWEEP_S)
    removal.remove(folder)
    os._exit(0)


def _run(connection: socket.socket, config: dict[str, Any], owner: int, keeper: int) -> NoReturn:
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        zygote = _prepared(connection, config, owner, keeper)
        zygote.serve()
        code = 0
    except Exception as error:  # any error is reported to the owner
        failure = {"failed": str(error), "errno": getattr(error, "errno", None) or 0}
        if not isinstance(error, OSError):
            failure["failed"] = traceback.format_exc()
        connection.send(json.dumps(failure).encode()[: messages.LARGEST])
    finally:
        os._exit(code)


def _prepared(
    connection: socket.socket, config: dict[str, Any], owner: int, keeper: int
) -> "Zygote":
    for name in _PRELOADED:
        __import__(name)
    way = _WAYS[config["way"]](config)
    gc.collect()
    gc.freeze()  # so that forks share the pages of these objects
    gc.disable()  # fresh_main enables it again before code runs
    return Zygote(connection, config["settings"], owner, keeper, way, config["lease_s"])


class Zygote:
    """Forks one sandbox per request, and ends if its owner ends or is silent for ``lease_s``."""

    def __init__(
        self,
        connection: socket.socket,
        settings: dict[str, Any],
        owner: int,
        keeper: int,
        way: Way,
        lease_s: float,
    ) -> None:
        self._connection = connection
        self._settings = settings
        self._owner = owner
        self._keeper = keeper
        self._way = way
        self._lease_s = lease_s

    def serve(self) -> None:
        """Serve until the owner ends, closes the connection, or is silent for too long."""
        ready = {
            "ready": True,
            "landlock": landlock.version() > 0,
            "user": self._way.user,
            "separate": self._way.separate,
        }
        self._connection.send(json.dumps(ready).encode())
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._owner, select.POLLIN)
        wake, waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        poll.register(wake, select.POLLIN)
        heard = time.monotonic()
        self._end_with_keeper()
        while True:
            now = time.monotonic()  # before the poll, which finds what the owner said until then
            events = [fd for fd, _ in poll.poll(1000 * self._lease_s / 4)]
            silent = self._connection.fileno() not in events
            if self._owner in events or (silent and now > heard + self._lease_s):
                return
            if wake in events:
                os.read(wake, 4096)
                self._way.reap()
            if not silent:
                data, entrances = messages.receive(self._connection)
                if not data:
                    return
                heard = time.monotonic()
                request = json.loads(data)
                if "sandbox" in request:
                    self._make(request, entrances)
                for entrance in entrances:
                    os.close(entrance)

    def _end_with_keeper(self) -> None:
        """Let the kernel kill this process when its keeper ends; acting as a user clears that."""
        kernel.prctl(kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != self._keeper:
            os._exit(1)

    def _make(self, request: dict[str, Any], entrances: list[int]) -> None:
        """Fork one sandbox; send the owner its control socket and a pidfd of its init process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = self._way.fork(request["sandbox"], self._settings | request["settings"])
        except OSError as error:
            answer = {"sandbox": request["sandbox"], "failed": str(error), "errno": error.errno}
            self._connection.send(json.dumps(answer).encode())
            ours.close()
            theirs.close()
            return
        if pid == 0:
            ours.close()
            self._become_sandbox(theirs, request, entrances)
        theirs.close()
        self._end_with_keeper()
        handle = os.pidfd_open(pid)
        answer = {"sandbox": request["sandbox"]}
        socket.send_fds(self._connection, [json.dumps(answer).encode()], [ours.fileno(), handle])
        ours.close()
        os.close(handle)

    def _become_sandbox(
        self, control: socket.socket, request: dict[str, Any], entrances: list[int]
    ) -> NoReturn:
        code = 1
        try:
            for entrance in entrances:  # of the sandbox's cgroup
                os.write(entrance, b"0")
                os.close(entrance)
            kernel.prctl(kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))
            self._connection.close()
            os.close(self._owner)
            signal.set_wakeup_fd(-1)
            settings = self._settings | request["settings"]
            self._way.become(control, settings, request["sandbox"])
            code = 0
        except ConnectionError:  # the owner no longer wants this sandbox
            pass
        except BaseException:  # the fork must never return into the zygote's loop
            traceback.print_exc()
        finally:
            os._exit(code)
