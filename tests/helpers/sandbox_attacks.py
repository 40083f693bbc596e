# ruff: noqa: E501 - programs for sandboxes
"""Attacks on a sandbox. Each prints ``PWNED`` if it succeeds, and its use of resources is bounded.

Placeholders stand for objects of the host: ``@SECRET@`` for a file, ``@PID@`` for a process,
``@PORT@`` for a TCP port on its loopback interface, ``@ADDRESS@`` for its address, ``@SOCKET@`` for a
Unix socket and ``@ABSTRACT@`` for the name of an abstract one.
"""

PRELUDE = """
import array, ctypes, errno, fcntl, mmap, os, resource, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def pwned(why):
    os.write(1, b"PWNED: " + str(why).encode() + b"\\n")
def refused(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(number, *arguments)
    return result < 0 and ctypes.get_errno() in (errno.EPERM, errno.EACCES, errno.ENOSYS)
def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(int(bool(work())))
        except BaseException:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
"""

# The battery of the facts: 37 attacks.
LISTED = {
    "fork bomb": """
n = 0
for _ in range(400):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(3); os._exit(0)
    n += 1
if n >= 100: pwned(n)
""",
    "memory of one process": """
kept = []
for _ in range(24):
    block = bytearray(64 << 20); block[::4096] = b"x" * len(block[::4096]); kept.append(block)
pwned("1.5 GB")
""",
    "memory of five processes": """
pids = []
for _ in range(5):
    pid = os.fork()
    if pid == 0:
        block = bytearray(300 << 20); block[::4096] = b"x" * len(block[::4096]); time.sleep(2); os._exit(0)
    pids.append(pid)
if all(os.waitpid(pid, 0)[1] == 0 for pid in pids): pwned("1.5 GB")
""",
    "memory of memfds": """
n = 0
for _ in range(24):
    fd = os.memfd_create("x")
    for _ in range(64): n += os.write(fd, bytes(1 << 20))
if n > 600 << 20: pwned(n)
""",
    "infinite output": """
for _ in range(4000): os.write(1, b"y" * 65536)
pwned("wrote 260 MB")
""",
    "loop": "while True: pass",
    "loop that ignores signals": """
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    "closed streams": "os.close(0); os.close(1); os.close(2); time.sleep(60)",
    "background process that holds stdout": """
if os.fork() == 0: time.sleep(60); os._exit(0)
os._exit(0)
""",
    "disk": """
for folder in (".", "/tmp", "/dev/shm", "/var/tmp", "/"):
    n = 0
    try:
        for k in range(8):
            with open(f"{folder}/fill{k}", "wb") as file:
                for _ in range(60): n += file.write(bytes(1 << 20))
    except OSError: pass
    if n > 250 << 20: pwned(folder)
""",
    "inodes": """
n = 0
try:
    os.mkdir("/tmp/many")
    for i in range(60000): os.close(os.open(f"/tmp/many/{i}", os.O_CREAT)); n += 1
except OSError: pass
if n >= 50000: pwned(n)
""",
    "shadow": "if 'root:' in open('/etc/shadow').read(): pwned('shadow')",
    "files of the host": """
for path in ("@SECRET@", "/etc/hostname", "/etc/machine-id", "/root/.bashrc", "/var/log/dpkg.log", "/boot"):
    try: os.listdir(path) if os.path.isdir(path) else open(path).read(); pwned(path)
    except OSError: pass
""",
    "existence of the host's files": """
for path in ("@SECRET@", "/var/log", "/home"):
    if os.path.exists(path): pwned(path)
""",
    "writing the host's files": """
for path in ("/usr/x", "/usr/local/x", "/etc/x", "/x", "/etc/passwd", sys.executable, os.__file__):
    try: open(path, "a").close(); pwned(path)
    except OSError: pass
""",
    "TCP to the host's loopback": """
s = socket.create_connection(("127.0.0.1", @PORT@), timeout=1); pwned("connected")
""",
    "TCP to the host's address": """
s = socket.create_connection(("@ADDRESS@", @PORT@), timeout=1); pwned("connected")
""",
    "UDP": """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b"x", ("192.0.2.1", 53)); pwned("sent")
