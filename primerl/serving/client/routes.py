"""Expert routes of a completion: from a server's response into the store, in threads."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import attrs
import numpy as np

from primerl.rollout.engines.contract import BadCompletion
from primerl.rollout.engines.protocol import RouteStore, is_instant
from primerl.rollout.errors import summary
from primerl.serving.client.calls import rpc_results
from primerl.serving.client.fleet import Fleet
from primerl.serving.client.http import ServerFailed
from primerl.serving.client.replicas import Replica
from primerl.serving.names import SERVED_ROUTES
from primerl.serving.protocol.responses import Choice
from primerl.serving.protocol.routes import RoutesDecoder, RoutesSplitter, most_characters
from primerl.types import Completion, SamplingParams

ASK_S = 10.0  # timeout of asking a server what it loads
SILENCE_S = 60.0  # until a server that did not answer is asked again
THREADS = 2 if (os.cpu_count() or 1) > 2 else 1  # of two cores, one is left to the event loops
BATCH_BYTES = 1 << 21  # characters given to a thread at once

T = TypeVar("T")
log = logging.getLogger(__name__)


class RouteRecorder:
    """Puts the routes of completions into a store; used on one event loop."""

    def __init__(self, store: RouteStore) -> None:
        self._store = store
        self._threads = _Threads()

    def expect(self, prompt_length: int, params: SamplingParams) -> "ExpectedRoutes":
        """The routes of one response that is to come."""
        return ExpectedRoutes(prompt_length, params, self._threads)

    async def record(
        self, expected: "ExpectedRoutes", choice: Choice, completion: Completion
    ) -> Completion:
        """The completion, with references to its routes.

        Raises:
            BadCompletion: there are no routes, or not those of this completion, or the store finds
                that they can't be of its model.
        """
        start, prompt = expected.params.routes_start, expected.prompt_length
        count = prompt + len(completion.token_ids) - 1 - start
        rows = await expected.rows(choice)
        if rows is None and count == 0:
            return completion
        if rows is None:
            raise BadCompletion(
                "the server sent no routed experts; start it with serve_vllm(..., "
                "enable_return_routed_experts=True), or --enable-return-routed-experts"
            )
        if len(rows) != count:
            raise BadCompletion(
                f"the server sent routed experts of {len(rows)} tokens, expected {count}: those of "
                f"tokens {start} to {start + count - 1}, of a prompt of {prompt} tokens and "
                f"{len(completion.token_ids)} sampled ones, the last of which has none"
            )
        if count == 0 or expected.params.temperature == 0:
            return completion  # greedy ones are not trained
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
            raise BadCompletion(f"the routed experts can't be of this model: {error}") from error
        return attrs.evolve(completion, routes=references)


class CacheSources:
    """Which servers load keys and values that were computed elsewhere, through a KV connector.

    Such a server does not know the routes of those tokens, and vLLM 0.32 ends if it is asked for
    them. A prompt's last token is always computed by the server itself.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._loading: dict[str, bool] = {}
        self._silent_until: dict[str, float] = {}
        self._asking: dict[str, asyncio.Lock] = {}

    async def first_route(
        self, replica: Replica, prompt_length: int, params: SamplingParams
    ) -> int:
        """The first token whose routes a server can be asked for."""
        if await self._loads(replica):
            return max(params.routes_start, prompt_length - 1)
        return params.routes_start

    async def _loads(self, replica: Replica) -> bool:
        """Whether a server has a connector; so it is believed where it does not say."""
        url = replica.url
        if url in self._loading:
            return self._loading[url]
        async with self._asking.setdefault(url, asyncio.Lock()):  # its other requests wait for it
            if time.monotonic() < self._silent_until.get(url, 0.0):
                return True
            if url not in self._loading:
                try:
                    async with asyncio.timeout(ASK_S):
                        found = await rpc_results(self._fleet, replica, SERVED_ROUTES)
                except ServerFailed:
                    return True  # ask again before the next request
                except TimeoutError:
                    self._silent_until[url] = time.monotonic() + SILENCE_S
                    return True
                except (RuntimeError, ValueError) as error:
                    found = [summary(error)]
                said = [one.get("loaded") for one in found if isinstance(one, dict)]
                known = [one for one in said if type(one) is bool]
                complete = bool(known) and len(known) == len(found)
                self._loading[url] = any(known) or not complete
                if not complete:
                    log.warning(
                        "%s does not say whether it loads keys and values from elsewhere (%.200s), "
                        "so the expert routes of prompts are not asked for; start it with "
                        "primerl's worker extension",
                        url,
                        found,
                    )
            return self._loading[url]


class ExpectedRoutes:
    """Takes the routes out of a response as it arrives, and decodes them."""

    def __init__(self, prompt_length: int, params: SamplingParams, threads: "_Threads") -> None:
        self.prompt_length = prompt_length
        self.params = params
        most_rows = prompt_length + params.max_tokens - 1 - params.routes_start
        self.most_bytes = most_characters(most_rows)
        """The most bytes that are taken out of the response."""
        self._threads = threads
        self._splitter = RoutesSplitter()
        self._decoder = RoutesDecoder(most_rows=most_rows)
        self._batch = bytearray()

    async def take(self, chunk: bytes) -> bytes:
        """Take the routes out of a chunk; returns the rest of it.

        Raises:
            BadCompletion: what was taken can't be routes that were asked for.
        """
        rest, value = self._splitter.feed(chunk)
        self._batch += value
        if len(self._batch) >= BATCH_BYTES:
            await self._decode()
        return rest

    async def rows(self, choice: Choice) -> np.ndarray | None:
        """The routes, ``[t, layers, k]``, now that the response is complete; None without any.

        Raises:
            BadCompletion: they are incomplete, or not where vLLM has them.
        """
        taken = "" if self._splitter.found else None
        if choice.routed_experts != taken:
            raise BadCompletion("the response has routed_experts outside of its choice, or escaped")
        if taken is None:
            return None
        await self._decode()
        return self._decoder.finish()

    async def _decode(self) -> None:
        batch, self._batch = bytes(self._batch), bytearray()
        await self._threads.run(partial(self._decoder.feed, batch))


class _Threads:
    """A few threads, for all responses."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(THREADS)

    async def run(self, function: Callable[[], T]) -> T:
        async with self._free:
            return await asyncio.to_thread(function)


def row_versions(versions: np.ndarray, *, prompt_length: int, start: int) -> np.ndarray:
    """The version of each row of routes, from those of the sampled tokens.

    Row i is of the forward pass that sampled token i + 1; those of the prompt's earlier tokens are
    of the pass that sampled the first.

    Args:
        versions: of the sampled tokens, int32[n].
        prompt_length: tokens before them.
        start: the token of the first row.

    Returns:
        int32[prompt_length + n - 1 - start].
    """
    rows = np.arange(start, prompt_length + len(versions) - 1)
    result: np.ndarray = versions[np.maximum(rows + 1 - prompt_length, 0)]
    return result
