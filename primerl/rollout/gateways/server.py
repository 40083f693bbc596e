"""The gateway's HTTP server, which listens on loopback where the rollouts are played."""

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from typing import Any

import attrs
import msgspec
import xxhash
from aiohttp import web

from primerl.rollout.agents.limits import AgentLimits, LimitReached
from primerl.rollout.conversations.calls import ContextFull
from primerl.rollout.conversations.history import History, Reply
from primerl.rollout.conversations.prompts import Unrenderable
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.gateways.anthropic_messages import AnthropicMessages
from primerl.rollout.gateways.apis import Api, BadRequest, Failure, ModelRequest
from primerl.rollout.gateways.chat_completions import ChatCompletions
from primerl.rollout.gateways.connections import Connections
from primerl.rollout.gateways.recorded import new_name
from primerl.rollout.gateways.responses import Responses
from primerl.rollout.gateways.sessions import GatewaySession
from primerl.rollout.renderers.loading import load_renderer
from primerl.rollout.renderers.tool_calls import parse_json
from primerl.types import SamplingParams

MAX_BODY = 1 << 26  # bytes of one request
PARSED_AT_ONCE = 1 << 16  # bytes; larger requests are parsed in a thread
MOST_REFUSALS = 20  # different ones are logged
CLOSE_S = 5.0
PING_S = 15.0  # clients abandon streams that are silent for minutes
APIS: tuple[Api, ...] = (ChatCompletions(), Responses(), AnthropicMessages())

_UNKNOWN_KEY = Failure(
    401,
    "authentication",
    "invalid_api_key",
    "unknown or expired key: no rollout in progress has it",
)
_SERVED_PATHS = "POST /v1/chat/completions, /v1/responses, /v1/messages and GET /v1/models"

log = logging.getLogger(__name__)


