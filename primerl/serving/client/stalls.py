"""``StallDetector``, which finds a server that answers polls, but works on none of its requests."""

import asyncio

import msgspec

from primerl.rollout.processes.running_clock import running_time
from primerl.serving import names
from primerl.serving.client.http import BadResponse, Http, Refused, Unreachable
from primerl.serving.client.servers import ServerState
from primerl.serving.protocol import metrics

LOOK_S = 3.0  # interval of reading the metrics of a server that answers no requests meanwhile
ANSWER_S = 5.0
METRICS_BYTES = 1 << 24
UPDATES = "vllm:rl_weight_update_operations_in_flight"
WORK = (
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:kv_cache_usage_perc",  # the only one that changes during a long prefill
    UPDATES,
)


class StallDetector:
    """Detector of one server's stalls: its metrics do not change, although it has requests.

    While the server is paused or loads weights, or reports no metrics, it counts as working.
    """

    def __init__(self, http: Http, server: ServerState) -> None:
        self._http = http
        self._server = server
        self._looked_at = -LOOK_S
        self._last: dict[str, float] = {}

    async def look(self) -> None:
        """Ask the server for its metrics, if that is due, and record whether it works."""
        server, now = self._server, running_time()
        due = now - max(self._looked_at, server.worked_at) >= LOOK_S
        if not (due and server.alive and server.in_flight):
            return
        self._looked_at = now
        try:
            async with asyncio.timeout(ANSWER_S):
                working = await self._has_changed() or await self._is_paused()
        except (Unreachable, TimeoutError):
            return  # polls find out whether it is lost
        if working:
            server.worked_at = running_time()

    async def _has_changed(self) -> bool:
        try:
            page = await self._http.get(self._server.url, names.METRICS, max_bytes=METRICS_BYTES)
        except (Refused, BadResponse, RuntimeError):
            return True
        lines = page.decode(errors="replace").splitlines()
        known = metrics.totals("\n".join(one for one in lines if one.startswith(WORK)))
        last, self._last = self._last, known
        return not known or known != last or known.get(UPDATES, 0.0) > 0

    async def _is_paused(self) -> bool:
        try:
            content = await self._http.get(self._server.url, names.IS_PAUSED)
            answer = msgspec.json.decode(content)
        except (Refused, RuntimeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        return isinstance(answer, dict) and answer.get("is_paused") is True
