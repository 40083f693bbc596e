"""Requests to vLLM servers over connections that stay open, and what their failures mean.

A general client of HTTP (httpx) takes 60 times as much of a core for each request (measured: 6.6
against 0.1 ms), which the trainer or the server on the same machine would do without.
"""

import asyncio
import time
from urllib.parse import urlsplit

from primerl.rollout.vllm_wire import Refused, refusal

CONNECT_S = 5.0
KEEP_ALIVE_S = 2.0  # less than the server's 5 s, which might close a connection as it is used
TOO_MANY = 429
NO_KEY = (401, 403)


class Unreachable(ConnectionError):
    """A server can't be reached, or closed the connection. ``sent``: it may have begun."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class ServerFailed(RuntimeError):
    """A server could not do what it was asked, and may later."""


class _Connection:
    """An open connection, and when it was last used."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.used = time.monotonic()

    @property
    def fresh(self) -> bool:
        """Whether it can be used again."""
        age = time.monotonic() - self.used
        return age < KEEP_ALIVE_S and not self.reader.at_eof() and not self.writer.is_closing()


class Http:
    """Connections to servers; all of it belongs to one event loop."""

    def __init__(self, api_key: str | None) -> None:
        self._key = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
        self._idle: dict[str, list[_Connection]] = {}

    async def get(self, url: str, path: str) -> bytes:
        """The content of a page; raises as ``post`` does."""
        return await self._request("GET", url, path, b"")

    async def post(self, url: str, path: str, body: bytes = b"") -> bytes:
        """The content of an answer. A request that is cancelled closes its connection.

        Raises:
            Unreachable: the server is gone, or never was there.
            Refused: it refuses the request for what it says.
            ServerFailed: it failed, or has too much to do.
            RuntimeError: it needs another key, or speaks no HTTP.
        """
        return await self._request("POST", url, path, body)

    def close(self) -> None:
        """Close the connections that are not in use."""
        for connections in self._idle.values():
            for one in connections:
                one.writer.close()
        self._idle.clear()

    async def _request(self, method: str, url: str, path: str, body: bytes) -> bytes:
        parts = urlsplit(url)
        head = (
            f"{method} {parts.path}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{self._key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection = self._reuse(url) or await self._connect(url)
        try:
            connection.writer.write(head.encode("latin-1") + body)
            await connection.writer.drain()
            status, content, stays = await _read_response(connection.reader)
        except (OSError, EOFError) as error:
            connection.writer.close()
            text = f"{url} closed the connection ({error or type(error).__name__})"
            raise Unreachable(text, sent=True) from error
        except (ValueError, asyncio.LimitOverrunError) as error:
            connection.writer.close()
            raise RuntimeError(f"{url} is no server of HTTP: {error}") from error
        except asyncio.CancelledError:
            connection.writer.transport.abort()  # the server ends the request as it sees this
            raise
        if stays:
            connection.used = time.monotonic()
            self._idle.setdefault(url, []).append(connection)
        else:
            connection.writer.close()
        return _checked(f"{url}{path.partition('?')[0]}", status, content)

    def _reuse(self, url: str) -> _Connection | None:
        idle = self._idle.get(url, [])
        while idle:
            if (connection := idle.pop()).fresh:
                return connection
            connection.writer.close()
        return None

    async def _connect(self, url: str) -> _Connection:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        try:
            async with asyncio.timeout(CONNECT_S):
                opened = await asyncio.open_connection(parts.hostname, port, ssl=secure or None)
        except OSError as error:  # a TimeoutError too
            text = f"{url} can't be reached ({error or f'no answer for {CONNECT_S:g} s'})"
            raise Unreachable(text, sent=False) from error
        return _Connection(*opened)


async def _read_response(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    """``(status, content, whether the connection stays open)`` (RFC 9112)."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, _, rest = lines[0].partition(" ")
    status = int(rest[:3])
    fields = (line.partition(":") for line in lines[1:] if line)
    headers = {name.strip().lower(): value.strip().lower() for name, _, value in fields}
    stays = version == "HTTP/1.1" and headers.get("connection") != "close"
    if headers.get("transfer-encoding") == "chunked":
        return status, await _read_chunks(reader), stays
    if "content-length" in headers:
        return status, await reader.readexactly(int(headers["content-length"])), stays
    return status, await reader.read(), False


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    content = b""
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        content += (await reader.readexactly(size + 2))[:-2]
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass  # trailers
    return content


def _checked(where: str, status: int, content: bytes) -> bytes:
    if 200 <= status < 300:  # noqa: PLR2004
        return content
    what = f"{where} answered {status}: {refusal(content)}"
    if status in NO_KEY:
        raise RuntimeError(f"{what}; pass the server's key: VLLMEngine(..., api_key=)")
    if status >= 500 or status == TOO_MANY:  # noqa: PLR2004
        raise ServerFailed(what)
    raise Refused(what)
