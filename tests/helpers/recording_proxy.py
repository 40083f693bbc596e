"""A reverse proxy on loopback that records what an agent sends and what the gateway answers."""

import json

import aiohttp
import attrs
from aiohttp import web

ONE_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


@attrs.define(kw_only=True)
class Exchange:
    """One request and its answer; ``status`` is None if the client left before the answer."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes
    status: int | None = None
    answer: bytes = b""

    @property
    def body(self):
        """The request's JSON, or None."""
        try:
            return json.loads(self.content)
        except ValueError:
            return None

    def __str__(self):
        sent = self.content.decode(errors="replace")
        received = self.answer.decode(errors="replace")
        return f"{self.method} {self.path} {sent}\n-> {self.status} {received}"


class RecordingProxy:
    """A proxy, running while its asynchronous context is open; set ``upstream`` before its use."""

    def __init__(self):
        self.url = ""
        self.upstream = ""
        self.exchanges = []

    @property
    def failed(self):
        """The exchanges that the gateway answered with an error, or not at all."""
        return [one for one in self.exchanges if one.status is None or one.status >= 400]

    async def __aenter__(self):
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._client = aiohttp.ClientSession(
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
        )
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()
        await self._client.close()

    async def _forward(self, request):
        exchange = Exchange(
            method=request.method,
            path=request.path_qs,
            headers=dict(request.headers),
            content=await request.read(),
        )
        self.exchanges.append(exchange)
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in ONE_HOP]
        async with self._client.request(
            request.method,
            self.upstream + request.path_qs,
            headers=headers,
            data=exchange.content,
        ) as answered:
            response = web.StreamResponse(status=answered.status)
            for name, value in answered.headers.items():
                if name.lower() not in ONE_HOP:
                    response.headers.add(name, value)
            await response.prepare(request)
            async for piece in answered.content.iter_any():
                exchange.answer += piece
                await response.write(piece)
            await response.write_eof()
            exchange.status = answered.status
        return response
