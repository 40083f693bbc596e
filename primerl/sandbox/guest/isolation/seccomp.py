"""The seccomp filter: an allow-list of system calls, as a classic BPF program.

The program has one `struct sock_filter` per instruction; see `seccomp(2)`. A call that isn't listed
fails with EPERM. Newer calls (from number 424 on) and some older ones fail with ENOSYS instead, so
that programs use others. A call for another architecture, or with an x32 number on x86, kills the
process.
"""

import ctypes
import errno
import struct

from primerl.sandbox.guest.isolation import kernel, syscalls

_LOAD, _AND = 0x20, 0x54
_JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_GREATER, _JUMP_ANY_BIT = 0x15, 0x35, 0x25, 0x45
_RETURN = 0x06
_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_X32 = 0x40000000
# From this number on, all architectures share their numbers. C libraries can do without them.
_NEWER_CALLS = 424

_NAMESPACE_FLAGS = 0x7E020000 | 0x80  # the CLONE_NEW* flags, and CLONE_NEWTIME
_CLONE_FILES, _CLONE_THREAD, _CLOSE_RANGE_CLOEXEC = 0x400, 0x10000, 4
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_PROTOCOLS = (0, 6, 17)  # the default of the family, TCP, UDP
_ANONYMOUS, _TYPE_MASK, _HUGE = 0x20, 0x0F, 0x40000
_SHARED, _SHARED_VALIDATE = 1, 3
_WHOLE_WORD = 0xFFFFFFFF
# Allowed: thread names, parent-death signals, no_new_privs, timer slack, subreapers, huge pages,
# reading capabilities and seccomp's mode, names of mappings. Not PR_SET_DUMPABLE: the init process
# can't measure the memory of a process that isn't dumpable.
_PRCTL = (1, 2, 3, 7, 15, 16, 21, 23, 27, 29, 30, 36, 37, 38, 39, 40, 41, 42, 0x53564D41)
# Allowed: duplicating file descriptors, their flags, locks of processes, owners of sockets, reading
# a pipe's size. Not F_SETLEASE: every process that opens the file would wait, even on the host. Not
# F_NOTIFY: it watches the host's folders. Not F_SETPIPE_SZ: nothing counts that memory. Not
# F_OFD_SETLK: nothing shows which sandbox has such a lock.
_FCNTL = (0, 1030, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1032)
_O_SYNC, _RWF_SYNC = 0x101000, 0x6  # each with its weaker form, O_DSYNC and RWF_DSYNC
_SOL_SOCKET = 1
_BUFFER_SIZES = (7, 8)  # SO_SNDBUF and SO_RCVBUF
_SOCKET_FILTERS = (26, 50, 51, 52)  # SO_ATTACH_FILTER, _BPF, _REUSEPORT_CBPF and _REUSEPORT_EBPF
_IOCTL = (
    *(0x5401, 0x5402, 0x5403, 0x5404, 0x5409, 0x540A, 0x540B),  # TCGETS to TCFLSH
    *(0x540D, 0x540E, 0x540F, 0x5410, 0x5411, 0x5413, 0x5414),  # terminals, not TIOCSTI (0x5412)
    *(0x541B, 0x5421, 0x5422, 0x5429, 0x5450, 0x5451, 0x5452),  # FIONREAD, FIONBIO, FIOCLEX, ...
    *(0x80045430, 0x40045431, 0x5441, 0x80045439),  # TIOCGPTN, TIOCSPTLCK, TIOCGPTPEER
    *(0x8910, 0x8912, 0x8913, 0x8915, 0x891B, 0x8927, 0x8933),  # reading network interfaces
)

_Instruction = tuple[int, int, int, int]


