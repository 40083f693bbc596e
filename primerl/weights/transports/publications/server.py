"""``PublicationServer``, which sends published files from a host's memory to other hosts, by TCP.

A request has 112 bytes: a token, the name of a file, and the first byte and the number of bytes to
read. The answer is one byte, and after a zero the bytes of the file. Any other byte says why the
request is refused, and ends the connection. Nothing is encrypted.
"""

import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import socketserver
import struct
import threading
import time
from pathlib import Path
from typing import Any

from primerl._common.files import member
from primerl._common.threads import in_thread
from primerl.weights.transports.publications.manifests import (
    FileSource,
    hold,
    is_tensor_file,
    timeout_of,
)

log = logging.getLogger(__name__)

REQUEST = struct.Struct("!32s64sQQ")  # token, name, first byte, number of bytes
SENT = 0
REFUSALS = {
    1: "the token is not that of the trainer's current run",
    2: "the trainer no longer has the file",
    3: "the file is shorter than its manifest says",
}
_WRONG_TOKEN, _NO_FILE, _TOO_SHORT = REFUSALS

_ASK_S = 30.0
"""Seconds in which a connected reader has to send a request."""
_POLL_S = 0.1
"""How often the server looks whether it was closed."""
_MOST_SENT = 1 << 30  # bytes of one call of sendfile


class PublicationServer:
    """A server, in threads of this process, of the tensor files of publications in a folder.

    While bytes travel, the threads do not hold Python's lock.

    Args:
        folder: the folder with the files.
        address: this host's address to listen on.
        most_connections: how many readers may be connected; others are refused.
        ask_s: the seconds in which a connected reader has to send a request.
        timeout_s: the seconds in which it has to take the bytes; by default ``timeout_of`` them.

    Raises:
        OSError: this host does not have the address.
    """

    def __init__(
        self,
        folder: Path,
        address: str,
        *,
        most_connections: int = 512,
        ask_s: float = _ASK_S,
        timeout_s: float | None = None,
    ) -> None:
        token = secrets.token_bytes(32)
        self._server = _Listener(
            address,
            folder=folder,
            token=token,
            most_connections=most_connections,
            ask_s=ask_s,
            timeout_s=timeout_s,
        )
        host, port = self._server.server_address[:2]
        self.source = FileSource(str(host), int(port), token.hex())
        self._process = os.getpid()
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=[_POLL_S], daemon=True, name="primerl-files"
        )
        self._thread.start()

    def close(self) -> None:
        """Close all connections, and refuse new ones; in a forked process, do nothing."""
        if os.getpid() != self._process:
            return  # the connections are the parent's, and the thread is not here
        shut(self._server.socket)  # otherwise a forked process keeps the port open
        if threading.current_thread() is self._thread:  # garbage collection may close it there
            in_thread(self._server.shutdown)  # which waits for that thread
        else:
            self._server.shutdown()
        self._server.server_close()
        self._server.disconnect()


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False  # ``disconnect`` ends the threads
    request_queue_size = 128

    def __init__(
        self,
        address: str,
        *,
        folder: Path,
        token: bytes,
        most_connections: int,
        ask_s: float,
        timeout_s: float | None,
    ) -> None:
        self.folder = folder
        self.token = token
        self.ask_s = ask_s
        self.timeout_s = timeout_s
        self._most_connections = most_connections
        self._connections: set[socket.socket] = set()
        super().__init__((address, 0), _RangeHandler)

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002
        if len(self._connections) < self._most_connections:
            return True
        log.warning("%s was refused: %d are connected", client_address[0], len(self._connections))
        return False

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        log.warning("sending weights to %s failed", client_address[0], exc_info=True)

    def disconnect(self) -> None:
        for connection in tuple(self._connections):
            shut(connection)


class _RangeHandler(socketserver.BaseRequestHandler):
    """Answers the requests of one connected reader, one after the other."""

    server: _Listener
    request: socket.socket

    def handle(self) -> None:
        try:
            while (asked := self._asked()) is not None:
                refusal = self._answered(*REQUEST.unpack(asked))
                if refusal != SENT:
                    log.warning("%s was refused: %s", self.client_address[0], REFUSALS[refusal])
                    self.request.sendall(bytes([refusal]))
                    return
        except (ConnectionError, TimeoutError) as error:
            log.warning("sending weights to %s ended: %s", self.client_address[0], error)

    def _asked(self) -> bytes | None:
        """Receive a request; return None if the reader has left, or has sent something shorter."""
        deadline = time.monotonic() + self.server.ask_s
        asked = bytearray()
        while len(asked) < REQUEST.size:
            self.request.settimeout(left_until(deadline))
            received = self.request.recv(REQUEST.size - len(asked))
            if not received:
                return None
            asked += received
        return bytes(asked)

    def _answered(self, token: bytes, padded: bytes, start: int, size: int) -> int:
        """Send the bytes that are asked for; return why not, or ``SENT``."""
        if not hmac.compare_digest(token, self.server.token):
            return _WRONG_TOKEN
        name = padded.rstrip(b"\0").decode("ascii", "replace")
        if not is_tensor_file(name):
            return _NO_FILE
        try:
            file = hold(member(self.server.folder, name))  # so that it is not overwritten meanwhile
        except ValueError:
            return _NO_FILE
        with file:
            if start + size > os.fstat(file.fileno()).st_size:
                return _TOO_SHORT
            given = self.server.timeout_s
            deadline = time.monotonic() + (timeout_of(size) if given is None else given)
            self.request.settimeout(left_until(deadline))
            self.request.sendall(bytes([SENT]))
            self._send(file.fileno(), start, start + size, deadline)
        return SENT

    def _send(self, file: int, start: int, end: int, deadline: float) -> None:
        writable = select.poll()
        writable.register(self.request, select.POLLOUT)
        while start < end:
            writable.poll(1000 * left_until(deadline))
            with contextlib.suppress(BlockingIOError):  # also if the time is over
                sent = os.sendfile(self.request.fileno(), file, start, min(end - start, _MOST_SENT))
                if not sent:
                    raise ConnectionError("the file was shortened meanwhile")
                start += sent


def left_until(deadline: float) -> float:
    """Return the seconds that are left.

    Raises:
        TimeoutError: there are none.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def shut(connection: socket.socket) -> None:
    """End a connection, or a listener, in all threads and processes that have it."""
    with contextlib.suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)
