"""ASGI middleware, loaded by ``--middleware``, that requires an API key on vLLM's endpoints.

vLLM's own API key protects only the inference endpoints. Through the other endpoints, anyone could
pause the engine, replace its weights and call methods of its workers.
"""

import functools
import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from primerl.serving.names import HEALTH

KEY_VARIABLE = "PRIMERL_API_KEY"
KEY_FROM, STDIN = "PRIMERL_API_KEY_FROM", "stdin"
_LONGEST_KEY = 1 << 16
OPEN_PATHS = frozenset({HEALTH, "/ping"})
_REFUSAL = {
    "error": {
        "message": "the API key is missing or wrong: this server needs the header 'Authorization: "
        "Bearer <api_key>' on every endpoint but /health and /ping",
        "type": "authentication_error",
        "code": 401,
    }
}

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequireKey:
    """ASGI middleware that answers 401 to requests without the server's key.

    Args:
        app: the protected application. Its HTTP and websocket endpoints both need the key.

    Raises:
        RuntimeError: the key is empty or not set.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._expected = b"Bearer " + read_key().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass requests with the key to the application, and refuse all others."""
        kind = scope["type"]
        is_open = kind == "lifespan" or (kind == "http" and scope["path"] in OPEN_PATHS)
        if is_open or self._knows_key(scope):
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await receive()  # "connect"; closing before accepting makes the server answer 403
            await send({"type": "websocket.close", "code": 1008, "reason": "wrong API key"})
        else:
            body = json.dumps(_REFUSAL).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"www-authenticate", b"Bearer"),
            ]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _knows_key(self, scope: Scope) -> bool:
        sent = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(sent) == 1 and hmac.compare_digest(sent[0], self._expected)


def read_key() -> str:
    """Return the server's key.

    With ``PRIMERL_API_KEY_FROM=stdin``, which ``serve_vllm`` sets, the key is read from standard
    input, because child processes inherit environment variables, and other processes can read them
    in ``/proc``. Otherwise the key is the variable ``PRIMERL_API_KEY``.

    Raises:
        RuntimeError: the key is empty or not set.
    """
    if os.environ.get(KEY_FROM) == STDIN:
        where, key = "standard input", _key_from_stdin()
    else:
        where, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise RuntimeError(
            f"{where} has no API key, without which the server would be open to everyone"
        )
    return key


@functools.cache
def _key_from_stdin() -> str:
    """Return the key from standard input, which can be read only once per process."""
    return os.read(0, _LONGEST_KEY).decode()
