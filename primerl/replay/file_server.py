"""An HTTP server of byte ranges of a folder's files, for trainers on other hosts.

    python -I -S file_server.py FOLDER HOST PORT

``SpanServer`` starts this program in its own process, so that no bytes pass through the owner's
heap. The program uses only the standard library. It reads the key from the first line of standard
input, and writes the port to the first line of standard output.

``GET /name`` with ``Range: bytes=first-last`` returns these bytes with status 206 and a
``Content-Range``. ``DELETE /name`` removes a file. Both need ``Authorization: Bearer <key>``.
"""

import contextlib
import errno
import hmac
import os
import re
import socket
import stat
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME = re.compile(r"(?:([0-9a-f]{32})-)?[0-9a-f]{32}")
"""Matches names of references. In a name of two parts, the first is a digest of shared content."""

_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")
_IDLE_S = 60.0  # idle time after which a connection is closed
_POLL_S = 0.5
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)  # missing, a link, a socket


def open_member(folder: Path, name: str) -> int:
    """Open the file ``name`` in ``folder`` for reading, and return its file descriptor.

    Raises:
        FileNotFoundError: the name is not that of a reference, or there is no such regular file.
        OSError: it can't be opened, for example because too many files are open.
    """
    if not NAME.fullmatch(name):
        raise FileNotFoundError(name)
    try:
        # O_NONBLOCK, because opening a pipe without a writer would block.
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise FileNotFoundError(name) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(name)
    return descriptor


def content_path(folder: Path, digest: str) -> Path:
    """Return the path under which content that several references share is stored."""
    return folder / f"{digest}.shared"


def remove(folder: Path, name: str) -> bool:
    """Remove a reference, and shared content with its last reference; return whether it existed.

    Raises:
        FileNotFoundError: the name is not that of a reference.
    """
    found = NAME.fullmatch(name)
    if found is None:
        raise FileNotFoundError(name)
    try:
        (folder / name).unlink()
    except FileNotFoundError:
        return False
    if found[1] is not None:
        content = content_path(folder, found[1])
        # If another reference is linked to the content meanwhile, it keeps the data; only the
        # next reference has to store the content again.
        with contextlib.suppress(FileNotFoundError):
            if content.lstat().st_nlink == 1:
                content.unlink()
    return True


class _FileServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # all ranks ask at the same moment

    def __init__(self, address: tuple[str, int], folder: Path, key: bytes) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.folder = folder
        self.authorization = b"Bearer " + key
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print no traceback when a client has disconnected."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "primerl", ""
    timeout = _IDLE_S
    server: _FileServer

    def do_GET(self) -> None:
        """Send a range of bytes of a file."""
        if not self._knows_key():
            return
        try:
            descriptor = open_member(self.server.folder, self.path.removeprefix("/"))
        except FileNotFoundError:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        except OSError:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        with open(descriptor, "rb", buffering=0) as file:
            total = os.fstat(descriptor).st_size
            wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
            if wanted is None or not int(wanted[1]) <= int(wanted[2]) or int(wanted[1]) >= total:
                self._answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                return
            first, last = int(wanted[1]), min(int(wanted[2]), total - 1)
            self.send_response(HTTPStatus.PARTIAL_CONTENT)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Range", f"bytes {first}-{last}/{total}")
            self.send_header("Content-Length", str(last - first + 1))
            self.end_headers()
            self.connection.sendfile(file, first, last - first + 1)

    def do_DELETE(self) -> None:
        """Remove a file."""
        if not self._knows_key():
            return
        try:
            found = remove(self.server.folder, self.path.removeprefix("/"))
        except OSError:
            found = False
        self._answer(HTTPStatus.NO_CONTENT if found else HTTPStatus.NOT_FOUND)

    def _knows_key(self) -> bool:
        sent = self.headers.get_all("Authorization", [])
        if len(sent) == 1 and hmac.compare_digest(
            sent[0].encode("latin-1", "replace"), self.server.authorization
        ):
            return True
        self._answer(HTTPStatus.UNAUTHORIZED)
        return False

    def _answer(self, status: HTTPStatus) -> None:
        self.send_response(status)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        if status is not HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", "0")
        if status >= HTTPStatus.BAD_REQUEST:
            self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Write no access log, because nobody reads it."""


def main(folder: str, host: str, port: str) -> None:
    """Serve the files of ``folder`` until the supervisor ends this process."""
    key = bytearray()
    while byte := os.read(0, 1).strip(b"\n"):
        key += byte
    if not key:
        sys.exit("standard input has no key; without one, the server would be open to everyone")
    server = _FileServer((host, int(port)), Path(folder), bytes(key))
    os.write(1, f"{server.server_address[1]}\n".encode())
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
