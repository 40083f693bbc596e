"""HTTP client of vLLM servers, and the exceptions that its failures raise.

The request bounds the size of its response, and no response is decompressed, so a server can't
make the client use unbounded memory or time.

The client uses aiohttp, which takes 0.15 to 0.4 ms of CPU time per request (64 at once). httpx
takes 1.7 ms or more, on cores that the trainer and the server may need.
"""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NoReturn, Protocol, runtime_checkable
from uuid import uuid4

import aiohttp
import attrs
import msgspec

from primerl.serving import names
from primerl.serving.protocol import responses
from primerl.serving.protocol.kept_prompts import HEADER, KEPT, PromptFields

CONNECT_S = 5.0
KEEP_ALIVE_S = 2.0  # the server closes idle connections after 5 s, perhaps as one is reused
SMALL_BYTES = 1 << 20  # default maximum size of a response
ERROR_BYTES = 1 << 16  # the part of an error response that is read
BUSY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)


class Unreachable(ConnectionError):
    """A server can't be reached, or closed the connection.

    With ``sent``, the server may have received the request.
    """

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class Refused(ValueError):
    """A server refused an invalid request, as any other server would."""


class NotFound(Refused):
    """A server lacks the endpoint, or the model or adapter that a request names."""


class NotKept(Refused):
    """A server does not hold the prompt that a request continues."""


class ServerFailed(RuntimeError):
    """A server failed or is overloaded; the same request may succeed later."""


class BadResponse(RuntimeError):
    """A response is too large for its request, or compressed."""


@runtime_checkable
class Extraction(Protocol):
    """Protocol of objects that take a part out of a response while it arrives."""

    @property
    def most_bytes(self) -> int:
        """The maximum number of bytes that are taken out of the response."""
        ...

    async def take(self, chunk: bytes) -> bytes:
        """Take out the part that lies in a chunk, and return the rest of the chunk."""
        ...


@attrs.frozen(eq=False)
class _Answer:
    """The content and the headers of a response."""

    content: bytes
    headers: Mapping[str, str]


class Http:
    """HTTP client for any number of servers; created and used on one event loop."""

    def __init__(self, api_key: str | None) -> None:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        kept = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        # After a 500 the server closes a connection that it promised to keep alive. The next
        # request on that connection would fail as if the server were dead, so calls that may get a
        # 500 each have a connection that is closed afterwards.
        single = aiohttp.TCPConnector(limit=0, force_close=True)
        options: dict[str, Any] = {"headers": headers, "timeout": timeout, "auto_decompress": False}
        self._kept = aiohttp.ClientSession(connector=kept, **options)
        self._single = aiohttp.ClientSession(connector=single, **options)

    async def get(self, url: str, path: str, *, max_bytes: int = SMALL_BYTES) -> bytes:
        """Send a GET request and return the response's content; raises as ``post`` does."""
        answer = await self._request(self._kept, "GET", url, path, None, max_bytes)
        return answer.content

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
        """Send a POST of JSON and return the response's content.

        Cancellation, and an exception of ``extraction``, close the connection.

        Args:
            url: of the server.
            path: of the endpoint.
            body: JSON, or None for an empty body.
            keep: whether later requests may reuse the connection.
            max_bytes: the maximum size of the content.
            extraction: takes a part out of the response; the part does not count as content.

        Raises:
            BadResponse: the response is larger, or compressed.
            Unreachable: the server can't be reached, or closed the connection.
            Refused: the request is invalid.
            ServerFailed: the server failed, or is overloaded.
            RuntimeError: the key is wrong, the endpoint is disabled, or the server does not speak
                HTTP.
        """
        session = self._kept if keep else self._single
        content = b"" if body is None else msgspec.json.encode(body)
        answer = await self._request(session, "POST", url, path, content, max_bytes, extraction)
        return answer.content

    async def complete(
        self,
        url: str,
        body: Mapping[str, Any],
        *,
        prompt: PromptFields,
        max_bytes: int,
        extraction: Extraction | None = None,
        rank: int | None = None,
    ) -> tuple[responses.Response, bool]:
        """Send a completion request; return the response, and whether the server keeps the prompt.

        The response is without what ``extraction`` takes. ``rank`` is the data-parallel rank that
        is to serve the request; None for any. Also raises as ``post`` does.

        Raises:
            BadCompletion: the response does not match vLLM's schema, or answers another request.
        """
        request_id = uuid4().hex
        content = msgspec.json.encode({"request_id": request_id, **prompt.fields, **body})
        headers = {HEADER: prompt.header} if prompt.header else {}
        if rank is not None:
            headers[names.DATA_PARALLEL_RANK] = str(rank)
        answer = await self._request(
            self._kept,
            "POST",
            url,
            names.GENERATE,
            content,
            max_bytes,
            extraction,
            headers=headers,
        )
        response = responses.read_response(
            answer.content,
            url,
            request_id=request_id,
            prompt_length=prompt.length,
            adapter=body.get("model"),
        )
        return response, answer.headers.get(HEADER) == KEPT

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
        *,
        headers: Mapping[str, str] | None = None,
    ) -> _Answer:
        most_bytes = max_bytes + (0 if extraction is None else extraction.most_bytes)
        where = f"{url}{path.partition('?')[0]}"
        try:
            async with session.request(
                method, url + path, data=body, headers=headers, allow_redirects=False
            ) as response:
                if not 200 <= response.status < 300:
                    _raise_error(where, response.status, await _read(response, ERROR_BYTES))
                encoding = response.headers.get("Content-Encoding", "identity")
                if encoding.lower() != "identity":
                    raise BadResponse(f"{where} sent a response compressed by {encoding[:40]!r}")
                declared = response.content_length or 0
                if declared <= most_bytes:
                    content = await _read(response, max_bytes, extraction)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(f"{url} can't be reached ({error})", sent=False) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            text = f"{url} closed the connection ({error or type(error).__name__})"
            raise Unreachable(text, sent=True) from error
        except (aiohttp.ClientError, asyncio.LimitOverrunError) as error:
            # "from None": the cause has the request's headers, which contain the key.
            raise RuntimeError(f"{url} is not an HTTP server: {error}") from None
        if declared > most_bytes or len(content) > max_bytes:
            raise BadResponse(f"{where} sent more than the expected {most_bytes:,} bytes")
        return _Answer(content, response.headers)


async def _read(
    response: aiohttp.ClientResponse, max_bytes: int, extraction: Extraction | None = None
) -> bytes:
    """Read the content; stop and close the connection soon after ``max_bytes``."""
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
        raise RuntimeError(what)  # the endpoint is disabled, whatever the request is
    if status == HTTPStatus.NOT_FOUND:
        raise NotFound(what)
    if status == HTTPStatus.CONFLICT:
        raise NotKept(what)
    raise Refused(what)


def _refusal(content: bytes) -> str:
    """Return the message of an error response."""
    try:
        error: Any = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return repr(content[:300])
    for name in ("error", "message", "detail"):
        if isinstance(error, Mapping) and error.get(name):
            error = error[name]
    return str(error)[:500]
