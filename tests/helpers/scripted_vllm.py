"""A fake vLLM server with the routes that VLLMEngine uses, and faults on demand."""

import asyncio
import base64
import io
import json
import random
import threading
from urllib.parse import parse_qs, urlsplit

import numpy as np

from primerl.serving.protocol.kept_prompts import HEADER
from primerl.serving.server.kept_prompts import KeepPrompts

HANG, DROP, GARBAGE = "hang", "drop", "garbage"


def numbered_routes(prompt, tokens, start):
    """Make routes of two layers and two experts; row i has ``2 i`` and ``2 i + 1``, modulo 256."""
    first = 2 * np.arange(start, len(prompt) + len(tokens) - 1)
    rows = (first[:, None, None] + [[0, 1], [1, 0]]) % 256
    return encode_routes(rows.astype(np.uint8))


def encode_routes(rows):
    """Encode routes like vLLM."""
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


class ScriptedVLLM:
    """A server in a thread; its greedy tokens are ``(sum(prompt) + i) % vocabulary``."""

    def __init__(
        self,
        *,
        key=None,
        label="default",
        token_s=0.0,
        vocabulary=64,
        context=128,
        keeps_prompts=False,
        ranks=1,
    ):
        self.ranks = ranks  # data-parallel
        self.keeps_prompts = keeps_prompts
        self.key, self.token_s = key, token_s
        self.vocabulary, self.context = vocabulary, context
        self.first_label = self.label = label
        self.port = 0
        self.bodies = []  # bodies of generate requests
        self.sent = []  # the same as they were sent: headers and content
        self.calls = []  # calls of the update routes
        self.running = 0
        self.peak = 0
        self.cancelled = 0
        self.sampled = 0  # tokens
        self.gauges = list  # returns further lines of the metrics
        self.faults = {}  # path -> list of HANG, DROP, GARBAGE, (status, message)
        self.hold = lambda tokens: False  # whether a request waits before its next token
        self.abort_next = 0
        self.routes = lambda prompt, tokens, start: None  # value of routed_experts
        self.edit = lambda page: page  # edits the bytes of a response to generate
        self.receipt = {"ok": True}
        self.dtype = "bfloat16"
        self.cache_block = {"tokens": 32}
        self.served_routes = {"loaded": False}
        self.reload_refusal = ""  # reason why it refuses weights
        self.load_s = 0.0
        self.unprepared = 0  # number of times that an update is not yet prepared
        self.up = False
        self.most_rank = 0  # maximum rank of adapters; 0: adapters are refused
        self.adapters = {}  # by name: number and path
        self.digests = {}  # by path: digest that its worker holds
        self.loaded = 0
        self.answers_as = None
        self.read_s = 0.0  # time to read an adapter
        self.decode = str  # token ids to text
        self.refuse = lambda body: False  # whether to refuse a generate request
        self.transfer = None  # kv_transfer_params of its responses

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._do(self._start())
        return self

    def kill(self):
        """Act as if killed with SIGKILL: reset all connections and stop listening."""
        if self.up:
            self._do(self._kill())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(60)
            self._loop.close()
            self.up = False

    def restart(self):
        """Restart at the same address with the checkpoint's weights."""
        self.kill()
        self.label = self.first_label
        self.adapters.clear()
        return self.start()

    def __enter__(self):
        return self.start()

    def __exit__(self, *error):
        self.kill()

    def _do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _start(self):
        self._keeper = KeepPrompts(self._application) if self.keeps_prompts else None
        self._gate, self._door = asyncio.Event(), asyncio.Event()
        self._gate.set(), self._door.set()
        self._writers, self._tasks = set(), set()
        self.running, self._dying = 0, False
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.up = True

    async def _kill(self):
        self._dying = True
        # On closing, asyncio leaks sockets that it has accepted but not yet made into connections.
        while any("_accept_connection" in t.get_coro().__qualname__ for t in asyncio.all_tasks()):
            await asyncio.sleep(0)
        self._server.close()
        # The task of a new connection may not have run yet; it ends itself when it runs.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for writer in self._writers:
                writer.transport.abort()
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(others, timeout=0.01)

    # ---- HTTP ----

    async def _serve(self, reader, writer):
        self._writers.add(writer)
        task = asyncio.current_task()
        self._tasks.add(task)
        broken = False
        try:
            while not self._dying:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                if broken:
                    writer.transport.abort()
                    return
                method, target, _ = head[0].split(" ")
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                answer = asyncio.create_task(self._answer(method, target, headers, content))
                gone = asyncio.create_task(reader.read(1))
                try:
                    await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
                    if not answer.done():
                        self.cancelled += 1
                        return
                    gone.cancel()
                    await asyncio.gather(gone, return_exceptions=True)
                    status, page, *more = answer.result()
                    if status == DROP:
                        writer.transport.abort()
                        return
                finally:
                    answer.cancel()
                    gone.cancel()
                    await asyncio.gather(answer, gone, return_exceptions=True)
                page = page if isinstance(page, bytes) else json.dumps(page).encode()
                lines = [f"HTTP/1.1 {status} x", f"content-length: {len(page)}", *more, "\r\n"]
                writer.write("\r\n".join(lines).encode() + page)
                await writer.drain()
                # uvicorn closes the connection after an application error, despite keep-alive.
                broken = status == 500 and target != "/inference/v1/generate"
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, method, target, headers, content):
        parts = urlsplit(target)
        path, query = parts.path, {k: v[0] for k, v in parse_qs(parts.query).items()}
        if self.key and path != "/health" and headers.get("authorization") != f"bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        body = json.loads(content) if content else {}
        if self.faults.get(path):
            fault = self.faults[path].pop(0)
            if fault == HANG:
                await asyncio.sleep(1e6)
            if fault == DROP:
                return DROP, b""
            if fault == GARBAGE:
                return 200, b"<html>"
            return fault[0], {"error": {"message": fault[1]}}
        if path == "/inference/v1/generate":
            self.sent.append((headers, content))
            if self._keeper is not None:
                return await self._through_keeper(path, headers, content)
            return await self._generate(body)
        if path == "/health":
            return 200, b""
        if path == "/detokenize":
            return 200, {"prompt": self.decode(body["tokens"])}
        if path == "/weight_info":
            return 200, {"weight_version": self.label}
        if path == "/is_paused":
            return 200, {"is_paused": not self._gate.is_set()}
        if path == "/v1/models":
            cards = [{"id": "scripted", "max_model_len": self.context}]
            cards += [{"id": name, "max_model_len": None} for name in self.adapters]
            return 200, {"data": cards}
        if path == "/metrics":
            lines = ["# HELP vllm:num_requests_running x"]
            for rank in range(self.ranks):
                load = self.running if rank == 0 else 1
                lines.append(f'vllm:num_requests_running{{engine="{rank}"}} {load}.0')
            lines += self.gauges()
            return 200, "\n".join([*lines, 'vllm:e2e_bucket{le="1"} 7', ""]).encode()
        return await self._update(method, path, query, body)

    async def _through_keeper(self, path, headers, content):
        """Answer through the middleware that keeps prompts."""
        waiting, answer = [{"type": "http.request", "body": content}], []

        async def receive():
            return waiting.pop() if waiting else await asyncio.sleep(1e6)

        async def send(message):
            answer.append(message)

        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "path": path, "headers": pairs}
        await self._keeper(scope, receive, send)
        start, content = answer
        kept = dict(start["headers"]).get(HEADER.lower().encode())
        more = [] if kept is None else [f"{HEADER}: {kept.decode()}"]
        return start["status"], content["body"], *more

    async def _application(self, scope, receive, send):
        length = dict(scope["headers"])[b"content-length"]
        content = (await receive())["body"]
        assert int(length) == len(content)
        status, page = await self._generate(json.loads(content))
        await send({"type": "http.response.start", "status": status, "headers": []})
        page = page if isinstance(page, bytes) else json.dumps(page).encode()
        await send({"type": "http.response.body", "body": page})

    async def _update(self, method, path, query, body):
        self.calls.append((path, query or body))
        if path == "/pause":
            if query["mode"] == "wait":
                self._door.clear()
                while self.running:
                    await asyncio.sleep(0.001)
            else:
                self._gate.clear()
        elif path == "/resume":
            self._gate.set(), self._door.set()
        elif path == "/update_weights":
            await asyncio.sleep(self.load_s)
        elif path == "/finish_weight_update":
            self.label = body["weight_version"]
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path == "/v1/load_lora_adapter":
            self.loaded += 1
            self.adapters[body["lora_name"]] = (self.loaded, body["lora_path"])
            return 200, b"Success"
        elif path == "/v1/unload_lora_adapter":
            return (200, b"Success") if self.adapters.pop(body["lora_name"], None) else (404, {})
        elif path == "/collective_rpc":
            if body["method"] == "read_adapter":
                await asyncio.sleep(self.read_s)
            results = {
                "prepare_adapter": {"most_rank": self.most_rank, "numbers": [self.loaded]},
                "read_adapter": self._read_adapter(body.get("kwargs", {})),
                "weight_receipt": self.receipt,
                "served_cache_block": self.cache_block,
                "served_dtype": self.dtype,
                "reload_refusal": {"refused": self.reload_refusal},
                "served_routes": self.served_routes,
                "served_vocab_size": {"vocab_size": self.vocabulary},
            }
            if body["method"] == "prepare_weights" and self.unprepared:
                self.unprepared -= 1
                return 200, {"results": [{"prepared": True}, {"prepared": False}]}
            return 200, {"results": [results.get(body["method"], {"prepared": True})]}
        elif path != "/start_weight_update":
            return 404, {"detail": "Not Found"}
        return 200, {"status": "done"}

    def _read_adapter(self, asked):
        """Return the receipt of the newest adapter."""
        paths = [path for number, path in self.adapters.values() if number == self.loaded]
        if not paths or self.loaded in asked.get("known", ()):
            return {"digest": None, "tensors": 0, "ignored": [], "version": asked.get("version")}
        digest = self.digests.get(paths[0], asked.get("digest"))
        return {"digest": digest, "tensors": 2, "ignored": [], "version": asked.get("version")}

    # ---- sampling ----

    async def _generate(self, body):
        self.bodies.append(body)
        if self.refuse(body):
            return 400, {"error": {"message": "gone"}}
        if "token_ids" not in body:
            return 400, {"error": {"message": "token_ids: field required", "code": 400}}
        prompt, params = body["token_ids"], body["sampling_params"]
        if body.get("model", "scripted") not in ("scripted", *self.adapters):
            return 404, {"error": {"message": f"{body['model']} does not exist", "code": 404}}
        if any(token >= self.vocabulary for token in prompt):
            return 400, {"error": {"message": "token is out of vocabulary", "code": 400}}
        await self._door.wait()
        self.running += 1
        self.peak = max(self.peak, self.running)
        tokens, labels, reason = [], [], "length"
        try:
            while len(tokens) < params["max_tokens"]:
                await asyncio.sleep(self.token_s)
                while self.hold(tokens):
                    await asyncio.sleep(0.001)
                await self._gate.wait()
                greedy = (sum(prompt) + len(tokens)) % self.vocabulary
                tokens.append(greedy if not params["temperature"] else random.randrange(64))
                labels.append(self.label)
                self.sampled += 1
                if self.abort_next:
                    self.abort_next -= 1
                    reason = "abort"
                    break
                if tokens[-1] in params.get("stop_token_ids", ()):
                    reason = "stop"
                    break
        finally:
            self.running -= 1
        spans = []
        for place, label in enumerate(labels):
            if not spans or spans[-1]["version"] != label:
                spans.append({"version": label, "start": place, "end": place})
            spans[-1]["end"] = place + 1
        choice = {
            "index": 0,
            "finish_reason": reason,
            "token_ids": tokens,
            "logprobs": {"content": [{"token_id": t, "logprob": -1.0} for t in tokens]},
            "routed_experts": self.routes(
                prompt, tokens, params.get("routed_experts_prompt_start", 0)
            ),
            "weight_versions": spans,
        }
        scores = None
        if "prompt_logprobs" in params:
            # The most likely tokens are 0, 1, 2, ...; token 0 has the logprob 0.
            top = range(params["prompt_logprobs"])
            scores = [{str(i): {"logprob": -i / 8} for i in (*top, token)} for token in prompt]
            scores[0] = None
        answer = {
            "request_id": f"generate-tokens-{body['request_id']}",
            "model": self.answers_as or body.get("model", "scripted"),
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)},
            "prompt_logprobs": scores,
            "choices": [choice],
            "kv_transfer_params": self.transfer,
        }
        return 200, self.edit(json.dumps(answer).encode())