def gateway(
    engine: Engine | None,
    tokenizer: Any,
    *,
    params: SamplingParams | None = None,
    renderer: Any = None,
    keep_reasoning: bool = False,
    ignore_fields: Collection[str] = (),
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
    A client's ``max_tokens`` can only lower that of ``params``. A field that would change the reply
    is served or refused; ``gateways.fields`` has the tables.

    Args:
        engine: the engine that samples; may be passed to ``Gateway.open`` instead.
        tokenizer: a Hugging Face tokenizer with a chat template.
        params: sampling parameters of every reply; may be passed to ``Gateway.open`` instead.
        renderer: as in ``rollout.verifiers``; by default the renderer that fits the tokenizer best.
        keep_reasoning: see ``History``.
        ignore_fields: names of fields, at any place of a request, that don't matter, although the
            gateway does not know them or would refuse them.
    """
    return Gateway(
        load_renderer(tokenizer, renderer),
        tokenizer=tokenizer,
        engine=engine,
        params=params,
        keep_reasoning=keep_reasoning,
        ignore_fields=ignore_fields,
    )


class Gateway:
    """A gateway, made by ``gateway``; it runs while its asynchronous context is open."""

    def __init__(
        self,
        renderer: Any,
        *,
        tokenizer: Any,
        engine: Engine | None,
        params: SamplingParams | None,
        keep_reasoning: bool,
        ignore_fields: Collection[str] = (),
    ) -> None:
        self.url = ""
        self._renderer = renderer
        self._tokenizer = tokenizer
        if isinstance(ignore_fields, str):
            raise ValueError(f"ignore_fields is {ignore_fields!r}, expected a list of names")
        self._ignored = frozenset(ignore_fields)
        self._refusals: set[str] = set()
        self._engine = engine
        self._params = params
        self._keep_reasoning = keep_reasoning
        self._sessions: dict[str, GatewaySession] = {}
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._left_out: set[str] = set()

    async def __aenter__(self) -> "Gateway":
        middlewares: list[Any] = [_errors_of_the_api]
        app = web.Application(client_max_size=MAX_BODY, middlewares=middlewares)
        for prefix in ("", "/v1"):  # some clients add the version to the base URL, some don't
            for api in APIS:
                app.router.add_post(prefix + api.path, _handler(self, api))
            app.router.add_get(f"{prefix}/responses", _no_websocket)
            app.router.add_post(f"{prefix}/messages/count_tokens", self._count_tokens)
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_get(f"{prefix}/models/{{name:.+}}", self._model)
        # When a client disconnects, its handler is cancelled, and with it the engine's request.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_S
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = Connections(self._runner.server)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._connections, "127.0.0.1", 0)
        port = self._listener.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(session.close() for session in self._sessions.values()))
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._connections.close()

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
            tokenizer=self._tokenizer,
        )
        session = GatewaySession(
            history, limits or AgentLimits(), url=self.url, look=self._connections.look
        )
        self._sessions[session.name] = session
        try:
            yield session
        finally:
            await session.close()
            del self._sessions[session.name]

    def _authorised(self, headers: Mapping[str, str]) -> tuple[GatewaySession, str] | None:
        """Return the rollout and agent that a request's key belongs to, or None."""
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        key = headers.get("x-api-key") or (bearer if scheme.lower() == "bearer" else "")
        name, _, secret = key.partition(".")
        session = self._sessions.get(name)
        agent = None if session is None else session.agent_of(secret)
        return None if session is None or agent is None else (session, agent)

    async def _serve(self, http: web.Request, api: Api) -> web.StreamResponse:
        known = self._authorised(http.headers)
        if known is None:
            return _error(api, _UNKNOWN_KEY)
        session, agent = known
        try:
            content = await http.read()
            request = await self._parse(api, content, session)
        except (ValueError, web.HTTPException) as refused:
            session.outcomes["refused"] += 1
            self._log_refusal(str(refused))
            raise
        self._log_left_out(request)
        sender = f"{agent}\0{api.path}\0".encode()
        digest = xxhash.xxh3_128_digest(sender + content)
        response = web.StreamResponse()
        response.content_type = "text/event-stream" if request.stream else "application/json"
        name = new_name()
        waiting = _Waiting(http, response, api, name, request)
        try:
            async with waiting:
                reply = await session.reply(request, agent, digest)
        except LimitReached as limit:  # 400, because clients retry after other statuses
            failure = Failure(400, "invalid", limit.reason, str(limit))
        except ContextFull as full:
            failure = Failure(400, "invalid", "context_length_exceeded", str(full))
        except Unrenderable as refused:
            self._log_refusal(str(refused))
            failure = Failure(400, "invalid", "invalid_request", str(refused))
        except Exception as failed:  # the session stores it, and raises it in ``rollout()``
            said = f"{type(failed).__name__}: {failed}"
            failure = Failure(500, "engine", "engine_error", said)
        else:
            session.recorded.add(name, reply, request)
            answer = api.answer(name, request, reply, session.recorded.key(name))
            chunks = iter([json.dumps(answer).encode()])
            if request.stream:
                chunks = api.events(answer, attrs.evolve(request, waited=waiting.sent))
            return await self._deliver(
                http, response, chunks, session, reply, streamed=request.stream
            )
        if not response.prepared:
            return _error(api, failure)
        await response.write(api.error_event(failure, waiting.sent))  # the status has been sent
        await response.write_eof()
        return response

    async def _parse(self, api: Api, content: bytes, session: GatewaySession) -> ModelRequest:
        def parse() -> ModelRequest:
            return api.parse(_parsed(content), session.recorded, self._ignored)

        if len(content) <= PARSED_AT_ONCE:
            return parse()
        return await asyncio.to_thread(parse)

    async def _deliver(
        self,
        http: web.Request,
        response: web.StreamResponse,
        chunks: Iterator[bytes],
        session: GatewaySession,
        reply: Reply,
        *,
        streamed: bool,
    ) -> web.StreamResponse:
        try:
            with session.delivery(reply):
                last = next(chunks)
                if not response.prepared:
                    if not streamed:
                        response.content_length = len(last)
                    await response.prepare(http)
                for chunk in chunks:
                    await response.write(last)
                    last = chunk
                # The end goes with the last event, so that a client that stops there has read it.
                await response.write_eof(last)
        except ConnectionError:  # the client has left, which the session knows
            if http.transport is not None:
                http.transport.abort()
            return response
        self._connections.sent(http.transport, session, lambda: session.unread(reply))
        return response

    def _log_refusal(self, reason: str) -> None:
        """Log the first refusal of each kind: many programs end without saying why."""
        if reason not in self._refusals and len(self._refusals) < MOST_REFUSALS:
            self._refusals.add(reason)
            log.warning("the gateway refused a request of an agent: %s", reason)

    def _log_left_out(self, request: ModelRequest) -> None:
        new = set(request.offers.left_out) - self._left_out
        if new:
            self._left_out |= new
            log.warning(
                "the gateway leaves out tools that only an API's own servers run: %s",
                ", ".join(sorted(new)),
            )

    async def _models(self, http: web.Request) -> web.StreamResponse:
        if self._authorised(http.headers) is None:
            return _error(_api_of(http), _UNKNOWN_KEY)
        model = _model_named("policy")
        ends = {"first_id": model["id"], "last_id": model["id"]}
        return web.json_response({"object": "list", "data": [model], "has_more": False, **ends})

    async def _model(self, http: web.Request) -> web.StreamResponse:
        """Answer that any model is there: requests may name any, and get the policy."""
        if self._authorised(http.headers) is None:
            return _error(_api_of(http), _UNKNOWN_KEY)
        return web.json_response(_model_named(http.match_info["name"]))

    async def _count_tokens(self, http: web.Request) -> web.StreamResponse:
        api = APIS[2]
        known = self._authorised(http.headers)
        if known is None:
            return _error(api, _UNKNOWN_KEY)
        request = await self._parse(api, await http.read(), known[0])
        count = await known[0].history.count_tokens(
            request.messages,
            tools=request.tools,
            begins=request.begins,
            template=request.template,
        )
        return web.json_response({"input_tokens": count})


class _Waiting:
    """Sends events to a streaming client every ``PING_S`` seconds while the engine samples."""

    def __init__(
        self,
        http: web.Request,
        response: web.StreamResponse,
        api: Api,
        name: str,
        request: ModelRequest,
    ) -> None:
        self.sent = 0
        """The number of events."""
        self._http = http
        self._response = response
        self._api = api
        self._name = name
        self._request = request
        self._sending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        if self._request.stream:
            self._sending = asyncio.create_task(self._send())

    async def __aexit__(self, *_: object) -> None:
        if self._sending is not None:
            self._sending.cancel()  # not awaited: nothing may come between a reply and its delivery

    async def _send(self) -> None:
        with contextlib.suppress(ConnectionError):  # a disconnect also cancels the handler
            while True:
                await asyncio.sleep(PING_S)
                if not self._response.prepared:
                    await self._response.prepare(self._http)
                number, self.sent = self.sent, self.sent + 1
                event = self._api.waiting(self._name, self._request, number)
                await self._response.write(event)


def _handler(server: Gateway, api: Api) -> Any:
    async def handle(http: web.Request) -> web.StreamResponse:
        return await server._serve(http, api)

    return handle


def _parsed(content: bytes) -> Mapping[str, Any]:
    try:
        body = _json(content)
    except (ValueError, RecursionError) as error:  # ValueError: also for invalid UTF-8
        raise BadRequest(f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the request is not a JSON object")
    return body


def _json(content: bytes) -> Any:
    """Parse JSON; fast, because it holds up all rollouts."""
    try:
        return msgspec.json.decode(content)
    except ValueError:  # it also refuses half a surrogate and some numbers, which clients send
        return parse_json(content.decode())


@web.middleware
async def _errors_of_the_api(
    http: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every error in the form of the API that the request was for."""
    try:
        return await handler(http)
    except BadRequest as error:
        failure = Failure(400, "invalid", error.code, str(error), error.field)
    except Unrenderable as error:
        failure = Failure(400, "invalid", "invalid_request", str(error))
    except ContextFull as error:
        failure = Failure(400, "invalid", "context_length_exceeded", str(error))
    except (ValueError, RecursionError) as error:
        failure = Failure(400, "invalid", "invalid_request", str(error))
    except web.HTTPRequestEntityTooLarge:
        said = f"the request is larger than {MAX_BODY:,} bytes"
        failure = Failure(413, "invalid", "request_too_large", said)
    except web.HTTPException as error:
        said = f"{http.method} {http.path}: {error.reason}; the gateway serves {_SERVED_PATHS}"
        kind = "missing" if error.status in (404, 405) else "invalid"
        failure = Failure(error.status, kind, kind, said)
    except web.RequestPayloadError as error:
        failure = Failure(400, "invalid", "invalid_request", f"the request's body: {error}")
    except Exception as error:  # a fault of ours, which clients get in a form that they understand
        log.exception("the gateway failed to answer %s %s", http.method, http.path)
        failure = Failure(500, "engine", "gateway_error", f"{type(error).__name__}: {error}")
    return _error(_api_of(http), failure)


async def _no_websocket(http: web.Request) -> web.StreamResponse:
    """Answer clients that ask for a WebSocket in a way that makes them send requests instead."""
    said = "the gateway has no WebSocket; POST the request"
    return _error(_api_of(http), Failure(426, "invalid", "upgrade_required", said))


def _api_of(http: web.Request) -> Api:
    """Return the API that a request is for, by its path and headers."""
    path = http.path.removeprefix("/v1")
    if path.startswith("/messages") or "anthropic-version" in http.headers:
        return APIS[2]
    return APIS[1] if path.startswith("/responses") else APIS[0]


def _model_named(name: str) -> dict[str, Any]:
    created = "1970-01-01T00:00:00Z"
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": 0,
        "created_at": created,
        "display_name": name,
        "owned_by": "primerl",
    }


def _error(api: Api, failure: Failure) -> web.StreamResponse:
    return web.json_response(api.error(failure), status=failure.status)
