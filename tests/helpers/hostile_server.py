"""A server with vLLM's routes whose responses are invalid or far too large."""

import asyncio
import base64
import contextlib
import functools
import io
import itertools
import json
import threading
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from aiohttp import web
from hostile import COMPLETION_FAULTS, Request

from primerl.rollout.engines.contract import EngineLimits
from primerl.serving import names
from primerl.types import Completion, SamplingParams

CHUNK = b" " * (1 << 16)
ROUTES_CHUNK = b"A" * (1 << 16)
BOMB_BYTES = 1 << 31
GZIP_BYTES = 1 << 29
START_S = 10.0
Json = dict[str, Any]


class HostileServer:
    """A server that breaks one rule in every ``every``-th response of a route.

        with testing.HostileServer("gzip_bomb") as server:
            engine = serving.VLLMEngine(server.url)

    All other responses are like vLLM's. The greedy tokens are ``(sum(prompt) + i) % vocab_size``.
    The server accepts any weight update and reports the label of the last one.

    Args:
        fault: one of ``server_faults()``; faults of completions apply to ``GENERATE`` only. None
            breaks no rule.
        route: the route with broken responses.
        every: 1 breaks all responses.
        vocab_size: the number of token ids.
        context_length: the maximum number of tokens of one request.

    Raises:
        ValueError: ``fault`` is unknown.
    """

    def __init__(
        self,
        fault: str | None,
        *,
        route: str = names.GENERATE,
        every: int = 1,
        vocab_size: int = 64,
        context_length: int = 128,
    ) -> None:
        if fault is not None and fault not in server_faults():
            raise ValueError(f"there is no fault {fault!r}, only {', '.join(server_faults())}")
        self.fault = fault
        self.route = route
        self.broken = 0
        """Number of broken responses so far."""
        self.sent_bytes = 0
        """Number of bytes of endless bodies that were sent."""
        self.label = "default"
        self.url = ""
        self._every = every
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._numbers = itertools.count(1)

    def __enter__(self) -> "HostileServer":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="hostile-server", daemon=True
        )
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(START_S)
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()

    async def _start(self) -> None:
        application = web.Application(client_max_size=BOMB_BYTES)
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read() or b"{}")
        turn = request.path == self.route and next(self._numbers) % self._every == 0
        fault = self.fault if turn else None
        self.broken += fault is not None
        if fault is not None and fault in BODY_FAULTS:
            response: web.StreamResponse = await BODY_FAULTS[fault](self, request)
            return response
        answer = self._vllm(request.path, body, fault)
        if fault is not None and fault in ANSWER_FAULTS:
            answer = ANSWER_FAULTS[fault](answer)
        if isinstance(answer, str):
            return web.Response(text=answer)
        return web.json_response(answer)

    def _vllm(self, path: str, body: Json, fault: str | None) -> Any:
        if path == names.GENERATE:
            return self._generate(body, COMPLETION_FAULTS.get(fault or ""))
        if path == names.FINISH_UPDATE:
            self.label = body["weight_version"]
        elif path == names.SET_WEIGHT_VERSION:
            self.label = body["new_version"]
        results = {
            names.PREPARE_WEIGHTS: {"prepared": True},
            names.RELOAD_REFUSAL: {"refused": ""},
            names.SERVED_CACHE_BLOCK: {"tokens": 32},
            names.SERVED_DTYPE: "float32",
            names.SERVED_VOCAB_SIZE: {"vocab_size": self._vocab_size},
        }
        answers: Json = {
            names.WEIGHT_INFO: {"weight_version": self.label},
            names.MODELS: {"data": [{"id": "hostile", "max_model_len": self._context_length}]},
            names.METRICS: "vllm:num_requests_running 0.0\n",
            names.COLLECTIVE_RPC: {"results": [results.get(body.get("method", ""), {})]},
        }
        return answers.get(path, {"status": "done"})

    def _generate(self, body: Json, corrupt: Callable[..., Any] | None) -> Json:
        prompt, sampling = body["token_ids"], body["sampling_params"]
        params = SamplingParams(
            max_tokens=sampling["max_tokens"], stop_token_ids=sampling.get("stop_token_ids", ())
        )
        tokens = [(sum(prompt) + i) % self._vocab_size for i in range(params.max_tokens)]
        end = next((i for i, token in enumerate(tokens) if token in params.stop_token_ids), None)
        tokens = tokens if end is None else tokens[: end + 1]
        run, _, number = self.label.rpartition("-")
        version = int(number) if number.isdecimal() else 0
        completion = Completion(
            token_ids=tokens,
            logprobs=np.full(len(tokens), -1.0),
            versions=np.full(len(tokens), version),
            finish_reason="length" if end is None else "stop",
        )
        if corrupt is not None:
            limits = EngineLimits(
                context_length=self._context_length,
                vocab_size=self._vocab_size,
                oldest=version,
                newest=version,
            )
            completion = corrupt(completion, Request(params=params, limits=limits))
        return _wire(completion, run, body)


