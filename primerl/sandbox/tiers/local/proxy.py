"""An HTTP proxy through which sandboxes reach listed servers, and nothing else.

The network namespace of a sandbox has no interface but loopback. The sandbox's init process opens
a listening socket there and passes it to the owner process, where this proxy accepts connections
on it. So no address of the host is reachable from inside.
"""

import asyncio
import contextlib
import re
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from primerl.sandbox.guest.isolation.namespace_sandbox import PROXY_PORT

_HEAD_BYTES = 16384
_HEAD_S = 10.0
_CONNECT_S = 10.0
_IDLE_S = 60.0
_CHUNK = 1 << 16
_MOST_CONNECTIONS = 32  # per sandbox
_SERVER = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")
_REQUEST = re.compile(rb"([A-Z]{1,16}) (\S{1,8000}) HTTP/1\.[01]")


class Proxy:
    """A proxy for all sandboxes of a pool.

    Args:
        allowed: ``"host:port"`` of each server that may be reached, with the host as requests
            name it.

    Raises:
        ValueError: an entry is not of the form ``host:port``.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        for server in allowed:
            found = _SERVER.fullmatch(server)
            if found is None or not 0 < int(found[2]) < 65536:
                raise ValueError(f"allow_network has {server!r}; expected 'host:port'")
        self.allowed = tuple(server.lower() for server in allowed)
        self._tasks: dict[socket.socket, set[asyncio.Task[None]]] = {}

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that tell programs the proxy's address."""
        address = f"http://127.0.0.1:{PROXY_PORT}"
        names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
        return dict.fromkeys(names, address)

    def serve(self, listener: socket.socket) -> None:
        """Start accepting one sandbox's connections."""
        self._tasks[listener] = set()
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def forget(self, listener: socket.socket) -> None:
        """Stop serving one sandbox and drop its connections."""
        if listener in self._tasks:
            asyncio.get_running_loop().remove_reader(listener)
            for task in self._tasks.pop(listener):
                task.cancel()

    async def close(self) -> None:
        """Stop serving all sandboxes and drop their connections."""
        tasks = [task for group in self._tasks.values() for task in group]
        for listener in list(self._tasks):
            self.forget(listener)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        tasks = self._tasks[listener]
        if len(tasks) >= _MOST_CONNECTIONS:
            connection.close()
            return
        task = asyncio.get_running_loop().create_task(self._handle(connection))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _handle(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=_HEAD_BYTES)
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            try:
                await self._answer(reader, writer)
            except asyncio.LimitOverrunError:
                writer.write(_refusal(431, "the head of the request is too long"))
            finally:
                with contextlib.suppress(OSError):
                    await _close(writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
        found = _REQUEST.match(head)
        if found is None:
            writer.write(_refusal(400, "this is not an HTTP request"))
            return
        method, target = found[1], found[2].decode("latin-1")
        server, path = _target(method, target)
        if server not in self.allowed:
            writer.write(_refusal(403, "the sandbox is not allowed to reach this server"))
            return
        host, _, port = server.rpartition(":")
        try:
            async with asyncio.timeout(_CONNECT_S):
                far_reader, far_writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError):
            writer.write(_refusal(502, "the server can't be reached"))
            return
        try:
            if method == b"CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                far_writer.write(_forwarded(head, method, path, server))
            await _join(reader, writer, far_reader, far_writer)
        finally:
            with contextlib.suppress(OSError):
                await _close(far_writer)


def _target(method: bytes, target: str) -> tuple[str, str]:
    """Return the server that a request addresses, as ``host:port``, and the path."""
    if method == b"CONNECT":
        return target.lower(), ""
    try:
        parts = urlsplit(target)
        port = parts.port or 80
    except ValueError:
        return "", ""
    if parts.scheme != "http" or parts.hostname is None or parts.username is not None:
        return "", ""
    path = parts.path or "/"
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port}".lower(), f"{path}?{parts.query}" if parts.query else path


def _forwarded(head: bytes, method: bytes, path: str, server: str) -> bytes:
    """Rewrite the head of a proxy request for the target server, with one request per connection.

    ``Host`` is set to the allowed server: a name that the sandbox chose could select another site
    at the same address.
    """
    dropped = (b"proxy-", b"connection:", b"host:")
    lines = [
        line for line in head.split(b"\r\n")[1:] if line and not line.lower().startswith(dropped)
    ]
    first = b"%s %s HTTP/1.1" % (method, path.encode("latin-1"))
    extra = [b"Host: " + server.encode(), b"Connection: close"]
    return b"\r\n".join([first, *extra, *lines, b"", b""])


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Copy data in both directions until the far side closes its stream."""
    ways = [
        asyncio.ensure_future(_copy(reader, far_writer)),
        asyncio.ensure_future(_copy(far_reader, writer)),
    ]
    try:
        await asyncio.wait([ways[1]])
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        async with asyncio.timeout(_IDLE_S):
            chunk = await reader.read(_CHUNK)
        if not chunk:
            with contextlib.suppress(OSError):
                writer.write_eof()
            return
        writer.write(chunk)
        async with asyncio.timeout(_IDLE_S):
            await writer.drain()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    async with asyncio.timeout(_CONNECT_S):
        await writer.wait_closed()


def _refusal(status: int, reason: str) -> bytes:
    body = f"{reason}\n".encode()
    head = f"HTTP/1.1 {status} Refused\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