""",
    "Unix socket by its path": 's = socket.socket(socket.AF_UNIX); s.connect("@SOCKET@"); pwned("connected")',
    "abstract Unix socket": r's = socket.socket(socket.AF_UNIX); s.connect("\0@ABSTRACT@"); pwned("connected")',
    "other families of sockets": """
for family in range(1, 46):
    if family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6): continue
    for kind in (1, 2, 3, 5):
        try: socket.socket(family, kind, 0); pwned(f"family {family}")
        except OSError: pass
""",
    "raw sockets and other protocols": """
for family, kind, protocol in ((2, 3, 1), (2, 3, 255), (10, 3, 58), (2, 2, 1), (2, 1, 132), (2, 1, 262), (2, 5, 132), (2, 2, 136)):
    try: socket.socket(family, kind, protocol); pwned((family, kind, protocol))
    except OSError: pass
""",
    "signal to the host": "os.kill(@PID@, 0); pwned('signal')",
    "ptrace": """
if libc.ptrace(16, @PID@, 0, 0) == 0: pwned("attached")
if libc.ptrace(0, 0, 0, 0) == 0: pwned("traceme")
""",
    "processes of the host": """
for name in filter(str.isdigit, os.listdir("/proc")):
    if int(name) not in (1, os.getpid()): pwned(name)
for name in ("environ", "maps", "mem", "fd", "root", "cwd", "exe", "ns", "stack"):
    for path in (f"/proc/1/{name}", f"/proc/1/task/1/{name}"):
        try: os.listdir(path) if os.path.isdir(path) else os.readlink(path) if os.path.islink(path) else open(path, "rb").read(1); pwned(path)
        except OSError: pass
""",
    "writing to /proc": """
for path in ("sys/kernel/core_pattern", "sys/kernel/modprobe", "sysrq-trigger", "1/mem", "1/oom_score_adj", "self/oom_score_adj", "self/uid_map", "self/setgroups", "sys/kernel/hostname", "sys/net/core/somaxconn", "self/attr/current", "1/comm", "self/timerslack_ns"):
    try: os.close(os.open(f"/proc/{path}", os.O_WRONLY)); pwned(path)
    except OSError: pass
for path in ("kcore", "kmsg", "keys", "cmdline", "kallsyms", "modules"):
    try:
        if open(f"/proc/{path}", "rb").read(10): pwned(path)
    except OSError: pass
""",
    "devices": """
for path in ("vda", "sda", "mem", "kmem", "kvm", "vsock", "fuse", "net/tun", "tty", "console", "loop-control", "userfaultfd", "kmsg", "nvidiactl"):
    try: os.close(os.open(f"/dev/{path}", os.O_RDONLY)); pwned(path)
    except OSError: pass
for kind in (0o020666, 0o060666):
    try: os.mknod("/tmp/device", kind, os.makedev(1, 1)); pwned("mknod")
    except OSError: pass
""",
    "mount": """
if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0: pwned("mount")
if libc.mount(b"none", b"/usr", None, 32 | 4096, None) == 0: pwned("remount")
if libc.umount2(b"/proc", 2) == 0: pwned("umount")
if libc.chroot(b"/tmp") == 0: pwned("chroot")
""",
    "nested namespaces": """
for flag in (0x10000000, 0x20000000, 0x20000, 0x40000000, 0x8000000, 0x4000000, 0x2000000, 0x80, 0x400, 0x200):
    if child(lambda: libc.unshare(flag) == 0): pwned(f"unshare {flag:x}")
for flag in (0x10000000, 0x10020000, 0x40000000):
    if not refused(56, flag | 17, 0, 0, 0, 0): pwned(f"clone {flag:x}")