def _wire(completion: Any, run: str, body: Json) -> Json:
    """Encode a completion like vLLM; other objects are put in its place unchanged."""
    if not isinstance(completion, Completion):
        return {"choices": [completion]}
    tokens = completion.token_ids.tolist()
    names = [f"{run}-{version}" for version in completion.versions.tolist()]
    spans = [{"version": name, "start": i, "end": i + 1} for i, name in enumerate(names)]
    values = [one if np.isfinite(one) else -9999.0 for one in completion.logprobs.tolist()]
    content = [{"token_id": t, "logprob": v} for t, v in zip(tokens, values, strict=True)]
    scores = [None, *({str(token): {"logprob": -1.0}} for token in body["token_ids"][1:])]
    return {
        "request_id": f"generate-tokens-{body.get('request_id', '')}",
        "usage": {"prompt_tokens": len(body["token_ids"]), "completion_tokens": len(tokens)},
        "prompt_logprobs": scores if "prompt_logprobs" in body["sampling_params"] else None,
        "choices": [
            {
                "index": 0,
                "finish_reason": completion.finish_reason,
                "token_ids": tokens,
                "logprobs": {"content": content},
                "weight_versions": spans,
            }
        ],
    }


def server_faults() -> tuple[str, ...]:
    """Return the names of the rules that ``HostileServer`` can break."""
    return (*COMPLETION_FAULTS, *ANSWER_FAULTS, *BODY_FAULTS)


def _choice(**fields: Any) -> Callable[[Json], Json]:
    return lambda answer: answer | {"choices": [answer["choices"][0] | fields]}


def _span(start: int, end: int) -> Callable[[Json], Json]:
    def corrupt(answer: Json) -> Json:
        name = answer["choices"][0]["weight_versions"][0]["version"]
        return _choice(weight_versions=[{"version": name, "start": start, "end": end}])(answer)

    return corrupt


def _label(number: str) -> Callable[[Json], Json]:
    """Make a fault that replaces the number in the label of the weights."""

    def corrupt(answer: Json) -> Json:
        if "weight_version" in answer:
            run = str(answer["weight_version"]).rpartition("-")[0]
            return answer | {"weight_version": f"{run}-{number}"}
        spans = answer["choices"][0]["weight_versions"]
        run = spans[0]["version"].rpartition("-")[0]
        named = [span | {"version": f"{run}-{number}"} for span in spans]
        return _choice(weight_versions=named)(answer)

    return corrupt


ANSWER_FAULTS: Mapping[str, Callable[[Json], Json]] = {
    "another_request": lambda answer: answer | {"request_id": "generate-tokens-" + "0" * 32},
    "no_request_id": lambda answer: answer | {"request_id": ""},
    "another_prompt": lambda answer: answer | {"usage": {"prompt_tokens": 10**6}},
    "no_choice": lambda answer: answer | {"choices": []},
    "two_choices": lambda answer: answer | {"choices": answer["choices"] * 2},
    "no_logprobs": _choice(logprobs=None),
    "logprob_of_another_token": _choice(
        logprobs={"content": [{"token_id": 10**6, "logprob": -1.0}] * 4}
    ),
    "no_versions": _choice(weight_versions=None),
    "span_bomb": _span(0, 10**9),
    "negative_span": _span(0, -(10**9)),
    "long_label": _label("9" * 5000),
    "label_beyond_int32": _label("9" * 12),
}


def _endless(status: int, begin: Callable[[], bytes] = lambda: b"{", chunk: bytes = CHUNK) -> Any:
    async def respond(server: HostileServer, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={"Content-Type": "application/json"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # the client closed the connection
            await response.write(begin())
            for _ in range(BOMB_BYTES // len(chunk)):
                await response.write(chunk)
                server.sent_bytes += len(chunk)
        return response

    return respond


def _body(content: Callable[[], bytes], **headers: str) -> Any:
    async def respond(_server: HostileServer, _request: web.Request) -> web.Response:
        return web.Response(body=content(), headers=headers)

    return respond


@functools.cache
def _gzip_bomb() -> bytes:
    """Compress half a gigabyte of spaces into two megabytes."""
    packed = zlib.compressobj(level=1, wbits=31)
    parts = [packed.compress(CHUNK) for _ in range(GZIP_BYTES // len(CHUNK))]
    return b"".join([*parts, packed.flush()])


async def _huge_length(_server: HostileServer, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": str(BOMB_BYTES)})
    await response.prepare(request)
    await response.write(b"{")
    return response


def _begin_routes() -> bytes:
    """Return a response up to and including the expert routes of four tokens, unfinished."""
    file = io.BytesIO()
    np.save(file, np.zeros((4, 2, 2), np.uint8))
    return b'{"choices":[{"routed_experts":"' + base64.b64encode(file.getvalue())


BODY_FAULTS: Mapping[str, Any] = {
    "gzip_bomb": _body(_gzip_bomb, **{"Content-Encoding": "gzip"}),
    "endless_body": _endless(200),
    "endless_error": _endless(400),
    "endless_routes": _endless(200, _begin_routes, ROUTES_CHUNK),
    "huge_content_length": _huge_length,
    "deep_nesting": _body(lambda: b'{"choices":' + b"[" * 50_000),
    "deep_nesting_beside": _body(lambda: b'{"x":' + b"[" * 30_000 + b"]" * 30_000 + b"}"),
    "huge_integer": _body(lambda: b'{"choices":[{"token_ids":[' + b"9" * 5000 + b"]}]}"),
    "huge_number": _body(lambda: b"9" * 5000),
    "not_json": _body(lambda: b"<html>"),
    "not_utf8": _body(lambda: b'{"request_id":"\xff\xfe"}'),
    "empty_body": _body(bytes),
}
