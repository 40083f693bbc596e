"""The links between the nodes of one vLLM server, so that all of them end together.

vLLM 0.32 does not notice that another node was lost: requests to its ranks, and all weight updates,
would wait forever. So each further node holds a websocket to the first one, on the server's port.
"""

import json
import logging
import os
import time

from primerl.serving.names import HEALTH, NODE_LINK
from primerl.serving.server.middleware import Application, Receive, Scope, Send

NODE_LOST = 1  # the exit code of a node that ends because another one was lost
PING_S, PONG_S = 10.0, 60.0  # a node whose host was lost is noticed after their sum
RETRY_S = 0.5
_SHUTDOWN = 1012  # the code with which a websocket is closed by a server that is stopped
_STARTING = json.dumps({"error": {"message": "other nodes of this server are starting"}}).encode()

log = logging.getLogger(__name__)


class RequireNodes:
    """ASGI middleware that ends the first node's server when it loses another node.

    ``/health`` answers 503 until all other nodes are linked, so that no loss goes unnoticed.

    Args:
        app: vLLM's application, whose state has the numbers of ranks.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._linked = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Accept links of other nodes, and pass requests to the application."""
        kind = scope["type"]
        if kind == "websocket" and scope["path"] == NODE_LINK:
            await self._hold(scope, receive, send)
        elif kind == "http" and scope["path"] == HEALTH and self._linked < _ranks_elsewhere(scope):
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(_STARTING)).encode()),
            ]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": _STARTING})
        else:
            await self._app(scope, receive, send)

    async def _hold(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hold a node's link until it breaks, and then end this process."""
        await receive()  # "connect"
        await send({"type": "websocket.accept"})
        ranks = int(scope["query_string"])
        self._linked += ranks
        while (event := await receive())["type"] != "websocket.disconnect":
            pass
        if event.get("code") != _SHUTDOWN:
            log.error("a node with %d ranks of this server was lost, so the server ends", ranks)
            # Not an orderly shutdown, which would wait for the lost ranks. The supervisor ends the
            # other processes.
            os._exit(NODE_LOST)


def _ranks_elsewhere(scope: Scope) -> int:
    """Return the number of data-parallel ranks on other nodes, from the state of vLLM's app."""
    parallel = scope["app"].state.vllm_config.parallel_config
    if parallel.local_engines_only:
        return 0
    return int(parallel.data_parallel_size - parallel.data_parallel_size_local)


def hold_link(host: str, port: int, *, api_key: str, ranks: int) -> None:
    """Link this node, which has ``ranks`` ranks, to the first one; return when the link breaks.

    While the first node starts, the link is tried again and again.
    """
    from websockets.exceptions import ConnectionClosed, InvalidHandshake
    from websockets.sync.client import connect  # installed with vLLM

    name = f"[{host}]" if ":" in host else host
    while True:
        try:
            link = connect(
                f"ws://{name}:{port}{NODE_LINK}?{ranks}",
                additional_headers={"Authorization": f"Bearer {api_key}"},
                compression=None,
                proxy=None,
                ping_interval=PING_S,
                ping_timeout=PONG_S,
            )
        except (OSError, InvalidHandshake):  # not listening yet
            time.sleep(RETRY_S)
            continue
        with link:
            try:
                link.recv()
            except ConnectionClosed:
                return