if not refused(435, ctypes.create_string_buffer(88), 88): pwned("clone3")
if not refused(308, 3, 0): pwned("setns")
""",
    "setuid programs": """
import subprocess
for path in ("/usr/bin/su", "/usr/bin/passwd", "/usr/bin/mount", "/usr/bin/newgrp"):
    if os.path.exists(path) and os.stat(path).st_mode & 0o4000:
        if child(lambda: (os.setuid(0), True)[1]): pwned("setuid")
if os.geteuid() == 0 or not refused(126, struct.pack("Ii", 0x20080522, 0), struct.pack("6I", 1, 1, 1, 0, 0, 0)): pwned("capset")
status = open("/proc/self/status").read()
if "NoNewPrivs:\\t1" not in status or any(line.startswith("Cap") and int(line.split()[1], 16) for line in status.splitlines()): pwned("capabilities")
""",
    "dangerous system calls": """
b = ctypes.create_string_buffer(256)
calls = dict(keyctl=250, add_key=248, request_key=249, io_uring_setup=425, io_uring_enter=426, io_uring_register=427,
    userfaultfd=323, bpf=321, perf=298, vm_readv=310, vm_writev=311, handle=303, open_handle=304, kcmp=312, memfd=319,
    memfd_secret=447, ldt=154, fanotify=300, init_module=175, finit_module=313, kexec=246, reboot=169, swapon=167,
    settimeofday=164, clock_settime=227, iopl=172, ioperm=173, syslog=103, acct=163, quotactl=179, vmsplice=278,
    mbind=237, move_pages=279, migrate=256, process_madvise=440, pidfd_getfd=438, lookup=212, uselib=134, ioprio=251,
    shmget=29, msgget=68, semget=64, mq_open=240, vhangup=153, sethostname=170, landlock=444, statmount=457)
for name, number in calls.items():
    if not refused(number, b, b, b, b, b): pwned(name)
""",
    "TIOCSTI": """
import pty
def typed():
    os.setsid(); main, other = os.openpty(); fcntl.ioctl(other, 0x540E, 0); fcntl.ioctl(other, 0x5412, b"x"); return True
if child(typed): pwned("TIOCSTI")
""",
    "daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: os.closerange(0, 3); os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(300)", "@MARK@"])
    os._exit(0)
os.wait(); time.sleep(0.2)
""",
    "environment": """
if any("primerl-secret" in value for value in os.environ.values()): pwned("environ")
if b"primerl-secret" in open("/proc/self/environ", "rb").read(): pwned("environ of the start")
""",
    "inherited descriptors": """
for number in range(3, 1024):
    try: os.fstat(number); pwned(number)
    except OSError: pass
""",
    "raising limits": """
for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK):
    try: resource.setrlimit(kind, (-1, -1)); pwned(kind)
    except (OSError, ValueError): pass
""",
    "bytes that are no UTF-8": "os.write(1, bytes(range(256)) * 10)",
}

