"""Requests to vLLM servers, and what their failures mean."""

import contextlib
from collections.abc import Iterator
from typing import Any

from primerl._optional import require
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


class Http:
    """Connections to servers; all of it belongs to one event loop."""

    def __init__(self, api_key: str | None) -> None:
        self._httpx = require("httpx", extra="vllm")
        headers = {"content-type": "application/json"}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self._client = self._httpx.AsyncClient(
            headers=headers,
            timeout=self._httpx.Timeout(None, connect=CONNECT_S),  # waits are bounded by callers
            limits=self._httpx.Limits(
                max_connections=None,
                max_keepalive_connections=None,
                keepalive_expiry=KEEP_ALIVE_S,
            ),
            trust_env=False,  # servers are near: no proxy
        )

    async def get(self, url: str, path: str) -> bytes:
        """The content of a page; raises as ``post`` does."""
        with self._failures(url):
            return _content(url, path, await self._client.get(url + path))

    async def post(self, url: str, path: str, body: bytes = b"") -> bytes:
        """The content of an answer.

        Raises:
            Unreachable: the server is gone, or never was there.
            Refused: it refuses the request for what it says.
            ServerFailed: it failed, or has too much to do.
            RuntimeError: it needs another key.
        """
        with self._failures(url):
            return _content(url, path, await self._client.post(url + path, content=body))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    @contextlib.contextmanager
    def _failures(self, url: str) -> Iterator[None]:
        http = self._httpx
        try:
            yield
        except (http.ConnectError, http.ConnectTimeout) as error:
            text = f"{url} can't be reached: {error or type(error).__name__}"
            raise Unreachable(text, sent=False) from error
        except http.TransportError as error:
            text = f"{url} closed the connection: {error or type(error).__name__}"
            raise Unreachable(text, sent=True) from error


def _content(url: str, path: str, response: Any) -> bytes:
    content: bytes = response.content
    status: int = response.status_code
    if status < 300:  # noqa: PLR2004
        return content
    what = f"{url}{path.partition('?')[0]} answered {status}: {refusal(content)}"
    if status in NO_KEY:
        raise RuntimeError(f"{what}; pass the server's key: VLLMEngine(..., api_key=)")
    if status >= 500 or status == TOO_MANY:  # noqa: PLR2004
        raise ServerFailed(what)
    raise Refused(what)
