"""The table of system calls that sandboxed code may make: ``name:x86_64 number:aarch64 number``.

The numbers are from Linux's ``unistd_64.h`` and ``asm-generic/unistd.h``; ``-`` means that the
architecture lacks the call. All calls that aren't listed are refused: mounting, namespaces,
tracing, io_uring, bpf, userfaultfd, keys, modules, clocks, memfd_create, System V IPC, and
everything that future kernels add. Calls in ``_CHECKED`` are allowed for some arguments only
(``seccomp.py``).
"""

import errno

_FILES = """
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69
pwritev:296:70 preadv2:327:286 pwritev2:328:287 open:2:- openat:257:56 openat2:437:437 creat:85:-
close:3:57 stat:4:- fstat:5:80 lstat:6:- newfstatat:262:79 statx:332:291
access:21:- faccessat:269:48 faccessat2:439:439 lseek:8:62 dup:32:23 dup2:33:- dup3:292:24
flock:73:32
truncate:76:45 ftruncate:77:46 getdents:78:- getdents64:217:61
getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:- renameat:264:38 renameat2:316:276 mkdir:83:-
mkdirat:258:34 rmdir:84:- link:86:- linkat:265:37 unlink:87:- unlinkat:263:35 symlink:88:-
symlinkat:266:36 readlink:89:- readlinkat:267:78 umask:95:166 statfs:137:43
fstatfs:138:44
readahead:187:213 copy_file_range:326:285 pipe:22:-
pipe2:293:59 getxattr:191:8 lgetxattr:192:9
fgetxattr:193:10 listxattr:194:11 llistxattr:195:12 flistxattr:196:13
cachestat:451:451 mknod:133:- mknodat:259:33
"""

# Refused in the tier ``landlock``, whose files are on the host's disk: Landlock doesn't restrict
# these calls, not even on read-only or unreadable files, and fallocate fills a disk faster than the
# watchdog can check.
_ATTRIBUTES = """
fallocate:285:47
chmod:90:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 chown:92:- fchown:93:55 lchown:94:-
fchownat:260:54 removexattr:197:14 lremovexattr:198:15 fremovexattr:199:16
"""
_TIMES = """utime:132:- utimes:235:- futimesat:261:- utimensat:280:88"""

_WAIT = """
poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:- epoll_create1:291:20
epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284:-
eventfd2:290:19 signalfd:282:- signalfd4:289:74 timerfd_create:283:85 timerfd_settime:286:86
timerfd_gettime:287:87 nanosleep:35:101 clock_nanosleep:230:115 pause:34:- alarm:37:-
getitimer:36:102 setitimer:38:103 timer_create:222:107 timer_settime:223:110 timer_gettime:224:108
timer_getoverrun:225:109 timer_delete:226:111
"""

_MEM = """
munmap:11:215 mprotect:10:226 mremap:25:216 madvise:28:233 brk:12:214
mincore:27:232 mlock:149:228 munlock:150:229 mlock2:325:284 mlockall:151:230 munlockall:152:231
membarrier:324:283 pkey_alloc:330:289 pkey_free:331:290 pkey_mprotect:329:288 mseal:462:462
"""

_PROC = """
fork:57:- vfork:58:- execve:59:221 execveat:322:281 exit:60:93 exit_group:231:94 wait4:61:260
waitid:247:95 kill:62:129 tkill:200:130 tgkill:234:131 rt_sigaction:13:134 rt_sigprocmask:14:135
rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigsuspend:130:133 rt_sigtimedwait:128:137
rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240 sigaltstack:131:132 restart_syscall:219:128
set_tid_address:218:96 set_robust_list:273:99 get_robust_list:274:100 futex:202:98
futex_waitv:449:449 futex_wake:454:454 futex_wait:455:455 futex_requeue:456:456 rseq:334:293
arch_prctl:158:- gettid:186:178 getpid:39:172 getppid:110:173 getpgid:121:155 getpgrp:111:-
setpgid:109:154 getsid:124:156 setsid:112:157 getuid:102:174 geteuid:107:175 getgid:104:176
getegid:108:177 getresuid:118:148 getresgid:120:150 getgroups:115:158 setuid:105:146
setgid:106:144 setreuid:113:145 setregid:114:143 setresuid:117:147 setresgid:119:149
setfsuid:122:151 setfsgid:123:152 setgroups:116:159 capget:125:90 capset:126:91 pidfd_open:434:434
pidfd_send_signal:424:424 sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121
sched_getscheduler:145:120 sched_getattr:315:275 sched_get_priority_max:146:125
sched_get_priority_min:147:126 sched_rr_get_interval:148:127 getpriority:140:141 getrlimit:97:163
setrlimit:160:164 getrusage:98:165 times:100:153 getcpu:309:168 uname:63:160 sysinfo:99:179
time:201:- gettimeofday:96:169 clock_gettime:228:113 clock_getres:229:114 getrandom:318:278
map_shadow_stack:453:453
"""