# Further attacks that are our own.
FURTHER = {
    "remounting by the new calls": """
for number in (428, 429, 430, 431, 432, 433, 442, 457, 458, 155):
    if not refused(number, -100, b"/", 0, 0, 0): pwned(number)
""",
    "shared memory that was unmapped in part": """
n = 0
for _ in range(20):
    block = mmap.mmap(-1, 64 << 20); block[::4096] = b"x" * len(block[::4096]); n += 64
    libc.munmap(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(block)) + 4096), (64 << 20) - 4096)
if n > 600: pwned(n)
""",
    "shared mapping of /dev/zero": """
fd = os.open("/dev/zero", os.O_RDWR); mmap.mmap(fd, 64 << 20, flags=mmap.MAP_SHARED); pwned("mapped")
""",
    "memory behind an ended first thread": """
import threading
def fill():
    time.sleep(0.3); kept = []
    for _ in range(3):
        block = bytearray(100 << 20); block[::4096] = b"x" * len(block[::4096]); kept.append(block)
    time.sleep(2); os._exit(0)
pids = []
for _ in range(4):
    pid = os.fork()
    if pid == 0: threading.Thread(target=fill).start(); libc.syscall(60, 0)
    pids.append(pid)
if all(os.waitpid(pid, 0)[1] == 0 for pid in pids): pwned("1.2 GB")
""",
    "huge pages": """
libc.mmap.restype = ctypes.c_void_p
if libc.mmap(None, ctypes.c_size_t(2 << 20), 3, 0x40022, -1, 0) not in (None, ctypes.c_void_p(-1).value): pwned("mapped")
""",
    "limits of the first process": """
for kind in range(16):
    if not refused(302, 1, kind, struct.pack("QQ", 0, 0), None): pwned(f"prlimit {kind}")
if not refused(141, 0, 1, 19): pwned("setpriority")
if not refused(203, 1, 8, struct.pack("Q", 1)): pwned("affinity")
if not refused(144, 1, 5, struct.pack("i", 0)): pwned("scheduler")
""",
    "signals to the first process": """
for number in range(1, 65):
    if number == signal.SIGCHLD: continue
    try: os.kill(1, number)
    except OSError: pass
os.write(1, b"still here")
""",
    "many descriptors": """
kept = []
def hoard():
    for _ in range(120):
        a, b = socket.socketpair(); a.setblocking(False); kept.append((a, b))
        try:
            while True: a.send(bytes(4096))
        except OSError: pass
for _ in range(30):
    if os.fork() == 0:
        try: hoard()
        except OSError: pass
        time.sleep(5); os._exit(0)
time.sleep(4); pwned("30 processes with 240 sockets each")
""",
    "threads": """
import threading
n = 0
try:
    for _ in range(500): threading.Thread(target=time.sleep, args=(3,), daemon=True).start(); n += 1
except RuntimeError: pass
if n >= 100: pwned(n)
os._exit(0)
""",
    "core dump": """
if child(lambda: os.kill(os.getpid(), signal.SIGABRT)): pass
if any(name.startswith("core") for name in os.listdir(".")): pwned("core")
""",
    "x32 numbers": "if libc.syscall(0x40000000 | 39) > 0: pwned('x32')",
    "speculation and other prctls": """
for option in (4, 22, 24, 26, 28, 35, 47, 52, 53, 59, 61, 62, 0x59616d61):
    if libc.prctl(option, 1, 1, 0, 0) == 0: pwned(option)
""",
    "descriptor of a folder above": """
for path in ("/proc/self/root/..", "/../..", "/proc/self/cwd/../../..", "/proc/thread-self/root/../.."):
    if os.path.exists(path + "/@SECRET@"): pwned(path)
for number in range(64):
    try: os.stat("@SECRET@".lstrip("/"), dir_fd=number); pwned(number)
    except OSError: pass
""",
    "hidden folders of the engine": """
for path in ("/.roots", "/.root", "/.scratch"):
    if os.path.isdir(path) and os.listdir(path): pwned(path)
    try: open(path + "/x", "w"); pwned(path)
    except OSError: pass
""",
    "flushing the host's disks": "t = time.time(); os.sync(); fd = os.open('/usr', os.O_RDONLY); libc.syncfs(fd)",
    "ioctl on a terminal and on sockets": """
s = socket.socket()
for request in (0x8914, 0x8916, 0x89a0, 0x8946, 0x89e0, 0x8b01):
    try: fcntl.ioctl(s, request, bytes(64)); pwned(hex(request))
    except OSError: pass
""",
    "netfilter": """
s = socket.socket()
for level, option in ((0, 64), (0, 65), (41, 64), (263, 1)):
    try: s.setsockopt(level, option, bytes(128)); pwned(option)
    except OSError: pass
""",
    "very long names and arguments": """
try: open("a" * 5000)
except OSError: pass
try: os.execv("/bin/true", ["x" * 3000000])
except OSError: pass
try: os.makedirs("/tmp/" + "d/" * 2000)
except OSError: pass
""",
    "sparse file": """
with open("sparse", "wb") as file:
    try: file.truncate(1 << 40); pwned("1 TiB")
    except OSError: pass
""",
}

