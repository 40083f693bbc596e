"""HTTP requests to vLLM servers, and what their failures mean.

The size of a response is bounded by its request, and no response is decompressed, so a server can't
make the client use unbounded memory or time.

aiohttp takes 0.15 to 0.4 ms of CPU per request (64 at once), httpx 1.7 ms or more, on cores that
the trainer and the server may need.
"""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NoReturn, Protocol, runtime_checkable
from uuid import uuid4

import aiohttp
import msgspec

from primerl.serving import names
from primerl.serving.protocol import responses

CONNECT_S = 5.0
KEEP_ALIVE_S = 2.0  # less than the server's 5 s, which might close a connection as it is used
SMALL_BYTES = 1 << 20  # default maximum size of a response
ERROR_BYTES = 1 << 16  # the part of an error response that is read
BUSY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)


class Unreachable(ConnectionError):
    """A server can't be reached, or closed the connection; ``sent``: it may have the request."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class Refused(ValueError):
    """A server refused an invalid request; another server would too."""


class NotFound(Refused):
    """The server does not have the route, or the model or adapter that a request names."""


class ServerFailed(RuntimeError):
    """A server failed or is overloaded; the same request may succeed later."""


class BadResponse(RuntimeError):
    """A response is too large for its request, or compressed."""


@runtime_checkable
class Extraction(Protocol):
    """Takes a part out of a response as it arrives."""

    @property
    def most_bytes(self) -> int:
        """The most bytes that it takes."""
        ...

    async def take(self, chunk: bytes) -> bytes:
        """Take its part out of a chunk; returns the rest of it."""
        ...


class Http:
    """A client of servers; created and used on one event loop."""

    def __init__(self, api_key: str | None) -> None:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        kept = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        # After a 500 the server closes a connection that it promised to keep alive. The next
        # request on it would make the server look dead, so calls that may fail don't share one.
        single = aiohttp.TCPConnector(limit=0, force_close=True)
        options: dict[str, Any] = {"headers": headers, "timeout": timeout, "auto_decompress": False}
        self._kept = aiohttp.ClientSession(connector=kept, **options)
        self._single = aiohttp.ClientSession(connector=single, **options)

    async def get(self, url: str, path: str, *, max_bytes: int = SMALL_BYTES) -> bytes:
        """The content of a GET response; raises as ``post`` does."""
        return await self._request(self._kept, "GET", url, path, None, max_bytes)

    async def post(
        self,
        url: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        keep: bool = False,
        max_bytes: int = SMALL_BYTES,
        extraction: Extraction | None = None,
    ) -> bytes:
        """The content of a response of up to ``max_bytes`` to a POST of JSON.

        What ``extraction`` takes is not of the content. What it raises closes the connection, and
        is raised. A request that is cancelled closes its connection, which ``keep`` keeps alive for
        others.

        Raises:
            BadResponse: the response is larger, or compressed.
            Unreachable: the server can't be reached, or closed the connection.
            Refused: the request is invalid.
            ServerFailed: the server failed, or is overloaded.
            RuntimeError: the key is wrong, the route is disabled, or the server doesn't speak HTTP.
        """
        session = self._kept if keep else self._single
        content = b"" if body is None else msgspec.json.encode(body)
        return await self._request(session, "POST", url, path, content, max_bytes, extraction)

    async def complete(
        self,
        url: str,
        body: Mapping[str, Any],
        *,
        max_bytes: int,
        extraction: Extraction | None = None,
    ) -> responses.Response:
        """A server's response to a completion request, without what ``extraction`` takes.

        Raises:
            BadCompletion: the response is not vLLM's, or answers another request.
            RuntimeError: as ``post`` raises.
        """
        request_id = uuid4().hex
        body = {"request_id": request_id, **body}
        content = await self.post(
            url, names.GENERATE, body, keep=True, max_bytes=max_bytes, extraction=extraction
        )
        return responses.read_response(
            content,
            url,
            request_id=request_id,
            prompt_length=len(body["token_ids"]),
            adapter=body.get("model"),
        )

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
        extraction: Extraction | None = None,
    ) -> bytes:
        most_bytes = max_bytes + (0 if extraction is None else extraction.most_bytes)
        where = f"{url}{path.partition('?')[0]}"
        try:
            async with session.request(
                method, url + path, data=body, allow_redirects=False
            ) as response:
                if not 200 <= response.status < 300:
                    _raise_error(where, response.status, await _read(response, ERROR_BYTES))
                encoding = response.headers.get("Content-Encoding", "identity")
                if encoding.lower() != "identity":
                    raise BadResponse(f"{where} answered with the encoding {encoding[:40]!r}")
                declared = response.content_length or 0
                if declared <= most_bytes:
                    content = await _read(response, max_bytes, extraction)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(f"{url} can't be reached ({error})", sent=False) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            text = f"{url} closed the connection ({error or type(error).__name__})"
            raise Unreachable(text, sent=True) from error
        except (aiohttp.ClientError, asyncio.LimitOverrunError) as error:
            # Without its cause, which holds the request's headers, and so the key.
            raise RuntimeError(f"{url} is not an HTTP server: {error}") from None
        if declared > most_bytes or len(content) > max_bytes:
            raise BadResponse(f"{where} answered with more than the expected {most_bytes:,} bytes")
        return content


async def _read(
    response: aiohttp.ClientResponse, max_bytes: int, extraction: Extraction | None = None
) -> bytes:
    """The content, cut off after a little more than ``max_bytes``, which closes the connection."""
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk if extraction is None else await extraction.take(chunk)
        if len(content) > max_bytes:
            response.close()
            break
    return bytes(content)


def _raise_error(where: str, status: int, content: bytes) -> NoReturn:
    what = f"{where} answered {status}: {_refusal(content)}"
    if status == HTTPStatus.UNAUTHORIZED:
        raise RuntimeError(f"{what}; pass the server's key: VLLMEngine(..., api_key=)")
    if status >= 500 or status in BUSY:
        raise ServerFailed(what)
    if status == HTTPStatus.FORBIDDEN:
        raise RuntimeError(what)  # for any request, as where the route is not enabled
    if status == HTTPStatus.NOT_FOUND:
        raise NotFound(what)
    raise Refused(what)


def _refusal(content: bytes) -> str:
    """The message of an error response."""
    try:
        error: Any = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return repr(content[:300])
    for name in ("error", "message", "detail"):
        if isinstance(error, Mapping) and error.get(name):
            error = error[name]
    return str(error)[:500]
