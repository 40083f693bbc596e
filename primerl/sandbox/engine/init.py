"""The first process of a sandbox: starts what is to run, watches it, and reports how it ended.

It never runs untrusted code, opens no file by a name from outside, and takes orders from one socket
that nothing else in the sandbox can reach. When it ends, the kernel kills all that is left.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from primerl.sandbox.engine import messages
from primerl.sandbox.engine.barriers import kernel
from primerl.sandbox.engine.processes import Processes, children, end, usage
from primerl.sandbox.engine.watchdog import Watchdog

_SWEEP_S = 2.0  # in which killed processes release what they hold
_IDLE_S = 5.0


class _Job:
    """One order in work: the process that carries it out, and its limits."""

    def __init__(self, order: dict[str, Any], pid: int, *, turn: bool) -> None:
        self.id: int = order["id"]
        self.pid = pid
        self.turn = turn  # of a REPL, whose process goes on afterwards
        self.deadline = time.monotonic() + order["timeout_s"]
        self._used_before_s = usage(str(pid))[0] if turn else 0.0

    def usage(self) -> tuple[float, int]:
        """Seconds of CPU since it began, and bytes of memory at the most, while it runs."""
        cpu_s, rss_bytes = usage(str(self.pid))
        return max(0.0, cpu_s - self._used_before_s), rss_bytes


class Init:
    """Serves the orders that arrive at ``control``, one at a time, until it closes.

    ``start_child`` turns a new process into one that waits at a socket for an order; ``processes``
    are all others of the sandbox; ``written`` says how many bytes and files it has written.
    """

    def __init__(
        self,
        control: socket.socket,
        settings: dict[str, Any],
        *,
        start_child: Callable[[int], NoReturn],
        processes: Processes,
        written: Callable[[], tuple[int, int]],
    ) -> None:
        self._control = control
        self._settings = settings
        self._start_child = start_child
        self._processes = processes
        self._written = written
        self._poll = select.poll()
        self._job: _Job | None = None
        self._waiting: tuple[int, socket.socket] | None = None
        self._repl: tuple[int, socket.socket] | None = None
        self._watchdog = self._new_watchdog(settings["memory_bytes"])
        self._looks_at = 0.0
        self._ends_at = time.monotonic() + settings["lifetime_s"]
        self._busy = False  # whether any process but this one is left

    def serve(self) -> None:
        """Serve until the other end closes, or this sandbox's time is over."""
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        sys.stdin.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        poll = self._poll
        poll.register(self._control, select.POLLIN)
        wake, waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll.register(wake, select.POLLIN)
        self._prepare()
        while time.monotonic() < self._ends_at:
            ready = {fd for fd, _ in poll.poll(1000 * self._patience_s())}
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
            if self._control.fileno() in ready and not self._take_order():
                return
            if self._settings["session"]:  # a sandbox for one run gets no second order
                with contextlib.suppress(BlockingIOError):  # the code has used up its processes
                    self._prepare()
            self._turn_ended()
            self._reap()
            self._enforce()

    def _patience_s(self) -> float:
        now = time.monotonic()
        waits: list[float] = [
            self._ends_at - now,
            self._looks_at - now if self._busy else _IDLE_S,
        ]
        if self._job is not None:
            waits.append(self._job.deadline - now)
        return max(0.0, min(waits))

    def _new_watchdog(self, memory_bytes: int) -> Watchdog:
        return Watchdog(
            memory_bytes=memory_bytes,
            limits=self._settings,
            processes=self._processes,
            written=self._written,
        )

    def _take_order(self) -> bool:
        """Take one order; returns whether there will be more."""
        data, descriptors = messages.receive(self._control)
        if not data:
            return False
        order = json.loads(data)
        try:
            self._start(order, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _start(self, order: dict[str, Any], descriptors: list[int]) -> None:
        self._watchdog = self._new_watchdog(order["memory_bytes"])
        self._looks_at = time.monotonic() + self._watchdog.interval_s
        self._busy = True
        if order["kind"] == "turn":
            pid = self._send_turn(order, descriptors)
            self._job = _Job(order, pid, turn=True)
            return
        pid, connection = self._take_waiting(order, descriptors)
        connection.close()
        self._job = _Job(order, pid, turn=False)

    def _take_waiting(
        self, order: dict[str, Any], descriptors: Sequence[int] = ()
    ) -> tuple[int, socket.socket]:
        """Give the order to the process that waits for one."""
        if self._waiting is None:
            try:
                self._prepare()
            except BlockingIOError:  # by what earlier orders left running, which ends here
                self._kill_all()
                self._prepare()
        assert self._waiting is not None
        pid, connection = self._waiting
        self._waiting = None
        # A background process may have killed it: then it is reaped, which ends the job.
        with contextlib.suppress(OSError):
            socket.send_fds(connection, [json.dumps(order).encode()], descriptors)
        return pid, connection

    def _prepare(self) -> None:
        """Start the process for the next order before it comes, beside the order in work.

        It is confined already, and has no more than what code in the sandbox has anyway: code that
        attacks it while it waits gains what it had.
        """
        if self._waiting is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = os.fork()
        except BlockingIOError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            ours.close()
            self._start_child(theirs.detach())
        theirs.close()
        self._waiting = (pid, ours)

    # ---- a REPL: a process that stays from turn to turn ----

    def _send_turn(self, order: dict[str, Any], descriptors: list[int]) -> int:
        if self._repl is None:
            self._repl = pid, connection = self._take_waiting(order)
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)
        pid, connection = self._repl
        with contextlib.suppress(OSError):  # it has ended, or is full: the deadline decides
            socket.send_fds(connection, [messages.TURN.pack(order["id"], 0)], descriptors)
        return pid

    def _turn_ended(self) -> None:
        """See whether the REPL says that its turn is over; whatever else it says is ignored."""
        if self._repl is None:
            return
        try:
            said = self._repl[1].recv(64)
        except BlockingIOError:
            return
        except ConnectionError:
            said = b""
        if not said:  # it has ended, or closed the connection: it can't take another turn
            os.kill(self._repl[0], signal.SIGKILL)
            self._forget_repl()
        elif len(said) == messages.TURN.size and self._job is not None and self._job.turn:
            turn, code = messages.TURN.unpack(said)
            if turn == self._job.id:
                cpu_s, rss_bytes = self._job.usage()
                self._reply(exit_code=code, limits=[], cpu_s=cpu_s, rss_bytes=rss_bytes)

    def _forget_repl(self) -> None:
        if self._repl is not None:
            self._poll.unregister(self._repl[1])
            self._repl[1].close()
            self._repl = None

    def _only_waits(self) -> bool:
        """Whether no process is left but the one that waits for an order."""
        left = children(str(os.getpid()))
        return self._waiting is not None and left == [str(self._waiting[0])]

    def _forget_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting[1].close()
            self._waiting = None

    # ---- ends ----

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self._busy = False
                return
            if pid == 0:
                self._busy = self._job is not None or not self._only_waits()
                return
            if self._waiting is not None and pid == self._waiting[0]:
                self._forget_waiting()
            if self._repl is not None and pid == self._repl[0]:
                self._forget_repl()
            if self._job is not None and pid == self._job.pid:
                self._reply(
                    exit_code=os.waitstatus_to_exitcode(status),
                    limits=[],
                    cpu_s=usage.ru_utime + usage.ru_stime,
                    rss_bytes=usage.ru_maxrss << 10,
                )

    def _enforce(self) -> None:
        """End everything if a limit is exceeded."""
        now = time.monotonic()
        exceeded = None
        if self._busy and now >= self._looks_at:
            exceeded = self._watchdog.exceeded()
            self._looks_at = now + self._watchdog.interval_s
        if exceeded is None and self._job is not None and now >= self._job.deadline:
            exceeded = "timeout"
        if exceeded is None:
            return
        cpu_s, rss_bytes = (0.0, 0) if self._job is None else self._job.usage()
        ended = self._kill_all()
        if self._job is not None:
            self._reply(exit_code=None, limits=[exceeded], cpu_s=cpu_s, rss_bytes=rss_bytes)
        if not ended:
            os._exit(1)  # the kernel ends what could not be ended here

    def _kill_all(self) -> bool:
        """Kill every process of the sandbox but this one; returns whether all have ended in time.

        On a busy machine, the memory that they release takes its time.
        """
        self._forget_repl()
        self._forget_waiting()
        self._busy = False
        return end(self._processes, within_s=_SWEEP_S)

    def _reply(
        self, *, exit_code: int | None, limits: list[str], cpu_s: float, rss_bytes: int
    ) -> None:
        assert self._job is not None
        reply = {
            "id": self._job.id,
            "exit": exit_code,
            "limits": limits,
            "cpu_s": cpu_s,
            "rss_bytes": rss_bytes,
        }
        self._job = None
        self._control.send(json.dumps(reply).encode())


def introduce(control: socket.socket, set_up: Callable[[], socket.socket | None]) -> None:
    """Set up a sandbox in this process, and say whether it is ready; its end if it isn't.

    ``set_up`` may return a socket that the owner is to listen on.
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))
    try:
        listener = set_up()
    except OSError as error:
        failure = {"failed": str(error), "errno": error.errno or 0}
        control.send(json.dumps(failure).encode()[: messages.LARGEST])
        os._exit(1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))  # a change of user clears it
    listeners = [] if listener is None else [listener.fileno()]
    socket.send_fds(control, [b'{"ready": true}'], listeners)
    if listener is not None:
        listener.close()