# Attacks of a second round.
FURTHER |= {
    "io_uring and others by number": """
b = ctypes.create_string_buffer(4096)
for name, number in dict(io_uring_setup=425, userfaultfd=323, memfd_secret=447, pidfd_getfd=438, process_vm_writev=311, setns=308, clone3=435, landlock_create=444, quotactl_fd=443, mount_setattr=442, set_mempolicy_home_node=450, map_shadow=453, lsm_get=459, lsm_set=460, listmount=458, setxattrat=463, getxattrat=464, open_tree_attr=467, epoll_ctl_old=214, pivot_root=155, name_to_handle=303, add_key=248, nfsservctl=180, uselib=134, vserver=236, modify_ldt=154, seccomp=317, process_mrelease=448).items():
    if name == "map_shadow": continue
    if not refused(number, b, b, b, b, b, b): pwned(name)
""",
    "clone with the parent's parent, and other flags": """
before = os.readlink("/proc/self/ns/time") if os.path.exists("/proc/self/ns/time") else ""
for flags in (0x10000000, 0x02000000, 0x80 | 0x10000000):
    pid = libc.syscall(56, flags | 17, 0, 0, 0, 0)
    if pid == 0: os._exit(0)
    if pid > 0: pwned(hex(flags))
# CLONE_PARENT makes a sibling: a child of the first process, which must not confuse it. Signal 0
# as the signal of the end makes a child that an ordinary wait doesn't see.
for flags in (0x8000 | 17, 0, 0x91):
    pid = libc.syscall(56, flags, 0, 0, 0, 0)
    if pid == 0:
        if before and os.readlink("/proc/self/ns/time") != before: pwned("time")
        time.sleep(0.2); os._exit(7)
os.write(1, b"still here")
""",
    "memory of other processes by /proc": """
for pid in [p for p in os.listdir("/proc") if p.isdigit() and int(p) not in (os.getpid(),)]:
    for name in ("mem", "maps", "environ", "syscall", "auxv", "personality", "clear_refs", "map_files"):
        try:
            fd = os.open(f"/proc/{pid}/{name}", os.O_RDWR if name in ("mem",) else os.O_RDONLY); pwned((pid, name))
        except OSError: pass
""",
    "prlimit, oom score and cgroup of itself": """
for path, data in {"oom_score_adj": b"-1000", "coredump_filter": b"ff", "loginuid": b"0", "timens_offsets": b"monotonic 1 0", "cgroup": b"/", "gid_map": b"0 0 1", "projid_map": b"0 0 1"}.items():
    try:
        fd = os.open(f"/proc/self/{path}", os.O_WRONLY); os.write(fd, data); pwned(path)
    except OSError: pass
""",
    "descriptors passed over sockets": """
a, b = socket.socketpair()
root = os.open("/", os.O_RDONLY)
socket.send_fds(a, [b"x"], [root]); _, fds, _, _ = socket.recv_fds(b, 9, 4)
for up in ("..", "../..", "../../.."):
    try:
        if "lost+found" in os.listdir(f"/proc/self/fd/{fds[0]}/{up}"): pwned(up)
    except OSError: pass
# descriptors in flight, closed on both sides, are counted nowhere
n = 0
try:
    for _ in range(60000):
        a, b = socket.socketpair(); socket.send_fds(a, [b"x"], [a.fileno(), b.fileno()]); a.close(); b.close(); n += 1
except OSError: pass
if n > 5000: pwned(f"{n} pairs in flight")
""",
    "large buffers of sockets and pipes": """
n = 0
kept = []
try:
    for _ in range(100):
        r, w = os.pipe(); os.set_blocking(w, False); kept.append((r, w))
        try: fcntl.fcntl(w, 1031, 1 << 20)
        except OSError: pass
        try:
            while True: n += os.write(w, bytes(1 << 16))
        except BlockingIOError: pass
except OSError: pass
if n > 80 << 20: pwned(f"pipes {n >> 20} MB")
""",
    "abstract sockets between sandboxes and the host's": r"""
s = socket.socket(socket.AF_UNIX);
for line in open("/proc/net/unix").read().split("\n")[1:]:
    if "@" in line and "primerl" in line: pwned(line)
""",
    "TIOCLINUX and pushing on inherited terminals": """
for fd in (0, 1, 2):
    for request in (0x541C, 0x5412, 0x5420, 0x540E):
        try: fcntl.ioctl(fd, request, bytes(8)); pwned((fd, hex(request)))
        except OSError: pass
""",
    "fallocate and sparse files": """
total = 0
for k in range(40):
    fd = os.open(f"f{k}", os.O_RDWR | os.O_CREAT)
    try: os.posix_fallocate(fd, 0, 100 << 20); total += 100
    except OSError: break
    os.unlink(f"f{k}")
if total > 300: pwned(total)
""",
    "names that are no text": r"""
os.makedirs(b"/sandbox/d") if os.path.isdir("/sandbox") else os.makedirs(b"d")
for name in (b"new\nline", b"\xff\xfe", b"-rf", b"$(id)", b"a" * 255, b"\x1b[2J"):
    open(b"d/" + name, "w").close()
os.write(1, b"made")
""",
    "hard links to what can't be written": """
for path in (os.__file__, "/usr/bin/python3", "/etc/passwd", "/proc/self/environ"):
    try: os.link(path, "link"); open("link", "r+").close(); pwned(path)
    except OSError: pass
""",
    "attributes of what can't be written": """
for path in (os.__file__, "/usr/bin/env", "/usr", "/etc/passwd"):
    for what in (lambda: os.chmod(path, 0o777), lambda: os.chown(path, os.getuid(), os.getgid()), lambda: os.setxattr(path, "user.x", b"1")):
        try: what(); pwned(path)
        except OSError: pass
    before = os.stat(path).st_mtime_ns
    try: os.utime(path, (1, 1))
    except OSError: pass
    if os.stat(path).st_mtime_ns != before: pwned("utime " + path)
""",
    "escape from a root": """
try: os.chroot("/tmp"); pwned("chroot")
except OSError: pass
fd = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
os.chdir("/tmp"); os.fchdir(fd)
for _ in range(20): os.chdir("..")
if os.path.exists("lost+found") or os.path.exists("boot"): pwned(os.listdir("."))
""",
    "huge environment and arguments": """
pids = []
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        try: os.execve("/bin/sleep", ["sleep", "0.5"] + [], {f"v{i}": "x" * 100000 for i in range(60)})
        except OSError: os._exit(0)
    pids.append(pid)
for pid in pids: os.waitpid(pid, 0)
os.write(1, b"done")
""",
    "signals to everything": """
signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGCONT, signal.SIG_IGN)
for target in (0, -1, -os.getpgid(0), os.getppid(), 1):
    for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGURG):
        try: os.kill(target, number)
        except OSError: pass
fd = os.open("/sandbox/x" if os.path.isdir("/sandbox") else "x", os.O_CREAT | os.O_RDWR)
for target in (1, @PID@):
    try: fcntl.fcntl(fd, 8, target)
    except OSError: pass
os.write(1, b"still here")
""",
    "reading the counters of the machine": """
for number in (298, 321):
    if not refused(number, bytes(128), 0, -1, -1, 0): pwned(number)
for path in ("/sys", "/sys/kernel", "/sys/fs/cgroup", "/proc/kpageflags", "/proc/kpagecount", "/proc/slabinfo", "/proc/pagetypeinfo", "/proc/iomem", "/proc/vmallocinfo"):
    try:
        data = os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(8)
        if data and not (path == "/proc/iomem"): pwned(path)
    except OSError: pass
""",
    "watching the host's files": """
fd = libc.inotify_init1(0)
if fd >= 0 and libc.inotify_add_watch(fd, b"@SECRET@", 2) >= 0: pwned("inotify")
""",
    "leases and notices of files": """
fd = os.open("leased", os.O_CREAT | os.O_RDONLY)  # of the same user, as the host's may be
for path, descriptor in (("leased", fd), ("/usr", os.open("/usr", os.O_RDONLY))):
    for command, argument in ((1024, fcntl.F_RDLCK), (1024, fcntl.F_WRLCK), (1026, 1), (10, 0), (1031, 1 << 20)):
        try: fcntl.fcntl(descriptor, command, argument); pwned((path, command))
        except OSError: pass
with open("locked", "wb") as file: fcntl.lockf(file, fcntl.LOCK_EX); fcntl.flock(file, fcntl.LOCK_EX)
os.write(1, b"locks work")
""",
    "threads with tables of descriptors of their own": """
import threading
if not refused(436, 500, 600, 2): pwned("close_range")
if not refused(272, 0x400): pwned("unshare")
stack = ctypes.create_string_buffer(1 << 16)
if not refused(56, 0x10900, ctypes.c_void_p(ctypes.addressof(stack) + (1 << 15)), 0, 0, 0): pwned("clone")
thread = threading.Thread(target=os.write, args=(1, b"threads work"))
thread.start(); thread.join()
""",
    "swap and locked memory": """
if libc.mlockall(3) == 0: pwned("mlockall")
""",
    "files held open by sockets": """
n, kept = 0, []
for k in range(30):
    a, b = socket.socketpair()
    fd = os.open(f"g{k}", os.O_RDWR | os.O_CREAT); os.unlink(f"g{k}")
    size = 0
    try:
        for _ in range(15): size += os.write(fd, bytes(1 << 20))
        socket.send_fds(a, [b"x"], [fd]); n += size
    except OSError: pass
    os.close(fd); kept.append((a, b))
if n > 250 << 20: pwned(n)
""",
    "pinning of processors and priorities": """
try: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); pwned("fifo")
except OSError: pass
try: os.nice(-5); pwned("nice")
except OSError: pass
""",
    "clocks and names": """
for number, arguments in {227: (0, bytes(16)), 170: (b"x", 1), 171: (b"x", 1), 305: (0, bytes(256)), 159: (bytes(256),), 164: (bytes(16), None)}.items():
    if not refused(number, *arguments) and number not in (305, 159): pwned(number)
""",
    "copies of /dev/zero's and other devices' memory": """
for path in ("/dev/zero", "/dev/full"):
    try:
        fd = os.open(path, os.O_RDWR); mmap.mmap(fd, 1 << 20, flags=mmap.MAP_SHARED); pwned(path)
    except OSError: pass
""",
    "a child that outlives its session": """
if os.fork() == 0:
    os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(3):
        if os.fork(): os._exit(0)
        os.setsid()
    os.closerange(0, 64)
    os.execv("/usr/bin/python3", ["python3", "-S", "-c", "import time; time.sleep(300)", "@MARK@"])
time.sleep(0.3)
""",
    "fork bomb that races its killers": """
end = time.monotonic() + 20
def bomb():
    while time.monotonic() < end:
        try:
            if os.fork() == 0: os.setsid()
        except OSError: pass
bomb()
""",
}

# Attacks that a limit stops, with the word for the limit in the result.
LIMITED = {
    "infinite output": "output",
    "loop": "timeout",
    "loop that ignores signals": "timeout",
    "closed streams": "timeout",
    "memory of five processes": "memory",
    "memory behind an ended first thread": "memory",
    "many descriptors": "files",
}
