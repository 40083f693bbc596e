"""Requests to vLLM servers, and what their failures mean.

No answer is read beyond what its request can be answered with, and none is decompressed: what a
server sends decides neither how much memory the client takes nor for how long it reads.

aiohttp, because httpx took 1.7 ms of CPU and more for a request where it takes 0.15 to 0.4 (64 at
once), on cores that trainer and server may need.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, NoReturn

import aiohttp
import msgspec

CONNECT_S = 5.0
KEEP_ALIVE_S = 2.0  # less than the server's 5 s, which might close a connection as it is used
SMALL_BYTES = 1 << 20  # the most bytes of an answer of which little is expected
ERROR_BYTES = 1 << 16  # of an error are read, whatever follows
TOO_MANY = 429
FORBIDDEN = 403
NO_KEY = 401


class Unreachable(ConnectionError):
    """A server can't be reached, or closed the connection. ``sent``: it may have begun."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class Refused(ValueError):
    """A server refused a request for what it asks; another one would too."""


class ServerFailed(RuntimeError):
    """A server could not do what it was asked, and may later."""


class BadAnswer(RuntimeError):
    """A server answered what can't be the answer to the request: too much of it, or compressed."""


class Http:
    """Connections to servers; made and used on one event loop."""

    def __init__(self, api_key: str | None) -> None:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        kept = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        # After a 500 the server closes a connection that it has promised to keep. Whoever used it
        # next would take the server for dead, so calls that may fail have one of their own.
        single = aiohttp.TCPConnector(limit=0, force_close=True)
        options: dict[str, Any] = {"headers": headers, "timeout": timeout, "auto_decompress": False}
        self._kept = aiohttp.ClientSession(connector=kept, **options)
        self._single = aiohttp.ClientSession(connector=single, **options)

    async def get(self, url: str, path: str, *, max_bytes: int = SMALL_BYTES) -> bytes:
        """The content of a page; raises as ``post`` does."""
        return await self._request(self._kept, "GET", url, path, None, max_bytes)

    async def post(
        self,
        url: str,
        path: str,
        body: bytes = b"",
        *,
        keep: bool = False,
        max_bytes: int = SMALL_BYTES,
    ) -> bytes:
        """The content of an answer; ``keep`` its connection for the next. A request that is
        cancelled closes it.

        Args:
            url: of the server.
            path: of the route.
            body: what is sent.
            keep: whether the connection is used again.
            max_bytes: the most that the answer may have.

        Raises:
            BadAnswer: the answer is longer, or compressed.
            Unreachable: the server is gone, or never was there.
            Refused: it refuses the request for what it says.
            ServerFailed: it failed, or has too much to do.
            RuntimeError: it needs another key, does not offer the route, or speaks no HTTP.
        """
        session = self._kept if keep else self._single
        return await self._request(session, "POST", url, path, body, max_bytes)

    async def close(self) -> None:
        """Close all connections."""
        await self._kept.close()
        await self._single.close()

    async def _request(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        path: str,
        body: bytes | None,
        max_bytes: int,
    ) -> bytes:
        where = f"{url}{path.partition('?')[0]}"
        try:
            async with session.request(
                method, url + path, data=body, allow_redirects=False
            ) as response:
                if not 200 <= response.status < 300:
                    _raise_error(where, response.status, await _read(response, ERROR_BYTES))
                encoding = response.headers.get("Content-Encoding", "identity")
                if encoding.lower() != "identity":
                    raise BadAnswer(f"{where} answered with the encoding {encoding[:40]!r}")
                declared = response.content_length or 0
                if declared <= max_bytes:
                    content = await _read(response, max_bytes)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(f"{url} can't be reached ({error})", sent=False) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            text = f"{url} closed the connection ({error or type(error).__name__})"
            raise Unreachable(text, sent=True) from error
        except (aiohttp.ClientError, asyncio.LimitOverrunError) as error:
            # Not its cause as well: that holds the request's headers, and so the key.
            raise RuntimeError(f"{url} is no server of HTTP: {error}") from None
        if declared > max_bytes or len(content) > max_bytes:
            raise BadAnswer(
                f"{where} answered more than the {max_bytes:,} bytes that were expected"
            )
        return content


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The content; where there is more than ``max_bytes`` of it, a little more than those.

    The connection is then closed with the response, as one with an answer half read always is.
    """
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > max_bytes:
            response.close()
            break
    return bytes(content)


def _raise_error(where: str, status: int, content: bytes) -> NoReturn:
    what = f"{where} answered {status}: {_refusal(content)}"
    if status == NO_KEY:
        raise RuntimeError(f"{what}; pass the server's key: VLLMEngine(..., api_key=)")
    if status >= 500 or status == TOO_MANY:
        raise ServerFailed(what)
    if status == FORBIDDEN:
        raise RuntimeError(what)  # whatever is asked for, such as a route that is not enabled
    raise Refused(what)


def _refusal(content: bytes) -> str:
    """What an answer that is an error says, in a line."""
    try:
        error: Any = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return repr(content[:300])
    for name in ("error", "message", "detail"):
        if isinstance(error, Mapping) and error.get(name):
            error = error[name]
    return str(error)[:500]
