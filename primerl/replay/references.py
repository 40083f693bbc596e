"""References to recorded routes: where they lie, and what may be opened by such a name.

    shm:FOLDER/NAME          a store in this host's shared memory
    file:/path/FOLDER/NAME   a store on a filesystem that hosts share
    http://HOST:PORT/NAME.CODE   a store that a server of another host serves

A reference comes from another process, so it opens nothing but what a store has written: NAME and
FOLDER are those of stores and of this user, neither is a link, and CODE shows that whoever made the
reference has the key, which is sent to nobody else.
"""

import hashlib
import hmac
import os
import re
import stat
from pathlib import Path

import attrs

from primerl._common.shared_folder import shared_memory
from primerl.replay.server import NAME

KEY_VARIABLE = "PRIMERL_API_KEY"

_FOLDER = re.compile(r"primerl-\d+-(?:[A-Za-z0-9._-]+@)?routes-[0-9a-f]{16}")
_CODE_DIGITS = 32
_SERVED = re.compile(
    r"http://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})/(?P<name>[0-9a-f-]+)"
    rf"\.(?P<code>[0-9a-f]{{{_CODE_DIGITS}}})"
)


@attrs.frozen
class FilePlace:
    """A file of a store, on this host or a filesystem that it shares."""

    folder: Path
    name: str


@attrs.frozen
class ServedPlace:
    """A file that a server serves."""

    host: str
    port: int
    name: str
    key: str = attrs.field(repr=False)


def parse_reference(reference: str) -> FilePlace | ServedPlace:
    """What a reference refers to.

    Raises:
        ValueError: it is none of a store's, leads elsewhere, or no key is set that made it.
    """
    kind, _, rest = reference.partition(":")
    if kind == "shm":
        folder, _, name = rest.partition("/")
        return _file_place(shared_memory(), folder, name)
    if kind == "file" and rest.startswith("/"):
        path, _, name = rest.rpartition("/")
        parent, _, folder = path.rpartition("/")
        return _file_place(Path(parent or "/"), folder, name)
    if kind == "http":
        return _served_place(reference)
    raise ValueError(f"{reference!r:.200} is no reference to routes: shm:, file:/ or http://")


def file_reference(folder: Path, name: str) -> str:
    """The reference to a file of a store that hosts share, or, in shared memory, processes."""
    if folder.parent == shared_memory():
        return f"shm:{folder.name}/{name}"
    return f"file:{folder}/{name}"


def served_reference(address: str, name: str, key: str) -> str:
    """The reference to a file that the server at ``http://host:port`` serves."""
    return f"{address}/{name}.{_code(f'{address}/{name}', key)}"


def _code(address: str, key: str) -> str:
    return hmac.digest(key.encode(), f"routes {address}".encode(), hashlib.sha256).hex()[
        :_CODE_DIGITS
    ]


def _file_place(parent: Path, folder: str, name: str) -> FilePlace:
    if not _FOLDER.fullmatch(folder) or not NAME.fullmatch(name):
        raise ValueError(f"{f'{folder}/{name}'!r:.200} is no file of a store of routes")
    path = parent / folder
    try:
        found = path.lstat()
    except FileNotFoundError:
        return FilePlace(path, name)  # whoever opens it finds that it's gone
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ValueError(f"{path} is no private folder of this user")
    return FilePlace(path, name)


def _served_place(reference: str) -> ServedPlace:
    found = _SERVED.fullmatch(reference)
    if found is None or not NAME.fullmatch(found["name"]) or int(found["port"]) > 65535:
        raise ValueError(f"{reference!r:.200} is no address of recorded routes")
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise ValueError(f"set {KEY_VARIABLE} to the key of the server of routes")
    address = reference.rpartition(".")[0]
    if not hmac.compare_digest(_code(address, key), found["code"]):
        raise ValueError(
            f"{address} was not given out by a store with the key in {KEY_VARIABLE}; the key is "
            "not sent there"
        )
    return ServedPlace(found["host"].strip("[]"), int(found["port"]), found["name"], key)
