"""Sends completion requests to the replicas, until one of them has answered."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import attrs
import numpy as np

from primerl.rollout.engines.contract import BadCompletion, EngineLimits, check_completion
from primerl.rollout.errors import summary
from primerl.serving.client.calls import rpc_results
from primerl.serving.client.fleet import Fleet
from primerl.serving.client.http import (
    BadResponse,
    NotFound,
    ServerFailed,
    Unreachable,
)
from primerl.serving.client.replicas import Replica
from primerl.serving.client.routes import CacheSources, ExpectedRoutes, RouteRecorder
from primerl.serving.names import SERVED_VOCAB_SIZE
from primerl.serving.protocol import requests, responses
from primerl.types import Completion, PolicyVersion, SamplingParams

FIRST_BACKOFF_S = 0.1
MOST_BACKOFF_S = 5.0
VOCAB_SIZE_S = 10.0  # timeout of asking a server for the size of its vocabulary
T = TypeVar("T")
log = logging.getLogger(__name__)
_UNFINISHED = ("abort", "error", None)  # the server failed; the request may be valid


class _Retry(Exception):
    """Send the request again; ``free``: the attempt never reached a server and is not counted."""

    def __init__(self, reason: str, *, free: bool = False, wait: bool = True) -> None:
        super().__init__(reason)
        self.free = free
        self.wait = wait


class Dispatcher:
    """Sends requests to the servers of a fleet, on its event loop."""

    def __init__(self, fleet: Fleet) -> None:
        self.vocab_size = fleet.settings.vocab_size
        """The number of token ids, if known; read from other threads."""
        self._fleet = fleet
        store = fleet.settings.routes
        self._recorder = None if store is None else RouteRecorder(store)
        self._cache_sources = CacheSources(fleet)
        self._asked_vocab_size = self.vocab_size is not None
        self._asking = asyncio.Lock()

    async def generate(
        self, prompt: np.ndarray, params: SamplingParams, session: str | None
    ) -> Completion:
        """Sample one completion on any replica that serves.

        Raises:
            BadCompletion: the response breaks the contract of engines.
        """
        max_bytes = responses.most_bytes(params.max_tokens)
        recorder = self._recorder

        async def ask(replica: Replica) -> Completion:
            routes_start = expected = None
            if recorder is not None:
                routes_start = await self._first_route(replica, len(prompt), params)
                known = attrs.evolve(params, routes_start=routes_start)
                expected = recorder.expect(len(prompt), known)
            # Nothing waits from here until the request is sent, so both are of the same weights.
            label = replica.label
            adapter = self._adapter_of(replica)
            # The salt is the replica's last known weights: prefixes of others are never reused.
            body = requests.generate_body(
                prompt.tolist(),
                params,
                salt=label or "",
                adapter=adapter,
                routes_start=routes_start,
            )
            choice = (await self._attempt(replica, body, max_bytes, expected)).choices[0]
            if choice.finish_reason in _UNFINISHED:
                raise _Retry(f"{replica.url} ended a request with {choice.finish_reason!r}")
            versions = await self._versions(choice, replica, adapter)
            completion = responses.make_completion(choice, versions)
            await self._learn_vocab_size(replica)
            limits = EngineLimits(
                context_length=self._fleet.context_length or len(prompt) + params.max_tokens,
                vocab_size=self.vocab_size,
                oldest=self._fleet.number(label) or 0,
                newest=self._fleet.newest_version,
            )
            check_completion(completion, len(prompt), params, limits)
            self._learn(replica, versions, label)
            if recorder is None or expected is None:
                return completion
            return await recorder.record(expected, choice, completion)

        return await self._dispatch(session, ask)

    async def score(
        self, token_ids: list[int], read: Callable[[responses.Response], T], *, top_k: int = 0
    ) -> T:
        """What ``read`` finds in the logprobs of a sequence, computed by any replica that serves.

        With ``top_k``, they include those of the likeliest tokens in each place.
        """
        max_bytes = responses.most_bytes(1, scored=len(token_ids) * (top_k + 1))

        async def ask(replica: Replica) -> T:
            adapter = self._adapter_of(replica)
            routes_start = self._fleet.no_routes(token_ids)
            body = requests.score_body(
                token_ids, top_k=top_k, adapter=adapter, routes_start=routes_start
            )
            return read(await self._attempt(replica, body, max_bytes))

        return await self._dispatch(None, ask)

    async def _dispatch(
        self, session: str | None, ask: Callable[[Replica], Coroutine[Any, Any, T]]
    ) -> T:
        """Send a request until it is answered, each time to another replica if there is one.

        Raises:
            RuntimeError: none served for ``down_timeout_s``, though weights were published.
        """
        avoid: set[str] = set()
        failures: list[str] = []
        replicas = self._fleet.replicas
        while True:
            replica = await self._fleet.wait(
                lambda: replicas.choose(session, avoid=avoid),
                "no replica has served",
                patient=lambda: replicas.unpublished,
            )
            try:
                return await ask(replica)
            except BadCompletion as error:
                where = "" if replica.url in str(error) else f"{replica.url}: "
                raise BadCompletion(f"{where}{error}") from error
            except _Retry as retry:
                avoid.add(replica.url)
                if retry.free:
                    continue
                failures.append(str(retry))
                if len(failures) > self._fleet.settings.retries:
                    raise RuntimeError(
                        f"a request failed {len(failures)} times: {'; '.join(failures)}"
                    ) from retry
                if retry.wait:
                    backoff = FIRST_BACKOFF_S * 2 ** (len(failures) - 1)
                    await asyncio.sleep(min(backoff, MOST_BACKOFF_S))

    async def _attempt(
        self,
        replica: Replica,
        body: Mapping[str, Any],
        max_bytes: int,
        expected: ExpectedRoutes | None = None,
    ) -> responses.Response:
        try:
            async with self._fleet.holding(replica):
                return await self._fleet.http.complete(
                    replica.url, body, max_bytes=max_bytes, extraction=expected
                )
        except Unreachable as error:
            self._fleet.lost(replica, str(error))
            raise _Retry(str(error), free=not error.sent, wait=False) from error
        except ServerFailed as error:
            raise _Retry(str(error)) from error
        except NotFound as error:
            if self._fleet.labels.adapter is None:
                raise
            await self._fleet.poll(replica)  # a newer version has replaced it, or it is gone
            raise _Retry(str(error), wait=False) from error
        except BadResponse as error:
            hint = "" if self._recorder else " (expert routes need VLLMEngine(..., routes=))"
            raise BadCompletion(f"{error}{hint}") from error
        except TimeoutError as error:
            raise _Retry(f"{replica.url} was lost with the request", wait=False) from error

    def _adapter_of(self, replica: Replica) -> str | None:
        """What a request calls the adapter, or None if there is none in this run.

        Raises:
            _Retry: the server has been lost meanwhile. Without a name, its base model would answer.
        """
        adapter = self._fleet.adapter_of(replica)
        if adapter is None and self._fleet.labels.adapter is not None:
            raise _Retry(f"{replica.url} serves no adapter any more", free=True, wait=False)
        return adapter

    async def _first_route(
        self, replica: Replica, prompt_length: int, params: SamplingParams
    ) -> int:
        try:
            return await self._cache_sources.first_route(replica, prompt_length, params)
        except Unreachable as error:
            self._fleet.lost(replica, str(error))
            raise _Retry(str(error), free=True, wait=False) from error

    async def _versions(
        self, choice: responses.Choice, replica: Replica, adapter: str | None
    ) -> list[PolicyVersion]:
        """The version of each token.

        Raises:
            BadCompletion: the response does not give one for each token.
            _Retry: the server sampled with weights that are not this run's.
        """
        known = responses.token_versions(choice, self._fleet.number, adapter=adapter)
        versions = [one for one in known if one is not None]
        if len(versions) < len(known):
            raise _Retry(f"{replica.url} sampled with weights that are not this run's")
        if versions:
            await self._fleet.confirm(replica, max(versions))
            if max(versions) > self._fleet.newest_version and not replica.alive:
                raise _Retry(f"{replica.url} was lost before it confirmed its version", wait=False)
        return versions

    async def _learn_vocab_size(self, replica: Replica) -> None:
        """Ask a server for its vocabulary size, once; it needs primerl's worker extension."""
        async with self._asking:  # requests that finish meanwhile wait for it
            if self._asked_vocab_size:
                return
            try:
                async with asyncio.timeout(VOCAB_SIZE_S):
                    found = await rpc_results(self._fleet, replica, SERVED_VOCAB_SIZE)
            except Unreachable:
                return  # ask the server of the next response
            except (RuntimeError, ValueError, TimeoutError) as error:
                found = [summary(error)]
            self._asked_vocab_size = True
            sizes = [one.get("vocab_size") for one in found if isinstance(one, dict)]
            known = [size for size in sizes if type(size) is int and size > 0]
            if known and len(known) == len(found):
                self.vocab_size = min(known)
            else:
                log.warning(
                    "%s does not report its vocabulary size (%.200s), so ids beyond it are not "
                    "detected: pass VLLMEngine(..., vocab_size=)",
                    replica.url,
                    found,
                )

    def _learn(self, replica: Replica, versions: list[PolicyVersion], label: str | None) -> None:
        """Record which version a server served, from a valid response."""
        if replica.alive:
            last = versions[-1]
            self._fleet.replicas.serves(replica, self._fleet.labels.name(last), last)
            self._fleet.tell()
        if self._fleet.settings.on_update == "keep" and versions[0] != self._fleet.number(label):
            # Its prompt may have reused a prefix that older weights computed.
            raise _Retry(f"{replica.url} was updated before it began a request", wait=False)
