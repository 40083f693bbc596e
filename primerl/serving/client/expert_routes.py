"""Recording of expert routes: extracted from responses, decoded in threads, and stored."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import attrs
import numpy as np

from primerl.rollout.engines.contract import BadCompletion
from primerl.rollout.engines.protocol import RouteStore, is_instant
from primerl.rollout.errors import summary
from primerl.serving.client.calls import rpc_results
from primerl.serving.client.fleet import Fleet
from primerl.serving.client.http import ServerFailed, Unreachable
from primerl.serving.client.servers import ServerState
from primerl.serving.names import SERVED_ROUTES
from primerl.serving.protocol.expert_routes import RoutesDecoder, RoutesSplitter, most_characters
from primerl.serving.protocol.responses import Choice
from primerl.types import Completion, SamplingParams

ASK_S = 10.0  # timeout of asking a server whether it has a KV connector
SILENCE_S = 60.0  # time until a server that did not answer is asked again
THREADS = 2 if (os.cpu_count() or 1) > 2 else 1  # with two cores, one is left to the event loops
BATCH_BYTES = 1 << 21  # minimum number of characters that a thread decodes at once

_REPORTED = {"connector": None, "role": "", "folder": ""}

T = TypeVar("T")
log = logging.getLogger(__name__)


class RouteWriter:
    """Recorder of the expert routes of completions in a store; used on one event loop."""

    def __init__(self, store: RouteStore) -> None:
        self._store = store
        self._threads = _Threads()

    def expect(self, prompt_length: int, params: SamplingParams) -> "ExpectedRoutes":
        """Return the extraction for the routes of one request's response."""
        return ExpectedRoutes(prompt_length, params, self._threads)

    async def record(
        self,
        expected: "ExpectedRoutes",
        choice: Choice,
        completion: Completion,
        *,
        before: np.ndarray | None = None,
    ) -> Completion:
        """Store the routes of a completion, and return the completion with references to them.

        Args:
            expected: the extraction of the response.
            choice: the response's completion.
            completion: the same, with versions.
            before: the routes of the tokens before the first expected one, from another server.

        Raises:
            BadCompletion: there are no routes, their number does not fit the completion, or the
                store finds that they can't be of its model.
        """
        start, prompt = expected.params.routes_start, expected.prompt_length
        count = prompt + len(completion.token_ids) - 1 - start
        rows = await expected.rows(choice)
        if rows is None and count == 0:
            return completion
        if rows is None:
            raise BadCompletion(
                "the server sent no expert routes; start it with serve_vllm(..., "
                "enable_return_routed_experts=True), or --enable-return-routed-experts"
            )
        if len(rows) != count:
            raise BadCompletion(
                f"the server sent expert routes of {len(rows)} tokens, expected {count}: those of "
                f"tokens {start} to {start + count - 1}, for a prompt of {prompt} tokens and "
                f"{len(completion.token_ids)} sampled tokens, the last of which has no routes"
            )
        if before is not None:
            if before.shape[1:] != rows.shape[1:] or before.dtype != rows.dtype:
                raise BadCompletion(
                    f"the server sent expert routes {rows.dtype}{list(rows.shape)}, and the server "
                    f"that computed the prompt sent {before.dtype}{list(before.shape)}"
                )
            rows = np.concatenate([before, rows])
            start, count = start - len(before), count + len(before)
        if count == 0 or expected.params.temperature == 0:
            return completion  # greedy completions are not trained on
        put = partial(
            self._store.put,
            rows,
            start=start,
            versions=row_versions(completion.versions, prompt_length=prompt, start=start),
            shared=max(0, prompt - 1 - start),
        )
        try:
            if is_instant(self._store, count):
                references = put()
            else:
                references = await self._threads.run(put)
        except ValueError as error:
            raise BadCompletion(
                f"the server's expert routes can't be of this model: {error}"
            ) from error
        return attrs.evolve(completion, routes=references)


@attrs.frozen
class CacheSource:
    """A server's KV connector, as the server reports it."""

    loads: bool = True
    """Whether the server loads keys and values; True if it is unknown."""
    connector: str | None = None
    """The name of the connector: empty if there is none, None if it is unknown."""
    role: str = ""
    folder: str = ""

    @property
    def described(self) -> str:
        """The connector, for messages."""
        if not self.connector:
            return "no KV connector"
        return " ".join(filter(None, ["the KV connector", self.connector, self.role, self.folder]))


