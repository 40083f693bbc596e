"""Programs that take as much as they can of one kernel counter, and hold it.

Each is for a sandbox of its own. It prints how much it took, and then sleeps. What it takes is
bounded, so that a machine without any protection survives it.
"""

_PRELUDE = """
import ctypes, fcntl, os, resource, select, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
kept = []
def take(work, most):
    n = 0
    try:
        while n < most:
            kept.append(work())
            n += 1
    except OSError:
        pass
    return n
def hold(n):
    print("took", n, flush=True)
    time.sleep(600)
"""

_PROGRAMS = {
    "descriptors in flight": """
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
pairs = [socket.socketpair() for _ in range(20)]
hold(take(lambda: socket.send_fds(pairs[len(kept) % 20][0], [b"x"], [a.fileno()] * 200), 400))
""",
    "inotify instances": """
def work():
    if libc.inotify_init1(0) < 0: raise OSError(ctypes.get_errno(), "inotify")
    return ()
hold(take(work, 200))
""",
    "pipe pages": """
def pipe():
    r, w = os.pipe()
    try: fcntl.fcntl(w, 1031, 1 << 20)
    except OSError: pass
    os.close(w)
    return r
def work():
    if os.fork() == 0:
        take(pipe, 120)
        time.sleep(600)
hold(take(work, 8))
""",
    "pseudo terminals": "hold(take(os.openpty, 4096))",
    "locks": """
def work():
    file = open(f"locked{len(kept)}", "w+b")
    for k in range(500): fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * k)
    return file
hold(take(work, 60))
""",
    "open-file locks": """
import struct
def work():
    file = open(f"locked{len(kept)}", "w+b")
    for k in range(500):
        fcntl.fcntl(file, 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 2 * k, 1, 0))
    return file
hold(take(work, 60))
""",
    "pending signals": """
signal.pthread_sigmask(signal.SIG_BLOCK, {40})
class Value(ctypes.Structure): _fields_ = [("sival_ptr", ctypes.c_void_p)]
def work():
    if libc.sigqueue(os.getpid(), 40, Value(1)): raise OSError(ctypes.get_errno(), "sigqueue")
hold(take(work, 100000))
""",
    "timers": """
def work():
    timer = ctypes.c_void_p()
    if libc.timer_create(1, None, ctypes.byref(timer)): raise OSError(ctypes.get_errno(), "timer")
hold(take(work, 100000))
""",
    "message queues": """
rt = ctypes.CDLL("librt.so.1", use_errno=True)
def work():
    if rt.mq_open(b"/q%d" % len(kept), os.O_CREAT | os.O_RDWR, 0o600, None) < 0:
        raise OSError(ctypes.get_errno(), "mq_open")
hold(take(work, 300))
""",
    "keys": """
def work():
    if libc.syscall(248, b"user", b"key%d" % len(kept), b"x", 1, -3) < 0:
        raise OSError(ctypes.get_errno(), "add_key")
hold(take(work, 400))
""",
    "epoll watches": """
pairs = [os.pipe() for _ in range(60)]
def work():
    poll = select.epoll()
    for pair in pairs:
        for end in pair: poll.register(end, 0)
    return poll
hold(take(work, 100))
""",
    "processes": """
def work():
    if os.fork() == 0: time.sleep(600)
hold(take(work, 400))
""",
    "user namespaces": """
def work():
    pid = os.fork()
    if pid == 0:
        if libc.unshare(0x10000000): os._exit(1)
        time.sleep(600)
    time.sleep(0.01)
    if os.waitpid(pid, os.WNOHANG)[0]: raise OSError
hold(take(work, 50))
""",
}
SABOTEURS = {name: _PRELUDE + code for name, code in _PROGRAMS.items()}

# What an honest program may need; each line is about one of the counters.
HONEST = """
import ctypes, fcntl, os, select, signal, socket, subprocess, threading

def passes_descriptors():
    a, b = socket.socketpair()
    socket.send_fds(a, [b"x"], [a.fileno()])
    return len(socket.recv_fds(b, 1, 1)[1]) == 1

def writes_to_pipe():
    r, w = os.pipe()
    os.set_blocking(w, False)
    return os.write(w, bytes(65536)) == 65536

def opens_terminal():
    return len(os.openpty()) == 2

def locks():
    with open("honest", "w+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
    return True

def queues_signals():
    libc = ctypes.CDLL(None, use_errno=True)
    class Value(ctypes.Structure): _fields_ = [("sival_ptr", ctypes.c_void_p)]
    signal.pthread_sigmask(signal.SIG_BLOCK, {41})
    timer = ctypes.c_void_p()
    queued = libc.sigqueue(os.getpid(), 41, Value(1)) == 0
    return queued and libc.timer_create(1, None, ctypes.byref(timer)) == 0

def polls():
    r, _ = os.pipe()
    select.epoll().register(r)
    return True

def starts_processes():
    thread = threading.Thread(target=int)
    thread.start()
    return subprocess.run(["true"]).returncode == 0

def probe(names):
    return [bool(globals()[name]()) for name in names]
"""
