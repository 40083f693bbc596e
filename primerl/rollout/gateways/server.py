"""The gateway's HTTP server, which listens on loopback where the rollouts are played."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any

import xxhash
from aiohttp import web

from primerl.rollout.agents.limits import AgentLimits, LimitReached
from primerl.rollout.conversations.calls import ContextFull
from primerl.rollout.conversations.history import History, Reply, Unrenderable
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.gateways.anthropic_messages import AnthropicMessages
from primerl.rollout.gateways.apis import Api, BadRequest, ModelRequest
from primerl.rollout.gateways.chat_completions import ChatCompletions
from primerl.rollout.gateways.responses import Responses
from primerl.rollout.gateways.sessions import GatewaySession
from primerl.rollout.renderers.loading import load_renderer
from primerl.types import SamplingParams

MAX_BODY = 1 << 26  # bytes of one request
CLOSE_S = 5.0
PING_S = 15.0  # clients abandon streams that are silent for minutes
APIS: tuple[Api, ...] = (ChatCompletions(), Responses(), AnthropicMessages())


def gateway(
    engine: Engine | None,
    tokenizer: Any,
    *,
    params: SamplingParams | None = None,
    renderer: Any = None,
    keep_reasoning: bool = False,
) -> "Gateway":
    """Return a server through which agents that speak a public API sample from ``engine``.

        async with rollout.gateway(engine, tokenizer, params=params) as gateway:
            async with gateway.open() as agent:
                client = openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.key)
                ...
            played = agent.rollout(reward=1.0)

    It serves OpenAI's Chat Completions and Responses and Anthropic's Messages, streamed or not, on
    127.0.0.1. Each rollout has its own key; see ``History`` for how its requests become samples.
    ``params`` fix the sampling, so a client's ``temperature``, ``top_p`` and ``seed`` are ignored.
    A client's ``max_tokens`` can only lower that of ``params``. Requests with settings that would
    change the reply's text, such as ``stop``, are refused.

    Args:
        engine: the engine that samples; may be passed to ``Gateway.open`` instead.
        tokenizer: a Hugging Face tokenizer with a chat template.
        params: sampling parameters of every reply; may be passed to ``Gateway.open`` instead.
        renderer: as in ``rollout.verifiers``; by default the renderer that fits the tokenizer best.
        keep_reasoning: see ``History``.
    """
    return Gateway(
        load_renderer(tokenizer, renderer),
        engine=engine,
        params=params,
        keep_reasoning=keep_reasoning,
    )


class Gateway:
    """A gateway, made by ``gateway``; it runs while its asynchronous context is open."""

    def __init__(
        self,
        renderer: Any,
        *,
        engine: Engine | None,
        params: SamplingParams | None,
        keep_reasoning: bool,
    ) -> None:
        self.url = ""
        self._renderer = renderer
        self._engine = engine
        self._params = params
        self._keep_reasoning = keep_reasoning
        self._sessions: dict[str, GatewaySession] = {}
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> "Gateway":
        app = web.Application(client_max_size=MAX_BODY)
        for api in APIS:
            app.router.add_post(api.path, _handler(self, api))
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/v1/models", self._models)
        # When a client disconnects, its handler is cancelled, and with it the engine's request.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_S
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(session.close() for session in self._sessions.values()))
        if self._runner is not None:
            await self._runner.cleanup()

    @contextlib.asynccontextmanager
    async def open(
        self,
        *,
        engine: Engine | None = None,
        params: SamplingParams | None = None,
        limits: AgentLimits | None = None,
    ) -> AsyncIterator[GatewaySession]:
        """Open one rollout's session, which has a base URL and a key, until the context exits.

        Raises:
            ValueError: an engine or ``params`` were given neither here nor to ``gateway``.
        """
        engine, params = engine or self._engine, params or self._params
        if engine is None or params is None:
            raise ValueError(
                "the gateway has no engine or no params; pass them to gateway() or open()"
            )
        history = History(
            engine,
            self._renderer,
            params,
            session=secrets.token_hex(8),
            keep_reasoning=self._keep_reasoning,
        )
        session = GatewaySession(history, limits or AgentLimits(), url=self.url)
        self._sessions[session.name] = session
        try:
            yield session
        finally:
            await session.close()
            del self._sessions[session.name]

    def _authorised(self, headers: Mapping[str, str]) -> tuple[GatewaySession, str] | None:
        """Return the rollout and agent that a request's key belongs to, or None."""
        bearer = headers.get("Authorization", "").removeprefix("Bearer ")
        name, _, secret = (headers.get("x-api-key") or bearer).partition(".")
        session = self._sessions.get(name)
        agent = None if session is None else session.agent_of(secret)
        return None if session is None or agent is None else (session, agent)

    async def _serve(self, http: web.Request, api: Api) -> web.StreamResponse:
        known = self._authorised(http.headers)
        if known is None:
            message = "unknown or expired key: no rollout in progress has it"
            return _error(api, 401, "authentication", "invalid_api_key", message)
        session, agent = known
        try:
            content = await http.read()
            request = api.parse(_parsed(content), session.replies)
        except web.HTTPRequestEntityTooLarge:
            session.outcomes["refused"] += 1
            too_large = f"the request is larger than {MAX_BODY:,} bytes"
            return _error(api, 413, "invalid", "request_too_large", too_large)
        except ValueError as error:
            session.outcomes["refused"] += 1
            return _error(api, 400, "invalid", "invalid_request", str(error))
        digest = xxhash.xxh3_128_digest(agent.encode() + b"\0" + content)
        response = web.StreamResponse()
        response.content_type = "text/event-stream" if request.stream else "application/json"
        try:
            async with _pings(http, response, api.ping if request.stream else None):
                reply = await session.reply(request, agent, digest)
        except LimitReached as limit:  # 400, because clients retry after other statuses
            failure = 400, "invalid", limit.reason, str(limit)
        except ContextFull as full:
            failure = 400, "invalid", "context_length_exceeded", str(full)
        except Unrenderable as refused:
            failure = 400, "invalid", "invalid_request", str(refused)
        except Exception as failed:  # the session stores it, and raises it in ``rollout()``
            failure = 500, "engine", "engine_error", f"{type(failed).__name__}: {failed}"
        else:
            return await self._deliver(http, api, session, request, reply, digest, response)
        if not response.prepared:
            return _error(api, *failure)
        await response.write(api.error_event(*failure[1:]))  # the status has been sent
        await response.write_eof()
        return response

    async def _deliver(
        self,
        http: web.Request,
        api: Api,
        session: GatewaySession,
        request: ModelRequest,
        reply: Reply,
        digest: bytes,
        response: web.StreamResponse,
    ) -> web.StreamResponse:
        name = f"resp_{secrets.token_hex(12)}"
        session.replies[name] = reply
        answer = api.answer(name, request, reply)
        try:
            if not response.prepared:
                await response.prepare(http)
            if request.stream:
                for event in api.events(answer, request):
                    await response.write(event)
            else:
                await response.write(json.dumps(answer).encode())
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            session.lost(reply, digest)
            raise
        session.outcomes["answered"] += 1
        return response

    async def _models(self, http: web.Request) -> web.StreamResponse:
        if self._authorised(http.headers) is None:
            return _error(
                APIS[0], 401, "authentication", "invalid_api_key", "unknown or expired key"
            )
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "primerl"}
        return web.json_response({"object": "list", "data": [model], "has_more": False})

    async def _count_tokens(self, http: web.Request) -> web.StreamResponse:
        api = APIS[2]
        known = self._authorised(http.headers)
        if known is None:
            return _error(api, 401, "authentication", "invalid_api_key", "unknown or expired key")
        try:
            request = api.parse(_parsed(await http.read()), {})
        except ValueError as error:
            return _error(api, 400, "invalid", "invalid_request", str(error))
        rendered = self._renderer.render(
            request.messages, tools=request.tools, add_generation_prompt=True
        )
        return web.json_response({"input_tokens": len(rendered.token_ids)})


@contextlib.asynccontextmanager
async def _pings(
    http: web.Request, response: web.StreamResponse, ping: bytes | None
) -> AsyncIterator[None]:
    """Send ``ping`` to a streaming client every ``PING_S`` seconds while the engine samples."""

    async def send() -> None:
        with contextlib.suppress(ConnectionError):  # a disconnect also cancels the handler
            while ping is not None:
                await asyncio.sleep(PING_S)
                if not response.prepared:
                    await response.prepare(http)
                await response.write(ping)

    sending = None if ping is None else asyncio.create_task(send())
    try:
        yield
    finally:
        if sending is not None:
            sending.cancel()  # not awaited: nothing may come between a reply and its delivery


def _handler(server: Gateway, api: Api) -> Any:
    async def handle(http: web.Request) -> web.StreamResponse:
        return await server._serve(http, api)

    return handle


def _parsed(content: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:  # ValueError: also for invalid UTF-8
        raise BadRequest(f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the request is not a JSON object")
    return body


def _error(api: Api, status: int, kind: str, code: str, message: str) -> web.StreamResponse:
    return web.json_response(api.error(kind, code, message), status=status)