class CacheSources:
    """Record of the servers' KV connectors, which load keys and values from elsewhere.

    A server that loads does not know the expert routes of the loaded tokens, and vLLM 0.32 exits if
    a request asks for them. The last token of a prompt is always computed by the server itself.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: dict[str, CacheSource] = {}
        self._silent_until: dict[str, float] = {}
        self._asking: dict[str, asyncio.Lock] = {}

    async def first_route(
        self, server: ServerState, prompt_length: int, params: SamplingParams
    ) -> int:
        """Return the first token whose routes a server can be asked for."""
        if (await self._source(server)).loads:
            return max(params.routes_start, prompt_length - 1)
        return params.routes_start

    async def refuse_mismatch(self, prefill: ServerState, decode: ServerState) -> None:
        """Check that ``decode`` can load what ``prefill`` computes, as far as the servers say.

        Raises:
            RuntimeError: a server has no connector, or one of the wrong role, or theirs differ.
        """
        stored, loaded = await self._source(prefill), await self._source(decode)
        if None in (stored.connector, loaded.connector):
            return
        pairs = [(stored, "kv_consumer"), (loaded, "kv_producer")]
        alone = any(not one.connector or one.role == wrong for one, wrong in pairs)
        if (
            alone
            or (stored.connector, stored.folder) != (loaded.connector, loaded.folder)
            or not loaded.loads
        ):
            raise RuntimeError(
                f"{decode.url} can't load what {prefill.url} computes: the former has "
                f"{loaded.described}, the latter {stored.described}. Start both with the same "
                "connector, such as kv_transfer_config=serving.kv_folder(folder, role='prefill') "
                "and role='decode'"
            )

    async def _source(self, server: ServerState) -> CacheSource:
        """Return a server's connector; one that may load if the server does not report it."""
        url = server.url
        if url in self._known:
            return self._known[url]
        async with self._asking.setdefault(url, asyncio.Lock()):  # one request asks, others wait
            if time.monotonic() < self._silent_until.get(url, 0.0):
                return CacheSource()
            if url not in self._known:
                try:
                    async with asyncio.timeout(ASK_S):
                        found = await rpc_results(self._fleet, server, SERVED_ROUTES)
                except Unreachable as error:
                    self._fleet.lost(server, str(error))
                    return CacheSource()
                except ServerFailed:
                    return CacheSource()  # ask again before the next request
                except TimeoutError:
                    self._silent_until[url] = time.monotonic() + SILENCE_S
                    return CacheSource()
                except (RuntimeError, ValueError) as error:
                    found = [summary(error)]
                self._known[url] = _agreed(found)
                if self._known[url] == CacheSource():
                    log.warning(
                        "%s does not report whether it has a KV connector (%.200s), so requests "
                        "don't ask for the expert routes of prompts; start the server with "
                        "primerl's worker extension",
                        url,
                        found,
                    )
            return self._known[url]


def _agreed(found: list[Any]) -> CacheSource:
    """Return the connector that all of a server's workers report; an unknown one if they don't."""
    reports = [one for one in found if isinstance(one, dict) and type(one.get("loaded")) is bool]
    if not reports or len(reports) < len(found):
        return CacheSource()
    first = reports[0]
    names = [first.get(name, default) for name, default in _REPORTED.items()]
    connector, role, folder = (one if isinstance(one, str | None) else "" for one in names)
    loads = any(one["loaded"] for one in reports)
    return CacheSource(loads, connector, role or "", folder or "")


class ExpectedRoutes:
    """Extraction of the expert routes from a response while it arrives; also decodes them."""

    def __init__(self, prompt_length: int, params: SamplingParams, threads: "_Threads") -> None:
        self.prompt_length = prompt_length
        self.params = params
        most_rows = prompt_length + params.max_tokens - 1 - params.routes_start
        self.most_bytes = most_characters(most_rows)
        """The maximum number of bytes that are taken out of the response."""
        self._threads = threads
        self._splitter = RoutesSplitter()
        self._decoder = RoutesDecoder(most_rows=most_rows)
        self._batch = bytearray()

    async def take(self, chunk: bytes) -> bytes:
        """Take the routes out of a chunk, and return the rest of the chunk.

        Raises:
            BadCompletion: the taken characters can't be routes that the request asked for.
        """
        rest, value = self._splitter.feed(chunk)
        self._batch += value
        if len(self._batch) >= BATCH_BYTES:
            await self._decode()
        return rest

    async def rows(self, choice: Choice) -> np.ndarray | None:
        """Return the routes ``[t, layers, k]`` of a complete response, or None if it has none.

        Raises:
            BadCompletion: the routes are incomplete, or not where vLLM puts them.
        """
        taken = "" if self._splitter.found else None
        if choice.routed_experts != taken:
            raise BadCompletion(
                "the response has routed_experts outside its choice, or escaped; expected it "
                "unescaped, inside the choice, as vLLM sends it"
            )
        if taken is None:
            return None
        await self._decode()
        return self._decoder.finish()

    async def _decode(self) -> None:
        batch, self._batch = bytes(self._batch), bytearray()
        await self._threads.run(partial(self._decoder.feed, batch))


class _Threads:
    """A limited number of threads, shared by all responses."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(THREADS)

    async def run(self, function: Callable[[], T]) -> T:
        async with self._free:
            return await asyncio.to_thread(function)


def row_versions(versions: np.ndarray, *, prompt_length: int, start: int) -> np.ndarray:
    """Return the version of each row of routes.

    Row i comes from the forward pass that sampled token i + 1, so it has that token's version. Rows
    of earlier prompt tokens get the version of the first sampled token.

    Args:
        versions: the versions of the sampled tokens, int32[n].
        prompt_length: the number of tokens before them.
        start: the index of the first row's token.

    Returns:
        int32[prompt_length + n - 1 - start].
    """
    rows = np.arange(start, prompt_length + len(versions) - 1)
    result: np.ndarray = versions[np.maximum(rows + 1 - prompt_length, 0)]
    return result
