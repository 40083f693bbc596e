"""A fake server that forks children that ignore SIGTERM, one of them in its own session.

    python process_tree.py LOG [EXIT_CODE]

The program appends the id of each process to LOG. With EXIT_CODE, it ends with that code as soon as
the other processes run.
"""

import os
import signal
import sys
import time
from pathlib import Path


def say(what):
    with open(sys.argv[1], "a", encoding="utf-8") as log:
        log.write(f"{what} {os.getpid()}\n")


def linger(what):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say(what)
    time.sleep(600)
    os._exit(0)


if os.fork() == 0:
    if os.fork() == 0:
        linger("grandchild")
    linger("child")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        linger("orphan")
    os._exit(0)  # orphans its child
while Path(sys.argv[1]).read_text(encoding="utf-8").count("\n") < 3:
    time.sleep(0.01)
say("server")
if len(sys.argv) > 2:
    sys.exit(int(sys.argv[2]))
time.sleep(600)
