"""``VLLMEngine``, which samples and scores on vLLM servers and loads weights into them."""

import asyncio
import functools
import os
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from primerl.rollout.engines.protocol import RouteStore
from primerl.rollout.engines.token_sequence import as_int32
from primerl.serving.client.calls import (
    agreed,
    cache_block,
    call_route,
    poll_metrics,
    probe,
    read_metrics,
)
from primerl.serving.client.connection import Connection
from primerl.serving.client.fleet import Fleet
from primerl.serving.client.routing import RoutingPolicy, of_session
from primerl.serving.client.server_urls import ServerUrls, key_of, url_of
from primerl.serving.client.servers import Role
from primerl.serving.client.settings import ConnectionSettings
from primerl.serving.client.updates import SendBarrier
from primerl.serving.names import (
    COLLECTIVE_RPC,
    DETOKENIZE,
    READ_WEIGHTS,
    RELOAD_REFUSAL,
    SERVED_DTYPE,
    WEIGHT_RECEIPT,
)
from primerl.serving.protocol import responses
from primerl.serving.protocol.labels import Labels
from primerl.serving.protocol.metrics import by_rank, totals
from primerl.serving.protocol.requests import LEAST_TEMPERATURE
from primerl.types import Completion, PolicyVersion, SamplingParams

T = TypeVar("T")


