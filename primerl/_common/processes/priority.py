"""The priority of processes that share cores with this process."""

import contextlib
import errno
import os
import time

from primerl._common.processes import supervisor

# This is added to a process's niceness. The kernel then gives the process a quarter of a core that
# it shares with another one. With 10 (a tenth), a server's loading of weights held up its trainer.
NICENESS = 5
_TRIES, _RETRY_S = 10, 0.15  # the kernel accepts a value per tenth of a second, from all users


def lower_priority(root: int) -> None:
    """Let the descendants of a process give way to other processes, with all their threads.

    At the end of each operation, the threads of torch wait for each other. So another process that
    takes the core of one thread delays all threads. A process of lower priority takes little more
    than what the threads leave.

    Where the kernel shares cores among sessions (``man 7 sched``, *The autogroup feature*), a
    thread's niceness counts only within its session. There the niceness of the session is set too.
    The leaders of sessions, such as a server that answers while another process computes, keep
    their own niceness. Without Linux, this does nothing.
    """
    sessions = set()
    for pid in supervisor.descendants(root):
        with contextlib.suppress(OSError):  # it has ended
            session = os.getsid(pid)
            if session == pid:
                continue
            sessions.add(session)
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                with contextlib.suppress(OSError):  # the thread alone has ended
                    before = os.getpriority(os.PRIO_PROCESS, thread)
                    os.setpriority(os.PRIO_PROCESS, thread, _lower(before))
    for session in sessions - {os.getsid(0)}:
        _lower_session(session)


def _lower(niceness: int) -> int:
    return min(niceness + NICENESS, 19)


def _lower_session(session: int) -> None:
    path = f"/proc/{session}/autogroup"
    for _ in range(_TRIES):
        try:
            with open(path, "r+", encoding="utf-8") as file:
                before = int(file.read().rpartition(" ")[2])  # "/autogroup-71 nice 0"
                file.write(str(_lower(before)))
        except ValueError:  # it is empty: the session has ended
            return
        except OSError as error:  # such as: there are no autogroups, or the process has ended
            if error.errno != errno.EAGAIN:
                return
            time.sleep(_RETRY_S)
        else:
            return