_NET = """
bind:49:200 listen:50:201 accept:43:202 accept4:288:242 connect:42:203 getsockname:51:204
getpeername:52:205 sendto:44:206 recvfrom:45:207 recvmsg:47:212 recvmmsg:299:243
getsockopt:55:209 shutdown:48:210
"""

# These calls can pass file descriptors: the files are then held by a socket only, uncounted.
_SEND = """ sendmsg:46:211 sendmmsg:307:269 """

_CHECKED = """
mmap:9:222
clone:56:220 clone3:435:435 close_range:436:436 fcntl:72:25 socket:41:198 socketpair:53:199
setsockopt:54:208 ioctl:16:29 prctl:157:167 personality:135:92 prlimit64:302:261 setpriority:141:140
sched_setaffinity:203:122 sched_setscheduler:144:119 sched_setparam:142:118 sched_setattr:314:274
"""

# These calls fail as for files that don't support them, so that programs read and write instead.
# Each byte that they move into a socket or a pipe can hold a whole page, or a whole block of a
# deleted file, of which nothing counts more than that byte.
_SPLICING = "sendfile:40:71 splice:275:76 tee:276:77"

# These fail as in a filesystem without extended attributes, whose memory nothing counts.
_EXTENDED_ATTRIBUTES = "setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7"

# These calls succeed without any effect: a sandbox must not flush the host's disks, not even for
# files that it can only read. It loses nothing by that.
_IGNORED = """
sync:162:81 syncfs:306:267 fsync:74:82 fdatasync:75:83 msync:26:227 sync_file_range:277:84
fadvise64:221:223
"""

# Their flags can ask for synchronous writes: checked in the tier ``landlock``, whose files are on
# the host's disk.
_SYNCHRONOUS = """
open:2:- openat:257:56 openat2:437:437 pwritev2:328:287
"""

# These calls fail as on a kernel that lacks them, so that programs use another way. inotify would
# show which programs the host starts; its instances are counted per user, and its queues nowhere.
_MISSING = """
inotify_init:253:- inotify_init1:294:26 inotify_add_watch:254:27 inotify_rm_watch:255:28
"""

_COLUMNS = {"x86_64": 1, "aarch64": 2}
# The architecture's audit number, as in struct seccomp_data.
AUDIT_NUMBERS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def allowed(machine: str, *, sockets: bool, attributes: bool) -> list[int]:
    """Return the numbers of the calls that are allowed with any arguments."""
    table = _FILES + _WAIT + _MEM + _PROC + _NET
    if sockets:
        table += _SEND
    if attributes:
        table += _ATTRIBUTES + _TIMES
    return sorted(_numbers(table, machine).values())


def ignored(machine: str, *, attributes: bool) -> list[int]:
    """Return the numbers of the calls that succeed without any effect."""
    table = _IGNORED if attributes else f"{_IGNORED} {_TIMES}"
    return sorted(_numbers(table, machine).values())


def missing(machine: str) -> list[int]:
    """Return the numbers of the calls that fail as on a kernel that lacks them."""
    return sorted(_numbers(_MISSING, machine).values())


def unsupported(machine: str) -> dict[int, int]:
    """Return the numbers of the calls that fail as for some files, each with its error."""
    found = dict.fromkeys(_numbers(_SPLICING, machine).values(), errno.EINVAL)
    attributes = _numbers(_EXTENDED_ATTRIBUTES, machine).values()
    return found | dict.fromkeys(attributes, errno.EOPNOTSUPP)


def checked(machine: str, *, attributes: bool) -> dict[str, int]:
    """Return the numbers, by name, of the calls that are allowed with some arguments only."""
    return _numbers(_CHECKED if attributes else _CHECKED + _SYNCHRONOUS, machine)


def _numbers(table: str, machine: str) -> dict[str, int]:
    column = _COLUMNS[machine]
    rows = [entry.split(":") for entry in table.split()]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}