class VLLMEngine:
    """An engine that samples from one or more vLLM servers that hold the same policy.

        with serving.serve_vllm(model) as server, serving.VLLMEngine(server) as engine:
            weights.Disk(policy, engine, folder=folder).publish(0)
            completion = await engine.generate(prompt_ids, SamplingParams(max_tokens=64))

    A server is used once it holds weights of this run: those that a transport published
    (``load_weights``), or its own checkpoint after ``adopt``. By default, requests of a session go
    to the server, and to its data-parallel rank, that has their prefix cached, unless it is much
    busier than another. Other requests go to the least loaded server. Sessions send only the tokens
    that their server does not hold, if primerl started it. When a server dies, its requests are
    sent to another one. When it returns, the engine that published the latest weights loads them
    into it before the server is used again.

    The engine is ``portable``: it can be pickled, and worker processes hold copies with their own
    connections. Each copy runs its connections in a dedicated thread, so ``generate`` may be
    awaited on any event loop.

    Args:
        servers: one or several urls (``"http://host:port"``) or ``VLLMServer`` objects; or the path
            of a file with one url per line, which all copies read again when it changes.
        prefill: servers, given likewise, that compute prompts for the others, which then load their
            keys and values and sample. All of them need a KV connector (``serving.kv_folder``, or
            one of vLLM's). A server computes a prompt itself while no prefill server has its
            weights.
        prefill_from: the number of tokens of a prompt, not counting those that the server of its
            session has already, from which on they are computed by ``prefill``. With ``routes``,
            they are always computed there, because only the server that computes a token knows its
            expert routes.
        api_key: the servers' API key; by default that of the ``VLLMServer`` objects, or
            ``PRIMERL_API_KEY`` in the environment.
        on_update: the effect of an update on requests in flight: ``"recompute"`` (their KV cache is
            recomputed, so that each token is sampled by exactly its version), ``"keep"`` (they
            continue with their old KV cache) or ``"drain"`` (they finish under the old weights,
            while new requests wait).
        run: the name of this run's weights on the servers, letters and digits; random by default.
        request_timeout_s: the timeout of each attempt at a request. It counts from when the request
            is sent, or from when its server last answered a request that was sent before, so that
            overload only delays requests.
        down_timeout_s: how long requests wait while no server can be used. Before the first
            publication they wait up to ``request_timeout_s``.
        retries: how often a request is sent again after a server failed it or answered it wrongly.
            A request whose server was lost is sent again up to eight times.
        routes: the store for the expert routes that servers return (``serve_vllm(...,
            enable_return_routed_experts=True)``), such as a ``replay.Store``; it is pickled with
            the engine. With a store, each completion has ``routes`` of all tokens from
            ``params.routes_start`` to the last but one, and a response without routes, or with
            those of another request, is a ``BadCompletion``. Without a store, use servers that
            return no routes: for long sequences, routes exceed the size allowed for responses.
        vocab_size: the number of token ids; by default as the servers report it, if they do. A
            completion with an id beyond it is a ``BadCompletion``.
        adapter: the name of a low-rank adapter under which this engine samples and scores, once
            ``weights.Adapter`` has published it; None for the servers' own weights. Engines with
            different adapters, or none, may share servers; their versions are independent. Requests
            in flight finish with the adapter version that they started with, whatever
            ``on_update`` is.
        routing: the policy by which the server of each request is chosen, and its data-parallel
            rank: ``of_session``, ``least_loaded``, ``prefix_aware``, ``cost_aware``, or a function
            of your own. It is pickled with the engine.

    Raises:
        ValueError: an argument is out of range, or a url is malformed.
    """

    portable = True

    def __init__(
        self,
        servers: Any,
        *,
        prefill: Any = None,
        prefill_from: int = 1024,
        api_key: str | None = None,
        on_update: Literal["recompute", "keep", "drain"] = "recompute",
        run: str | None = None,
        request_timeout_s: float = 600.0,
        down_timeout_s: float = 60.0,
        retries: int = 3,
        routes: RouteStore | None = None,
        vocab_size: int | None = None,
        adapter: str | None = None,
        routing: RoutingPolicy = of_session,
    ) -> None:
        self._members = ServerUrls(servers)
        self._prefill = None if prefill is None else ServerUrls(prefill)
        if self._prefill is not None and (both := {*self._prefill.urls} & {*self._members.urls}):
            raise ValueError(f"a server is listed twice: {', '.join(sorted(both))}")
        self._settings = ConnectionSettings(
            labels=Labels(secrets.token_hex(4) if run is None else run, adapter),
            api_key=api_key or key_of(servers, prefill or ()) or os.environ.get("PRIMERL_API_KEY"),
            on_update=on_update,
            request_timeout_s=request_timeout_s,
            down_timeout_s=down_timeout_s,
            retries=retries,
            routes=routes,
            vocab_size=vocab_size,
            prefill_from=prefill_from,
            routing=routing,
        )
        self._known_version: PolicyVersion = 0
        self._context_length: int | None = None
        self._connection: Connection | None = None
        self._closed = False
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        # The copy opens its own connection, and does not seed servers: it has published nothing.
        state = {**self.__dict__, "_known_version": self.version, "_connection": None}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    # ---- what is served ----

    @property
    def version(self) -> PolicyVersion:
        """The oldest version that any server in use serves, at most 0.2 s out of date."""
        return max(self._known_version, self._connected().fleet.version)

    @property
    def newest_version(self) -> PolicyVersion:
        """The newest version that any server is known to serve."""
        return max(self.version, self._connected().fleet.newest_version)

    @property
    def adapter(self) -> str | None:
        """The adapter that this engine samples under; None for the servers' own weights."""
        return self._settings.labels.adapter

    @property
    def routes(self) -> RouteStore | None:
        """The store for expert routes; None if they are not recorded."""
        return self._settings.routes

    @property
    def request_timeout_s(self) -> float:
        """The timeout of each attempt at a request, in seconds."""
        return self._settings.request_timeout_s

    @property
    def vocab_size(self) -> int | None:
        """The number of token ids; None until it is known."""
        if self._connection is None:
            return self._settings.vocab_size
        return self._connection.dispatcher.vocab_size

    def learn(self, version: PolicyVersion) -> None:
        """Record ``version``, which another copy of this engine saw on every server in use."""
        self._known_version = max(self._known_version, version)
        connection = self._connected()
        connection.loop.call_soon(connection.fleet.learn, version)

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of one request, prompt and completion together.

        Raises:
            RuntimeError: no server could be reached.
        """
        if self._context_length is None:
            self._context_length = self._connected().run(Fleet.context)
        return self._context_length

    @property
    def dtype(self) -> str:
        """The dtype that the servers compute in, such as ``"bfloat16"``.

        Raises:
            RuntimeError: no server could be reached, or the servers compute in different dtypes.
        """
        ask = functools.partial(agreed, method=SERVED_DTYPE, timeout_s=60.0)
        return str(self._connected().run(ask))

    @property
    def cache_block(self) -> int:
        """The number of tokens in a block of the prefix cache; the largest of all servers.

        Raises:
            RuntimeError: no server could be reached, or a server does not know it, because it was
                started without primerl's worker extension.
        """
        return int(self._connected().run(functools.partial(cache_block, timeout_s=60.0)))

    def check_reloads(self) -> None:
        """Check that the weights of the running servers can be updated.

        Raises:
            RuntimeError: the servers were started with ``enable_lora`` or ``enable_eplb``, or have
                padded experts (on a CPU); or no server could be reached, or their answers differ.
        """
        ask = functools.partial(agreed, method=RELOAD_REFUSAL, timeout_s=60.0)
        found = self._connected().run(ask)
        if isinstance(found, dict) and found.get("refused"):
            raise RuntimeError(found["refused"])

    # ---- requests ----

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """Sample one completion; cancelling the awaiting task cancels the request on its server.

        Only ``params.stop_token_ids`` end a completion before ``max_tokens``. Logprobs are those of
        the sampled distribution (temperature applied), and each token has the version of the
        weights that sampled it. The completion's expert routes are in the store (``routes``) before
        this returns; threads decode and store them.

        Raises:
            BadCompletion: the response of each server that was asked breaks the contract of
                engines, lacks expert routes, or has routes that the store refuses. After a wrong
                response, up to ``retries`` other servers are asked.
            ValueError: the prompt is empty, prompt and ``max_tokens`` exceed the context,
                ``routes_start`` exceeds the prompt, or vLLM refuses the request.
            RuntimeError: no server was usable for ``down_timeout_s``, the retries were used up, or
                an attempt took longer than ``request_timeout_s``.
        """
        prompt = as_int32(prompt_ids)
        await self._learn_context()
        self._check(prompt, params.max_tokens)
        if self.routes is not None and params.routes_start > len(prompt):
            raise ValueError(
                f"routes_start is {params.routes_start}, beyond the prompt of {len(prompt)} tokens"
            )
        if 0 < params.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature={params.temperature}: vLLM raises it to {LEAST_TEMPERATURE}; use 0 "
                f"(greedy) or at least {LEAST_TEMPERATURE}"
            )
        dispatcher = self._connected().dispatcher
        return await self._request(dispatcher.generate(prompt, params, session))

    async def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """Compute the logprob of each token given the tokens before it; raises as ``generate``.

        Returns:
            Logprobs at temperature 1, float32[t]; entry 0 is 0.
        """
        return await self._scored(token_ids, responses.prompt_scores)

    async def score_top_k(
        self, token_ids: Sequence[int], *, k: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compute ``score``'s logprobs and the k likeliest tokens at each position.

        Raises as ``generate``. A server's ``--max-logprobs`` limits k; vLLM's default is 20.

        Returns:
            The logprobs of the tokens, float32[t]; the likeliest tokens at each position, in
            descending order, int32[t, k]; and their logprobs, float32[t, k]. Entry 0 of each is 0.
        """
        if k < 1:
            raise ValueError(f"k is {k}, expected at least 1")
        read = functools.partial(responses.prompt_top_k, k=k)
        return await self._scored(token_ids, read, top_k=k)

    async def _scored(
        self,
        token_ids: Sequence[int],
        read: Callable[[responses.Response, np.ndarray], T],
        *,
        top_k: int = 0,
    ) -> T:
        tokens = as_int32(token_ids)
        await self._learn_context()
        self._check(tokens, 1)
        dispatcher = self._connected().dispatcher
        return await self._request(
            dispatcher.score(tokens, lambda answer: read(answer, tokens), top_k=top_k)
        )

    async def _request(self, request: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._connected().loop.submit(request))

    async def _learn_context(self) -> None:
        # `context_length` blocks: if it were read in a thread, a cancellation would leave that
        # thread blocked.
        if self._context_length is None:
            connection = await asyncio.to_thread(self._connected)
            found = connection.loop.submit(connection.fleet.context())
            self._context_length = await asyncio.wrap_future(found)

    def _check(self, tokens: np.ndarray, max_tokens: int) -> None:
        if not len(tokens):
            raise ValueError("the sequence of token ids is empty, expected at least one token")
        if tokens.min() < 0:
            raise ValueError(f"the prompt has the token id {tokens.min()}, expected at least 0")
        if len(tokens) + max_tokens > self.context_length:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and max_tokens={max_tokens} exceed the context "
                f"of {self.context_length} tokens"
            )

    # ---- weights ----

    def load_weights(
        self,
        update: Mapping[str, Any],
        *,
        version: PolicyVersion,
        timeout_s: float = 600.0,
        send: Callable[[], None] | None = None,
    ) -> dict[str, list[dict[str, Any]]]:
        """Load new weights into every server and return when all serve them; thread-safe.

        Servers fetch and verify ``update`` while they sample. Then each server pauses, loads the
        weights and resumes. A server that dies meanwhile is left out, unless it is the last one.

        Args:
            update: the transport's message to the servers' receivers, such as the weights' folder.
            version: the policy version of the weights.
            timeout_s: the timeout of the whole update.
            send: called in this thread while all servers wait to receive (NCCL).

        Returns:
            The receipts of each server's workers, by url.

        Raises:
            ValueError: ``version`` is older than the served version, or ``update`` is an adapter
                and this engine samples under none, or the reverse.
            RuntimeError: a server did not prepare the update (then no server was changed), or did
                not load it (then that server stays paused and unused until a later load succeeds).
        """
        if ("adapter" in update) != (self.adapter is not None):
            under = f"the adapter {self.adapter!r}" if self.adapter else "the servers' own weights"
            raise ValueError(
                f"this engine samples under {under}, and the update is of the other kind: publish "
                "adapters with weights.Adapter to VLLMEngine(..., adapter=NAME), merged weights "
                "with the other transports to an engine without an adapter"
            )
        connection = self._connected()
        self._refuse_older(version)
        meeting = None if send is None else SendBarrier()
        future = connection.loop.submit(
            connection.updates.load(update, version, timeout_s=timeout_s, meeting=meeting)
        )
        try:
            if send is not None and meeting is not None and meeting.wait(future):
                send()
            receipts: dict[str, list[dict[str, Any]]] = future.result()
        except BaseException:
            future.cancel()
            raise
        return receipts

    def adopt(self, version: PolicyVersion, *, timeout_s: float = 60.0) -> None:
        """Declare that the servers' current weights are the policy of ``version``.

        Use it for servers to which nothing was published: in an evaluation, or at step 0 of a run
        that starts from the checkpoint that the servers loaded.

        Raises:
            ValueError: ``version`` is older than the served version, or the engine samples under an
                adapter, which has to be published.
            RuntimeError: the version label could not be set on a server, or a server failed to load
                weights before.
        """
        if self.adapter is not None:
            raise ValueError(
                f"the adapter {self.adapter!r} can't be adopted: publish it with weights.Adapter"
            )
        connection = self._connected()
        self._refuse_older(version)
        connection.run(lambda _: connection.updates.adopt(version, timeout_s=timeout_s))

    def _refuse_older(self, version: PolicyVersion) -> None:
        if version < self.version:
            raise ValueError(
                f"version {version} is older than version {self.version}, which the servers serve"
            )

    def call(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
        max_bytes: int = 1 << 24,
    ) -> dict[str, Any]:
        """POST ``body`` to an endpoint of every live server; return ``{url: decoded response}``.

        Raises:
            RuntimeError: a server failed or refused the request, or its response exceeds
                ``max_bytes``.
        """
        return self._connected().run(
            lambda fleet: call_route(fleet, path, body, timeout_s=timeout_s, max_bytes=max_bytes)
        )

    def refuse_other_tokenizer(self, tokenizer: Any) -> None:
        """Check that all live servers decode the token ids to the same text as ``tokenizer``.

        Each server is asked for the text of all token ids, in one sequence. The token that ends a
        reply is not checked, because servers do not report it.

        Raises:
            ValueError: a server decodes the ids to another text.
            RuntimeError: a server failed, or does not decode (``skip_tokenizer_init``).
        """
        tokens = list(range(len(tokenizer)))
        text = tokenizer.decode(tokens)
        body = {"tokens": tokens}
        answers = self.call(DETOKENIZE, body, max_bytes=1 << 26)
        for url, answer in answers.items():
            if not isinstance(answer, dict) or answer.get("prompt") != text:
                raise ValueError(
                    f"{url} has another tokenizer: it decodes the token ids 0 to {len(tokens) - 1} "
                    "to another text; choose models with the same tokenizer"
                )

    def probe(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 8,
        temperatures: Sequence[float] | None = None,
        timeout_s: float = 600.0,
    ) -> dict[str, list[dict[str, np.ndarray]]]:
        """Score and continue fixed sequences on each server, for comparison with the trainer.

        Servers started by ``serve_vllm`` schedule probes before all waiting requests.

        Args:
            sequences: sequences of token ids, each of at least one token.
            max_new_tokens: the length of each continuation.
            temperatures: the sampling temperature of each continuation, with a fixed seed; all
                greedy (0) by default.
            timeout_s: the timeout of the whole probe.

        Returns:
            By url, one mapping per sequence: ``scores`` float32[t] (as returned by ``score``), and
            the continuation's ``token_ids`` int32[n] and ``logprobs`` float32[n], which are at the
            sampling temperature, or at temperature 1 for greedy continuations.

        Raises:
            ValueError: a sequence is empty or exceeds the context.
            RuntimeError: a server failed.
        """
        arrays = [as_int32(sequence) for sequence in sequences]
        for one in arrays:
            self._check(one, max_new_tokens)
        return self._connected().run(
            lambda fleet: probe(
                fleet,
                arrays,
                max_new_tokens=max_new_tokens,
                temperatures=[0.0] * len(arrays) if temperatures is None else temperatures,
                timeout_s=timeout_s,
            )
        )

    def read_weights(
        self, names: Sequence[str], *, turn: int = 0, timeout_s: float = 600.0
    ) -> dict[str, list[dict[str, Any]]]:
        """Read digests of the tensors that each server computes with; see ``weights.Canary``.

        Args:
            names: the names of the published tensors.
            turn: selects which columns of packed layers are read; increase it with each call.
            timeout_s: the timeout of the call.

        Returns:
            The readings of each server's workers, by url.

        Raises:
            RuntimeError: a server failed, or has no worker extension to read its
                tensors (``serve_vllm`` loads the extension).
        """
        body = {"method": READ_WEIGHTS, "kwargs": {"names": list(names), "turn": turn}}
        answers = self.call(COLLECTIVE_RPC, body, timeout_s=timeout_s)
        return {
            url: [reading for worker in answer["results"] for reading in worker]
            for url, answer in answers.items()
        }

    # ---- servers ----

    def servers(self) -> list[dict[str, Any]]:
        """Return each server's status.

        Each has ``url``, ``role``, ``alive`` and ``version``; ``serving``, whether requests are
        sent to the server; ``in_flight``, the number of its requests; ``ranks``, that of its
        data-parallel ranks; ``failures``, that of the requests that it failed or answered wrongly;
        and ``error``, why the server can't be reached or is avoided.
        """
        return self._connected().run(Fleet.report)

    def workers(self, *, timeout_s: float = 60.0) -> dict[str, int]:
        """Return the number of workers of each live server, by url.

        Raises:
            RuntimeError: a server failed, has no worker extension, or has several data-parallel
                ranks, of which vLLM reports only the first one's workers.
        """
        for server in self.servers():
            if server["ranks"] > 1:
                raise RuntimeError(
                    f"{server['url']} has {server['ranks']} data-parallel ranks, and vLLM does not "
                    "report the workers of all: publish to it with weights.Disk or SharedMemory"
                )
        answers = self.call(COLLECTIVE_RPC, {"method": WEIGHT_RECEIPT}, timeout_s=timeout_s)
        return {url: len(answer["results"]) for url, answer in answers.items()}

    def metrics(self, *, timeout_s: float = 60.0) -> dict[str, dict[str, float]]:
        """Read vLLM's counters and gauges, by url and name.

        Raises:
            RuntimeError: a server failed.
        """
        return self._connected().run(lambda f: read_metrics(f, totals, timeout_s=timeout_s))

    def rank_metrics(self, *, timeout_s: float = 60.0) -> dict[str, dict[int, dict[str, float]]]:
        """Read the counters and gauges of each data-parallel rank, by url, rank and name.

        Raises:
            RuntimeError: a server failed.
        """
        return self._connected().run(lambda f: read_metrics(f, by_rank, timeout_s=timeout_s))

    async def poll_metrics(self) -> dict[str, dict[int, dict[str, float]]]:
        """Read what ``engine_usage`` needs, by url, rank and name.

        Servers that are down or do not answer within 5 s are left out.
        """
        if (connection := self._connection) is None:
            connection = await asyncio.to_thread(self._connected)
        return await asyncio.wrap_future(connection.loop.submit(poll_metrics(connection.fleet)))

    def join(self, url: Any, *, role: Role = "decode") -> None:
        """Add a server in this engine and all its copies.

        Raises:
            ValueError: there is no such role, the server has another role already, or the engine
                was made without servers of this role.
        """
        if role not in ("decode", "prefill"):
            raise ValueError(f"role is {role!r}, expected 'decode' or 'prefill'")
        members = self._members if role == "decode" else self._prefill
        if members is None:
            raise ValueError(
                "the engine has no servers for prefill; make it with VLLMEngine(..., prefill=)"
            )
        others = self._prefill if role == "decode" else self._members
        if others is not None and url_of(url) in others.urls:
            raise ValueError(f"{url_of(url)} has another role already; let it leave first")
        with self._lock:
            members.write(dict.fromkeys([*members.urls, url_of(url)]))

    def leave(self, url: Any) -> None:
        """Remove a server in this engine and all its copies; its requests in flight may finish."""
        with self._lock:
            for members in self._lists():
                if url_of(url) in members.urls:
                    members.write(one for one in members.urls if one != url_of(url))

    def _lists(self) -> list[ServerUrls]:
        return [one for one in (self._members, self._prefill) if one is not None]

    # ---- life ----

    def close(self) -> None:
        """Cancel the requests in flight and disconnect; the servers keep running."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()
            for members in self._lists():
                members.close()

    def __enter__(self) -> "VLLMEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _connected(self) -> Connection:
        """Return this copy's connection, opened on first use."""
        if (connection := self._connection) is not None:
            return connection
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is closed; make another VLLMEngine")
            if self._connection is None:
                self._connection = Connection.open(
                    self._members,
                    self._settings,
                    version=self._known_version,
                    prefill=self._prefill,
                )
            return self._connection
