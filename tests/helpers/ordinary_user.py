"""Run a command as an ordinary user. Root starts it.

    python ordinary_user.py UID GRANT FOLDER COMMAND...

The interpreter and the repository may be in folders that only root can enter. The command therefore
runs in its own mount namespace. There, the interpreter and the repository have the same paths, but
below folders that everybody can enter. ``FOLDER`` is given to the user. ``GRANT`` is how many
subordinate users the user has there, in an account of its own; without one, if it is 0.
"""

import os
import stat
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))

from primerl.sandbox.guest.isolation import kernel

FIRST_GRANTED = 1_000_000_000


def main(uid: int, grant: int, folder: str, command: list[str]) -> None:
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    needed = {sys.base_prefix, sys.prefix, str(REPOSITORY), folder}
    opened = {path: os.open(path, os.O_PATH) for path in needed}
    for path in sorted(needed):
        closed = first_closed(path)
        if closed is not None:
            kernel.mount("tmpfs", closed, "tmpfs", 0, "size=1m,mode=755")
    for path in sorted(needed):
        if not os.path.exists(path):
            os.makedirs(path)
            kernel.mount(
                f"/proc/self/fd/{opened[path]}", path, None, kernel.MS_BIND | kernel.MS_REC
            )
    if grant:
        account = f"tester:x:{uid}:{uid}::{folder}:/bin/sh\n"
        replace("/etc/passwd", Path("/etc/passwd").read_text("utf-8") + account, folder)
        for name in ("subuid", "subgid"):
            replace(f"/etc/{name}", f"tester:{FIRST_GRANTED}:{grant}\n", folder)
    os.chown(folder, uid, uid)
    os.chdir(REPOSITORY)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    folders = dict.fromkeys(["HOME", "TMPDIR", "PYTEST_DEBUG_TEMPROOT"], folder)
    os.environ.update(folders, PYTHONDONTWRITEBYTECODE="1")
    os.execv(command[0], command)


def replace(path: str, content: str, folder: str) -> None:
    """Give a file another content, in this mount namespace only."""
    other = Path(folder, Path(path).name)
    other.write_text(content, encoding="utf-8")
    kernel.mount(str(other), path, None, kernel.MS_BIND)


def first_closed(path: str) -> str | None:
    """Return the topmost folder above ``path`` that other users can't enter, or None."""
    for parent in [*reversed(Path(path).parents)][1:]:
        if not os.stat(parent).st_mode & stat.S_IXOTH:
            return str(parent)
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