def program(machine: str, *, sockets: bool, attributes: bool = True) -> bytes:
    """Return the seccomp filter for the architecture ``machine``.

    If ``sockets`` is false, only pairs of Unix sockets can be created, and they can't pass file
    descriptors. If ``attributes`` is false, synchronous writes fail, and calls that change a file's
    mode or owner; calls that set its times do nothing.

    Raises:
        ValueError: there is no table of system calls for the architecture.
    """
    if machine not in syscalls.AUDIT_NUMBERS:
        known = ", ".join(syscalls.AUDIT_NUMBERS)
        raise ValueError(f"sandboxes support the architectures {known}, not {machine}")
    code: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, syscalls.AUDIT_NUMBERS[machine]),
        _return(_KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32),
        _return(_KILL_PROCESS),
    ]
    for name, number in syscalls.checked(machine, attributes=attributes).items():
        body = _argument_check(name, sockets=sockets)
        code += [(_JUMP_EQUAL, 0, len(body), number), *body]
    for number in syscalls.ignored(machine, attributes=attributes):
        code += [(_JUMP_EQUAL, 0, 1, number), _return(_ERRNO)]
    for number in syscalls.missing(machine):
        code += [(_JUMP_EQUAL, 0, 1, number), _return(_ERRNO | errno.ENOSYS)]
    for number, error in syscalls.unsupported(machine).items():
        code += [(_JUMP_EQUAL, 0, 1, number), _return(_ERRNO | error)]
    for first, last in _ranges(syscalls.allowed(machine, sockets=sockets, attributes=attributes)):
        code += [
            (_JUMP_AT_LEAST, 0, 2, first),
            (_JUMP_GREATER, 1, 0, last),
            _return(_ALLOW),
        ]
    code += [
        (_JUMP_AT_LEAST, 0, 1, _NEWER_CALLS),
        _return(_ERRNO | errno.ENOSYS),
        _return(_ERRNO | errno.EPERM),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def install(filter_program: bytes) -> None:
    """Install the filter for this process and all that it starts; it can't be removed."""
    instructions = ctypes.create_string_buffer(filter_program, len(filter_program))
    header = struct.pack("HxxxxxxP", len(filter_program) // 8, ctypes.addressof(instructions))
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl_pointer(kernel.PR_SET_SECCOMP, kernel.SECCOMP_MODE_FILTER, header)


def _argument_check(name: str, *, sockets: bool) -> list[_Instruction]:
    """Return the instructions that allow or refuse a system call by its arguments."""
    refuse = _return(_ERRNO | errno.EPERM)
    allow = _return(_ALLOW)
    if name == "clone":
        return [
            _argument(0),
            (_JUMP_ANY_BIT, 0, 1, _NAMESPACE_FLAGS & ~0x80),
            refuse,
            # A thread must share its process's file descriptors: only those are counted.
            (_JUMP_ANY_BIT, 0, 2, _CLONE_THREAD),
            (_JUMP_ANY_BIT, 1, 0, _CLONE_FILES),
            refuse,
            allow,
        ]
    if name == "close_range":  # no CLOSE_RANGE_UNSHARE: it would give a thread its own descriptors
        return [*_only(2, (0, _CLOSE_RANGE_CLOEXEC), refuse), allow]
    if name == "clone3":  # BPF can't read its flags; C libraries fall back to clone
        return [_return(_ERRNO | errno.ENOSYS)]
    if name == "fcntl":
        return [*_only(1, _FCNTL, refuse), allow]
    if name in ("open", "openat"):
        flags = _argument(1 if name == "open" else 2)
        return [flags, (_JUMP_ANY_BIT, 0, 1, _O_SYNC), _return(_ERRNO | errno.EINVAL), allow]
    if name == "openat2":  # BPF can't read its flags; programs fall back to openat
        return [_return(_ERRNO | errno.ENOSYS)]
    if name == "pwritev2":
        unsupported = _return(_ERRNO | errno.EOPNOTSUPP)
        return [_argument(5), (_JUMP_ANY_BIT, 0, 1, _RWF_SYNC), unsupported, allow]
    if name in ("socket", "socketpair"):
        families: tuple[int, ...] = (_AF_UNIX, _AF_INET, _AF_INET6)
        if not sockets:
            families = (_AF_UNIX,) if name == "socketpair" else ()
        unsupported = _return(_ERRNO | errno.EAFNOSUPPORT)
        return [*_only(0, families, unsupported), *_only(2, _PROTOCOLS, refuse), allow]
    if name == "setsockopt":
        # Buffers keep their default size: the memory in them belongs to no process.
        return [
            _argument(1),
            (_JUMP_EQUAL, 1, 0, _SOL_SOCKET),
            allow,
            *_unless(2, _BUFFER_SIZES, _return(_ERRNO)),
            *_unless(2, _SOCKET_FILTERS, refuse),
            allow,
        ]
    if name == "ioctl":
        return [*_only(1, _IOCTL, _return(_ERRNO | errno.ENOTTY)), allow]
    if name == "prctl":
        return [*_only(0, _PRCTL, refuse), allow]
    if name == "personality":  # only reading it
        return [*_only(0, (_WHOLE_WORD,), refuse), allow]
    if name == "setpriority":
        return [*_only(0, (0,), refuse), *_only(1, (0,), refuse), allow]
    if name == "mmap":
        # An anonymous shared mapping keeps its memory when it is partly unmapped, so neither
        # RLIMIT_AS nor the resident size would count it. Huge pages aren't counted either.
        return [
            _argument(3),
            (_JUMP_ANY_BIT, 0, 1, _HUGE),
            refuse,
            (_AND, 0, 0, _ANONYMOUS | _TYPE_MASK),
            (_JUMP_EQUAL, 1, 0, _ANONYMOUS | _SHARED),
            (_JUMP_EQUAL, 0, 1, _ANONYMOUS | _SHARED_VALIDATE),
            refuse,
            allow,
        ]
    # Limits, affinity and scheduling may be changed only for the calling process (pid 0): the init
    # process must keep its own, to watch the memory.
    return [*_only(0, (0,), refuse), allow]


def _only(argument: int, values: tuple[int, ...], otherwise: _Instruction) -> list[_Instruction]:
    """Return instructions that run ``otherwise`` unless the argument is one of ``values``."""
    code = [_argument(argument)]
    for left, value in zip(range(len(values), 0, -1), values, strict=True):
        code.append((_JUMP_EQUAL, left, 0, value))
    return [*code, otherwise]


def _unless(argument: int, values: tuple[int, ...], otherwise: _Instruction) -> list[_Instruction]:
    """Return instructions that run ``otherwise`` if the argument is one of ``values``."""
    code = [_argument(argument)]
    for left, value in zip(range(len(values) - 1, -1, -1), values, strict=True):
        code.append((_JUMP_EQUAL, left, int(left == 0), value))
    return [*code, otherwise]


def _argument(index: int) -> _Instruction:
    return _LOAD, 0, 0, 16 + 8 * index  # the low 32 bits: all supported machines are little-endian


def _return(verdict: int) -> _Instruction:
    return _RETURN, 0, 0, verdict


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """Group sorted numbers into runs of consecutive ones, which take fewer comparisons."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
