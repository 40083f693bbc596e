"""The priority of processes that share cores with this process."""

import contextlib
import errno
import os
import time

from primerl._common.processes import supervisor

# Beside a process of normal priority, such a process gets a quarter of a core. With a tenth (10), a
# server's updates of weights took so long that the trainer had to wait for them.
NICENESS = 5
_TRIES, _RETRY_S = 10, 0.15  # the kernel accepts a value per tenth of a second, from all users


def lower_priority(root: int) -> None:
    """Let a process, its descendants and all their threads give way to other processes, on Linux.

    At the end of each operation, the threads of torch wait for each other. So another process that
    takes the core of one thread delays all of them. A process of lower priority takes little more
    than what they leave.

    Where the kernel shares cores among sessions (``man 7 sched``, *The autogroup feature*), a
    thread's niceness counts only within its session. There the niceness of the session is set too.
    """
    sessions = set()
    for pid in {root, *supervisor.descendants(root)}:
        with contextlib.suppress(OSError):  # it has ended
            sessions.add(os.getsid(pid))
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), NICENESS)
    for session in sessions - {os.getsid(0)}:
        _lower_session(session)


def _lower_session(session: int) -> None:
    for _ in range(_TRIES):
        try:
            with open(f"/proc/{session}/autogroup", "w", encoding="utf-8") as file:
                file.write(str(NICENESS))
        except OSError as error:  # such as: there are no autogroups, or the process has ended
            if error.errno != errno.EAGAIN:
                return
            time.sleep(_RETRY_S)
        else:
            return
