"""The init process of a sandbox: starts jobs, enforces their limits, and reports how they ended.

It never runs untrusted code, never opens a file whose name comes from outside, and takes jobs from
one socket that no other process of the sandbox can reach. When it ends, the sandbox's remaining
processes are killed.
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

from primerl.sandbox.guest import messages
from primerl.sandbox.guest.isolation import kernel
from primerl.sandbox.guest.processes import Processes, children, end, usage
from primerl.sandbox.guest.watchdog import Watchdog

_SWEEP_S = 2.0  # time for killed processes to release their memory
_IDLE_S = 5.0


class _RunningJob:
    """A running job: its process, its deadline, and the connection to its process until it begins.

    A REPL turn has no such ``connection``; its process outlives the turn.
    """

    def __init__(
        self, job: dict[str, Any], pid: int, connection: socket.socket | None = None
    ) -> None:
        self.id: int = job["id"]
        self.pid = pid
        self.turn = connection is None
        self._connection = connection
        self.deadline = time.monotonic() + job["timeout_s"]
        self._used_before_s = usage(str(pid))[0] if self.turn else 0.0

    def usage(self) -> tuple[float, int]:
        """Return the CPU seconds since the running job began, and its peak memory in bytes."""
        cpu_s, rss_bytes = usage(str(self.pid))
        return max(0.0, cpu_s - self._used_before_s), rss_bytes

    def reason_not_begun(self) -> str:
        """Return the reason why the ended process could not begin the job, or "" if it began."""
        reason = b""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                reason = self._connection.recv(messages.LONGEST_REASON, socket.MSG_DONTWAIT)
        return reason.decode(errors="replace")

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()


class Init:
    """The main loop of the init process: runs jobs from ``control`` one at a time, until it closes.

    ``start_child`` turns a new process into one that waits for a job on a socket. ``processes``
    lists and kills all other processes of the sandbox. ``written`` returns the number of bytes
    and of files that the sandbox has written, and ``sockets`` the number of sockets that the listed
    processes have.
    """

    def __init__(
        self,
        control: socket.socket,
        settings: dict[str, Any],
        *,
        start_child: Callable[[int], NoReturn],
        processes: Processes,
        written: Callable[[], tuple[int, int]],
        sockets: Callable[[list[str]], int],
    ) -> None:
        self._control = control
        self._settings = settings
        self._start_child = start_child
        self._processes = processes
        self._written = written
        self._sockets = sockets
        self._poll = select.poll()
        self._job: _RunningJob | None = None
        self._waiting: tuple[int, socket.socket] | None = None
        self._repl: tuple[int, socket.socket] | None = None
        self._watchdog = self._new_watchdog(settings["memory_bytes"])
        self._looks_at = 0.0
        self._ends_at = time.monotonic() + settings["lifetime_s"]
        self._busy = False  # whether a job or background processes run

    def serve(self) -> None:
        """Serve until the owner closes its end, or the sandbox reaches its lifetime."""
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        sys.stdin.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        poll = self._poll
        poll.register(self._control, select.POLLIN)
        wake, waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll.register(wake, select.POLLIN)
        with contextlib.suppress(OSError):  # the job's start tries again
            self._prepare()
        while time.monotonic() < self._ends_at:
            ready = {fd for fd, _ in poll.poll(1000 * self._patience_s())}
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
            if self._control.fileno() in ready and not self._take_job():
                return
            if self._settings["session"]:  # other sandboxes get only one job
                with contextlib.suppress(OSError):  # the process limit is reached
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
            sockets=self._sockets,
        )

    def _take_job(self) -> bool:
        """Receive and start one job; return whether the connection is still open."""
        data, descriptors = messages.receive(self._control)
        if not data:
            return False
        job = json.loads(data)
        try:
            self._start(job, descriptors)
        except OSError as error:
            failure = {"id": job["id"], "failed": str(error)[: messages.LONGEST_REASON]}
            self._control.send(json.dumps(failure).encode())
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _start(self, job: dict[str, Any], descriptors: list[int]) -> None:
        self._watchdog = self._new_watchdog(job["memory_bytes"])
        self._looks_at = time.monotonic() + self._watchdog.interval_s
        self._busy = True
        if job["kind"] == "turn":
            pid = self._send_turn(job, descriptors)
            self._job = _RunningJob(job, pid)
            return
        self._job = _RunningJob(job, *self._take_waiting(job, descriptors))

    def _take_waiting(
        self, job: dict[str, Any], descriptors: Sequence[int] = ()
    ) -> tuple[int, socket.socket]:
        """Send the job to the waiting process, which is started first if there is none."""
        if self._waiting is None:
            try:
                self._prepare()
            except OSError:  # earlier jobs' background processes use up the limit: end them
                self._kill_all()
                self._prepare()
        assert self._waiting is not None
        pid, connection = self._waiting
        self._waiting = None
        # A background process may have killed the waiting process; reaping it then ends the job.
        with contextlib.suppress(ConnectionError):
            try:
                socket.send_fds(connection, [json.dumps(job).encode()], descriptors)
            except OSError:
                connection.close()  # which ends the process
                raise
        return pid, connection

    def _prepare(self) -> None:
        """Start the process for the next job in advance, while the current job still runs.

        The process is already confined and has no more rights than code in the sandbox, so code
        that attacks it while it waits gains nothing.
        """
        if self._waiting is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            ours.close()
            self._start_child(theirs.detach())
        theirs.close()
        self._waiting = (pid, ours)

    # ---- the REPL: one process for many turns ----

    def _send_turn(self, job: dict[str, Any], descriptors: list[int]) -> int:
        if self._repl is None:
            self._repl = pid, connection = self._take_waiting(job)
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)
        pid, connection = self._repl
        # The REPL has ended, or its queue is full: the job ends later.
        with contextlib.suppress(ConnectionError, BlockingIOError):
            socket.send_fds(connection, [messages.TURN.pack(job["id"], 0)], descriptors)
        return pid

    def _turn_ended(self) -> None:
        """Handle a REPL's message that its turn is over, or its end; ignore other messages."""
        if self._repl is None:
            return
        try:
            said = self._repl[1].recv(64)
        except BlockingIOError:
            return
        except ConnectionError:
            said = b""
        if not said:  # ended or closed its connection: it can't take another turn
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
        """Check that no child is left except the process that waits for a job."""
        left = children(str(os.getpid()))
        return self._waiting is not None and left == [str(self._waiting[0])]

    def _forget_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting[1].close()
            self._waiting = None

    # ---- ends of jobs and processes ----

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
                if reason := self._job.reason_not_begun():
                    self._fail(reason)
                    continue
                self._reply(
                    exit_code=os.waitstatus_to_exitcode(status),
                    limits=[],
                    cpu_s=usage.ru_utime + usage.ru_stime,
                    rss_bytes=usage.ru_maxrss << 10,
                )

    def _enforce(self) -> None:
        """Kill all processes of the sandbox if a limit is exceeded."""
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
            os._exit(1)  # when init ends, the kernel kills the rest

    def _kill_all(self) -> bool:
        """Kill all other processes of the sandbox; return whether they ended in time.

        On a busy machine, releasing their memory takes a while.
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
        self._job.close()
        self._job = None
        self._control.send(json.dumps(reply).encode())

    def _fail(self, reason: str) -> None:
        """Report that the job could not be started."""
        assert self._job is not None
        failure = {"id": self._job.id, "failed": reason[: messages.LONGEST_REASON]}
        self._job.close()
        self._job = None
        self._control.send(json.dumps(failure).encode())


def introduce(control: socket.socket, set_up: Callable[[], socket.socket | None]) -> None:
    """Set up a sandbox in this process, and report success or failure to its owner.

    After a failure, this process exits. ``set_up`` may return a listening socket, which is sent to
    the owner and on which the owner then accepts connections.
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))
    try:
        listener = set_up()
    except OSError as error:
        failure = {"failed": str(error), "errno": error.errno or 0}
        control.send(json.dumps(failure).encode()[: messages.LARGEST])
        os._exit(1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))  # changing the user cleared it
    listeners = [] if listener is None else [listener.fileno()]
    socket.send_fds(control, [b'{"ready": true}'], listeners)
    if listener is not None:
        listener.close()
