"""Users that no account has: what is started by real root becomes one of them."""

import os

# One for each pool and sandbox, so that limits that count by user hold for each.
_FIRST = 2_000_000_000
_MOST_PROCESSES = 1 << 22  # the kernel's limit for process ids
_MOST_IN_USE = 500


def free(number: int) -> int:
    """A user that no account and no other pool has, or 0 for an ordinary user.

    Other numbers give other users. 0 is also how an ordinary user is called in its own user
    namespace; so is the only user of a container that maps no other.
    """
    if os.getuid() != 0:
        return 0
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    wanted = _FIRST + os.getppid() + number % _MOST_IN_USE * _MOST_PROCESSES
    if any(first <= wanted < first + count for first, _, count in ranges):
        return wanted
    first, _, count = max(ranges, key=lambda entry: entry[2])
    chosen = count // 2 + os.getppid() + number
    return first + 1 + chosen % (count - 1) if count > 1 else 0
