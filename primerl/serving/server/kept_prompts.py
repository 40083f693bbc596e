"""ASGI middleware, loaded by ``--middleware``, that keeps the prompts of conversations.

A turn of a conversation then costs the network and the client what is new, not the whole context;
``primerl.serving.protocol.kept_prompts`` has the protocol. vLLM itself still receives whole
prompts.
"""

import json
from collections import OrderedDict
from http import HTTPStatus

import msgspec

from primerl.serving.names import GENERATE
from primerl.serving.protocol.kept_prompts import ADDED, HEADER, KEPT, TOKENS, digest_of
from primerl.serving.server.middleware import Application, Message, Receive, Scope, Send

KEPT_BYTES = 1 << 29  # of text in all; a prompt of 131k tokens takes about 0.9 MB
_NAME_BYTES = 64
_HEADER = HEADER.lower().encode()
_OPENING = b'{"%s":[' % TOKENS.encode()
_MISSING = {
    "error": {
        "message": "this server does not hold the beginning of the prompt; send all of its tokens",
        "type": "prompt_not_kept",
        "code": HTTPStatus.CONFLICT.value,
    }
}


class PromptTexts:
    """Prompts as JSON text, by name; the least recently used ones are dropped first.

    Args:
        most_bytes: the maximum size of all texts.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self.size = 0
        self._most_bytes = most_bytes
        self._texts: OrderedDict[str, bytearray] = OrderedDict()

    def put(self, name: str, text: bytes) -> bytearray:
        """Keep a whole prompt, in place of what the name had before."""
        self.drop(name)
        return self._keep(name, bytearray(text))

    def extend(self, name: str, digest: str, added: bytes) -> bytearray | None:
        """Return a prompt with ``added`` at its end; None if what is kept has another digest."""
        text = self._texts.get(name)
        if text is None or digest_of(text) != digest:
            return None
        self.drop(name)
        if added:
            text += b"," + added
        return self._keep(name, text)

    def drop(self, name: str) -> None:
        """Forget a prompt, if it is kept."""
        self.size -= len(self._texts.pop(name, b""))

    def _keep(self, name: str, text: bytearray) -> bytearray:
        self._texts[name] = text
        self.size += len(text)
        while self.size > self._most_bytes:
            self.drop(next(iter(self._texts)))
        return text


class KeepPrompts:
    """ASGI middleware that keeps prompts, and completes requests that continue them.

    Args:
        app: the application, which receives ordinary requests with whole prompts.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._texts = PromptTexts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with its whole prompt; answer 409 if the prompt is not kept."""
        name, _, digest = _header_of(scope).partition(" ")
        if not 0 < len(name) <= _NAME_BYTES:
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        if body is None:  # the client is gone
            return
        completed = self._completed(body, name, digest)
        if completed is None:
            await _refuse(send)
            return
        whole, kept = completed
        waiting = [{"type": "http.request", "body": whole, "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        async def confirm(message: Message) -> None:
            if kept and message["type"] == "http.response.start" and message["status"] == 200:
                headers = [*message.get("headers", ()), (_HEADER, KEPT.encode())]
                message = {**message, "headers": headers}
            await send(message)

        length = (b"content-length", str(len(whole)).encode())
        headers = [(key, value) for key, value in scope["headers"] if key.lower() != length[0]]
        await self._app({**scope, "headers": [*headers, length]}, replay, confirm)

    def _completed(self, body: bytes, name: str, digest: str) -> tuple[bytes, bool] | None:
        """Return a request with its whole prompt, and whether the prompt is kept.

        Returns None if the request continues a prompt that is not kept.
        """
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return body, False  # the application refuses it
        if ADDED not in fields:
            tokens = _inside(fields.get(TOKENS))
            if tokens:
                self._texts.put(name, tokens)
            return body, bool(tokens)
        added = _inside(fields.pop(ADDED))
        text = None if added is None else self._texts.extend(name, digest, added)
        if text is None:
            return None
        rest = msgspec.json.encode(fields)[1:]
        return b"".join((_OPENING, text, b"]," if fields else b"]", rest)), True


def _header_of(scope: Scope) -> str:
    if scope["type"] != "http" or scope["path"] != GENERATE:
        return ""
    values = [value for key, value in scope["headers"] if key.lower() == _HEADER]
    return values[0].decode("latin-1") if len(values) == 1 else ""


def _inside(value: msgspec.Raw | None) -> bytes | None:
    """Return the text between the brackets of a JSON list; None for other values."""
    text = b"" if value is None else bytes(value)
    return text[1:-1] if text.startswith(b"[") else None


async def _read(receive: Receive) -> bytes | None:
    """Return a request's body; None if the client disconnected."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _refuse(send: Send) -> None:
    body = json.dumps(_MISSING).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    status = HTTPStatus.CONFLICT.value
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
