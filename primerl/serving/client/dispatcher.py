"""Dispatch of completion requests to servers, with retries on other servers."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np

from primerl.rollout.engines.contract import BadCompletion, EngineLimits, check_completion
from primerl.rollout.errors import summary
from primerl.serving.client.calls import rpc_results
from primerl.serving.client.expert_routes import CacheSources, ExpectedRoutes, RouteWriter
from primerl.serving.client.fleet import Fleet
from primerl.serving.client.http import (
    BadResponse,
    NotFound,
    NotKept,
    Refused,
    ServerFailed,
    Unreachable,
)
from primerl.serving.client.prefill import BadPrefill, Prefill, PrefillServers
from primerl.serving.client.routing import WITHOUT_PREFIXES, RoutedRequest
from primerl.serving.client.servers import ServerState
from primerl.serving.client.session_prompts import SessionPrompt, SessionPrompts
from primerl.serving.names import SERVED_VOCAB_SIZE
from primerl.serving.protocol import requests, responses
from primerl.types import Completion, PolicyVersion, SamplingParams

FIRST_BACKOFF_S = 0.1
MOST_BACKOFF_S = 5.0
MOST_LOSSES = 8  # how many servers a request may lose; it may be the cause of their deaths
VOCAB_SIZE_S = 10.0  # timeout of asking a server for the size of its vocabulary
T = TypeVar("T")
log = logging.getLogger(__name__)
_UNFINISHED = ("abort", "error", None)  # the server failed, so the request is sent again


class _SendAgain(Exception):
    """Signal to send a request again.

    With ``free``, the attempt never reached an engine and is not counted. With ``lost``, the server
    was lost meanwhile. With ``fault``, the server failed the request. With ``avoid``, another
    server is preferred.
    """

    def __init__(
        self,
        reason: str,
        *,
        free: bool = False,
        lost: bool = False,
        fault: bool = False,
        avoid: bool = True,
    ) -> None:
        super().__init__(reason)
        self.free = free
        self.lost = lost
        self.fault = fault
        self.avoid = avoid


class Dispatcher:
    """Sender of completion and scoring requests, on the event loop of its fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.vocab_size = fleet.settings.vocab_size
        """The vocabulary size, or None while it is unknown; read from other threads."""
        self._fleet = fleet
        store = fleet.settings.routes
        self._recorder = None if store is None else RouteWriter(store)
        self._cache_sources = CacheSources(fleet)
        self._prompts = SessionPrompts()
        self._prefill_servers = PrefillServers(
            fleet, self._recorder, self._cache_sources, self._ask_prefill
        )
        self._hashes_prompts = fleet.settings.routing not in WITHOUT_PREFIXES
        self._asked_vocab_size = self.vocab_size is not None
        self._asking = asyncio.Lock()

    async def generate(
        self, prompt: np.ndarray, params: SamplingParams, session: str | None
    ) -> Completion:
        """Sample one completion on any server in use.

        Raises:
            BadCompletion: the response breaks the contract of engines.
        """
        with self._prompts.sent(session, prompt) as sent:
            return await self._generate(sent, params, session)

    async def _generate(
        self, prompt: SessionPrompt, params: SamplingParams, session: str | None
    ) -> Completion:
        length = len(prompt.token_ids)
        max_bytes = responses.most_bytes(params.max_tokens)
        recorder = self._recorder
        hashes: Sequence[int] = prompt.hashes() if self._hashes_prompts else ()
        request = RoutedRequest(tokens=length, session=session)

        async def ask(server: ServerState, rank: int | None) -> Completion:
            prefill = await self._prefill(server, rank, prompt, request, params, hashes)
            routes_start = expected = None
            if recorder is not None:
                routes_start = await self._first_route(server, length, params)
                known = attrs.evolve(params, routes_start=routes_start)
                expected = recorder.expect(length, known)
            # No await until the request is sent, so label and adapter describe the same weights.
            label = server.label
            adapter = self._adapter_of(server)
            # The salt names the server's last known weights, so that prefixes cached for other
            # weights are never reused.
            body = requests.generate_body(
                params,
                salt=label or "",
                adapter=adapter,
                routes_start=routes_start,
                transfer=None if prefill is None else prefill.transfer,
            )
            answer = await self._attempt(
                server, prompt, body, max_bytes, expected, rank=rank, hashes=hashes
            )
            choice = answer.choices[0]
            if choice.finish_reason in _UNFINISHED:
                raise _SendAgain(
                    f"{server.url} ended a request with {choice.finish_reason!r}", fault=True
                )
            versions = await self._versions(choice, server, adapter)
            completion = responses.make_completion(choice, versions)
            await self._learn_vocab_size(server)
            limits = EngineLimits(
                context_length=self._fleet.context_length or length + params.max_tokens,
                vocab_size=self.vocab_size,
                oldest=self._fleet.number(label) or 0,
                newest=self._fleet.newest_version,
            )
            check_completion(completion, length, params, limits)
            self._learn(server, versions, label, prefill)
            if recorder is None or expected is None:
                return completion
            before = None
            if prefill is not None and prefill.rows is not None:
                # Those that the server which samples does not send itself.
                before = prefill.rows[: expected.params.routes_start - params.routes_start]
            return await recorder.record(expected, choice, completion, before=before)

        return await self._dispatch(request, ask, hashes)

    async def score(
        self, token_ids: np.ndarray, read: Callable[[responses.Response], T], *, top_k: int = 0
    ) -> T:
        """Score a sequence on any server in use, and return ``read(response)``.

        The response has the logprob of each token and, with ``top_k``, those of the ``top_k``
        likeliest tokens at each position.
        """
        max_bytes = responses.most_bytes(1, scored=len(token_ids) * (top_k + 1))
        prompt = SessionPrompt.alone(token_ids)

        async def ask(server: ServerState, rank: int | None) -> T:
            adapter = self._adapter_of(server)
            routes_start = self._fleet.no_routes(token_ids)
            body = requests.score_body(top_k=top_k, adapter=adapter, routes_start=routes_start)
            return read(await self._attempt(server, prompt, body, max_bytes, rank=rank))

        # vLLM scores without its prefix cache, so the blocks' hashes are not needed.
        return await self._dispatch(RoutedRequest(tokens=len(token_ids)), ask)

    async def _dispatch(
        self,
        request: RoutedRequest,
        ask: Callable[[ServerState, int | None], Coroutine[Any, Any, T]],
        hashes: Sequence[int] = (),
    ) -> T:
        """Send a request until it is answered, each time to another server if there is one.

        Raises:
            BadCompletion: all servers answered wrongly, or the retries are used up.
            RuntimeError: the retries are used up, or weights were published and no server could be
                used for ``down_timeout_s``.
        """
        avoid: set[str] = set()
        wrong: set[str] = set()
        failures: list[str] = []
        losses = 0
        retries = self._fleet.settings.retries
        servers = self._fleet.servers
        while True:
            server, rank = await self._place(
                lambda: servers.choose(request, hashes=hashes, avoid=avoid)
            )
            try:
                answer = await ask(server, rank)
            except BadPrefill as error:
                failures.append(str(error))
                if len(failures) - losses > retries:
                    raise
            except BadCompletion as error:
                where = "" if server.url in str(error) else f"{server.url}: "
                bad = BadCompletion(f"{where}{error}")
                self._fleet.request_failed(server, str(bad))
                avoid.add(server.url)
                wrong.add(server.url)
                failures.append(str(bad))
                # A fault of one server, or one that they have in common? Servers that are lost now
                # may return and answer rightly.
                common = all(one.url in wrong for one in servers if one.role == "decode")
                if common or len(failures) - losses > retries:
                    raise bad from error
                await self._back_off(avoid, failures)
            except _SendAgain as retry:
                if retry.fault:
                    self._fleet.request_failed(server, str(retry))
                if retry.avoid:
                    avoid.add(server.url)
                if retry.free:
                    continue
                failures.append(str(retry))
                losses += retry.lost
                if len(failures) - losses > retries or losses > MOST_LOSSES:
                    raise RuntimeError(
                        f"a request failed {len(failures)} times: {'; '.join(failures)}"
                    ) from retry
                if retry.fault:
                    await self._back_off(avoid, failures)
            else:
                self._fleet.answered(server)
                return answer

    async def _back_off(self, avoid: Collection[str], failures: Sequence[str]) -> None:
        """Wait before a request is sent again, if all sound servers have failed it."""
        if all(one.url in avoid for one in self._fleet.servers.sound()):
            backoff = FIRST_BACKOFF_S * 2 ** (len(failures) - 1)
            await asyncio.sleep(min(backoff, MOST_BACKOFF_S))

    async def _place(
        self, choose: Callable[[], tuple[ServerState, int | None] | None]
    ) -> tuple[ServerState, int | None]:
        """Wait until a server can be chosen."""
        limit_s = self._fleet.settings.request_timeout_s
        servers = self._fleet.servers
        try:
            async with asyncio.timeout(limit_s):
                return await self._fleet.wait(
                    choose, "no server could be used", patient=lambda: servers.unpublished
                )
        except TimeoutError:
            raise RuntimeError(
                f"no server could be used for {limit_s:g} s: {servers.describe()}"
            ) from None

    async def _attempt(
        self,
        server: ServerState,
        prompt: SessionPrompt,
        body: Mapping[str, Any],
        max_bytes: int,
        expected: ExpectedRoutes | None = None,
        *,
        rank: int | None,
        hashes: Sequence[int] = (),
    ) -> responses.Response:
        fields = prompt.for_server(server.url)
        tokens = len(prompt.token_ids)
        try:
            async with self._fleet.holding(server, rank, tokens=tokens, hashes=hashes):
                response, kept = await self._fleet.http.complete(
                    server.url,
                    body,
                    prompt=fields,
                    max_bytes=max_bytes,
                    extraction=expected,
                    rank=rank,
                )
        except Unreachable as error:
            # A dying server loses many requests, which count as one failure.
            fault = error.sent and server.alive
            self._fleet.lost(server, str(error))
            raise _SendAgain(str(error), free=not error.sent, lost=True, fault=fault) from error
        except ServerFailed as error:
            raise _SendAgain(str(error), fault=True) from error
        except NotFound as error:
            if self._fleet.labels.adapter is None:
                raise
            # A newer version has replaced the adapter, or the server has lost it.
            await self._fleet.poll(server)
            raise _SendAgain(str(error)) from error
        except Refused as error:
            if fields.whole:
                raise
            # The server dropped the prompt or was restarted; or it does not know the protocol, such
            # as a plain vLLM or a router that took its place, and is not asked to keep it again.
            if not isinstance(error, NotKept):
                prompt.name = ""
            raise _SendAgain(str(error), free=True, avoid=False) from error
        except BadResponse as error:
            hint = "" if self._recorder else " (expert routes need VLLMEngine(..., routes=))"
            raise BadCompletion(f"{error}{hint}") from error
        except TimeoutError as error:
            raise _SendAgain(
                f"{server.url} was lost while it processed a request", lost=True
            ) from error
        if kept:
            prompt.confirm(server.url)
        return response

    async def _prefill(
        self,
        server: ServerState,
        rank: int | None,
        prompt: SessionPrompt,
        request: RoutedRequest,
        params: SamplingParams,
        hashes: Sequence[int],
    ) -> Prefill | None:
        """Have a prompt computed for ``server``, on which the request counts as in flight."""
        if not self._fleet.prefills:
            return None
        try:
            async with self._fleet.holding(server, rank, tokens=request.tokens, hashes=hashes):
                return await self._prefill_servers.prefill(server, prompt, request, params, hashes)
        except TimeoutError as error:
            raise _SendAgain(
                f"{server.url} was lost while its prompt was computed", free=True
            ) from error

    async def _ask_prefill(
        self,
        server: ServerState,
        prompt: SessionPrompt,
        body: Mapping[str, Any],
        max_bytes: int,
        expected: ExpectedRoutes | None = None,
        *,
        rank: int | None,
        hashes: Sequence[int],
    ) -> responses.Response | None:
        """Send a request to a prefill server; return None if it failed."""
        for _ in range(2):
            try:
                return await self._attempt(
                    server, prompt, body, max_bytes, expected, rank=rank, hashes=hashes
                )
            except _SendAgain as retry:
                log.info("a prompt is computed where it is continued: %s", retry)
                if retry.fault:
                    self._fleet.request_failed(server, str(retry))
                if retry.avoid:
                    break
        return None

    def _adapter_of(self, server: ServerState) -> str | None:
        """Return the adapter's name in requests, or None if this engine samples under no adapter.

        Raises:
            _SendAgain: the server was lost meanwhile. The base model would answer a request without
                a name.
        """
        adapter = self._fleet.adapter_of(server)
        if adapter is None and self._fleet.labels.adapter is not None:
            raise _SendAgain(f"{server.url} no longer serves the adapter", free=True)
        return adapter

    async def _first_route(
        self, server: ServerState, prompt_length: int, params: SamplingParams
    ) -> int:
        first = await self._cache_sources.first_route(server, prompt_length, params)
        if not server.alive:
            raise _SendAgain(server.error, free=True)
        return first

    async def _versions(
        self, choice: responses.Choice, server: ServerState, adapter: str | None
    ) -> list[PolicyVersion]:
        """Return the version of each token.

        Raises:
            BadCompletion: the response does not give a version for each token.
            _SendAgain: the server sampled with weights that are not of this run, or was lost before
                it confirmed a version that is newer than all known ones.
        """
        known = responses.token_versions(choice, self._fleet.number, adapter=adapter)
        versions = [one for one in known if one is not None]
        if len(versions) < len(known):
            raise _SendAgain(
                f"{server.url} sampled with weights that this run did not publish", fault=True
            )
        if versions:
            await self._fleet.confirm(server, max(versions))
            if max(versions) > self._fleet.newest_version and not server.alive:
                raise _SendAgain(
                    f"{server.url} was lost before it confirmed its version", lost=True
                )
        return versions

    async def _learn_vocab_size(self, server: ServerState) -> None:
        """Ask a server for its vocabulary size, once; needs primerl's worker extension."""
        async with self._asking:  # only the first finished request asks; the others wait for it
            if self._asked_vocab_size:
                return
            try:
                async with asyncio.timeout(VOCAB_SIZE_S):
                    found = await rpc_results(self._fleet, server, SERVED_VOCAB_SIZE)
            except Unreachable:
                return  # ask again after the next response
            except (RuntimeError, ValueError, TimeoutError) as error:
                found = [summary(error)]
            self._asked_vocab_size = True
            sizes = [one.get("vocab_size") for one in found if isinstance(one, dict)]
            known = [size for size in sizes if type(size) is int and size > 0]
            if known and len(known) == len(found):
                self.vocab_size = min(known)
            else:
                log.warning(
                    "%s does not report its vocabulary size (%.200s), so sampled token ids beyond "
                    "it are not detected: pass VLLMEngine(..., vocab_size=)",
                    server.url,
                    found,
                )

    def _learn(
        self,
        server: ServerState,
        versions: list[PolicyVersion],
        label: str | None,
        prefill: Prefill | None,
    ) -> None:
        """Record which version a server serves, from a valid response.

        Raises:
            _SendAgain: the server began the request under other weights than those that computed
                its prompt elsewhere; or with ``on_update="keep"``, than those before.
        """
        if server.alive:
            last = versions[-1]
            self._fleet.servers.serves(server, self._fleet.labels.name(last), last)
            self._fleet.tell()
        if self._fleet.settings.on_update == "keep" and versions[0] != self._fleet.number(label):
            # The prompt may have reused a cached prefix that older weights computed.
            raise _SendAgain(f"{server.url} was updated before it began a request")
        if prefill is not None and versions[0] != prefill.version:
            raise _SendAgain(f"{server.url} was updated before it loaded a prompt", avoid=False)
