"""A fake OpenAI-compatible endpoint, with faults on demand."""

import asyncio
import threading

from aiohttp import web


class ScriptedChat:
    """A server thread that answers with ``reply(messages)``, a text or a whole message."""

    def __init__(self, reply, *, key=None, models=("small",)):
        self.reply, self.key, self.models = reply, key, models
        self.bodies = []
        self.faults = []  # for the next requests: (status, error), or "drop", or any other body
        self.running = self.peak = 0
        self.hold = threading.Event()
        self.hold.set()
        self.port = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._do(self._start())
        return self

    def kill(self):
        self._do(self._kill())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def __enter__(self):
        return self.start()

    def __exit__(self, *error):
        if not self._loop.is_closed():
            self.kill()

    def _do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _kill(self):
        # On closing, asyncio leaks sockets that it has accepted but not yet made into connections.
        while any("_accept_connection" in t.get_coro().__qualname__ for t in asyncio.all_tasks()):
            await asyncio.sleep(0)
        await self._runner.cleanup()

    async def _start(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        if self.models is not None:
            app.router.add_get("/v1/models", self._list)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _list(self, request):
        if (refusal := self._refusal(request)) is not None:
            return refusal
        listed = [{"id": name, "object": "model"} for name in self.models]
        return web.json_response({"object": "list", "data": listed})

    async def _chat(self, request):
        if (refusal := self._refusal(request)) is not None:
            return refusal
        body = await request.json()
        self.bodies.append(body)
        if self.faults:
            fault = self.faults.pop(0)
            if fault == "drop":
                request.transport.close()
                return web.Response()
            if isinstance(fault, tuple):
                status, error = fault
                return web.json_response({"error": error}, status=status)
            return web.json_response(fault)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            while not self.hold.is_set():
                await asyncio.sleep(0.01)
        finally:
            self.running -= 1
        reply = self.reply(body["messages"])
        message = {"role": "assistant", **({"content": reply} if isinstance(reply, str) else reply)}
        text = message.get("content") or ""
        cut = len(text) > body["max_tokens"]
        message["content"] = text[: body["max_tokens"]] if text else None
        reason = "tool_calls" if message.get("tool_calls") else "length" if cut else "stop"
        return web.json_response(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": reason}],
                "usage": {
                    "prompt_tokens": sum(len(str(one["content"])) for one in body["messages"]),
                    "completion_tokens": min(len(text), body["max_tokens"]),
                    "total_tokens": 0,
                },
            }
        )

    def _refusal(self, request):
        if self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}":
            return None
        return web.json_response({"error": {"message": "wrong key"}}, status=401)
