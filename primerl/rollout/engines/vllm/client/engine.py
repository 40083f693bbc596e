"""A client of vLLM servers."""

import asyncio
import contextlib
import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs
import msgspec
import numpy as np

from primerl._vllm_names import COLLECTIVE_RPC, READ_WEIGHTS, SERVED_DTYPE
from primerl.rollout.engines.vllm.client.calls import agreed, call_route, probe, read_metrics
from primerl.rollout.engines.vllm.client.fleet import Fleet
from primerl.rollout.engines.vllm.client.members import Members, tidy
from primerl.rollout.engines.vllm.client.requests import Requests
from primerl.rollout.engines.vllm.client.updates import ON_UPDATE, Rendezvous, Updates
from primerl.rollout.engines.vllm.protocol.bodies import LEAST_TEMPERATURE
from primerl.rollout.engines.vllm.protocol.labels import Labels
from primerl.rollout.errors import summary
from primerl.rollout.processes.background_loop import BackgroundLoop
from primerl.types import Completion, PolicyVersion, SamplingParams

log = logging.getLogger(__name__)

LOOK_S = 2.0  # in which servers are let say what they serve when an engine is first used


@attrs.frozen
class _Parts:
    """What talks to the servers."""

    loop: BackgroundLoop
    fleet: Fleet
    requests: Requests
    updates: Updates


class VLLMEngine:
    """Samples from vLLM servers, one or many, that hold the same policy.

        with rollout.serve_vllm(model) as server, rollout.VLLMEngine(server) as engine:
            weights.Disk(policy, engine, folder=folder).publish(0)
            completion = await engine.generate(prompt_ids, SamplingParams(max_tokens=64))

    A server serves once it holds weights of this run: those that a transport published
    (``load_weights``), or its own checkpoint by ``adopt``. Requests of a session go to one server,
    where their cache is, unless it is far busier than another; others go where there is least to
    do. A server that dies is routed around, and its requests are sent to another. One that returns
    is given the latest weights by the engine that published them, before it serves.

    The engine is ``portable``: the worker's process holds a copy, which asks the servers itself.
    Each copy talks to them from a thread of its own, so ``generate`` may be awaited on any loop.

    Args:
        urls: of the servers (``"http://host:port"``), ``VLLMServer`` objects, one or several; or
            the path of a file with one url a line, which all copies read again when it changes.
        api_key: of the servers; those of ``VLLMServer`` objects are known, and else it is
            ``PRIMERL_API_KEY`` of the environment.
        on_update: what new weights do to requests in flight: ``"recompute"`` (their cache is
            computed again, so that each token is exactly its version's), ``"keep"`` (it stays) or
            ``"drain"`` (they end under the old weights, while new ones wait).
        version: reported until weights were published.
        run: names this run's weights on the servers; drawn at random by default.
        request_timeout_s: how long a request may take, with all its retries.
        down_timeout_s: how long requests wait while no server serves. Before the first weights
            were published they wait longer: as long as a request may take.
        retries: how often a request is sent again that a server failed.
        routes_folder: where expert routes are written that servers return; without one, answers
            have no room for the routes of long sequences.
        vocab_size: the number of token ids; by default what the servers say, or unknown where they
            don't. A completion with an id beyond it is a ``BadCompletion``.

    Raises:
        ValueError: an argument is out of range, or a url is none.
    """

    portable = True

    def __init__(
        self,
        urls: Any,
        *,
        api_key: str | None = None,
        on_update: str = "recompute",
        version: PolicyVersion = 0,
        run: str | None = None,
        request_timeout_s: float = 600.0,
        down_timeout_s: float = 60.0,
        retries: int = 3,
        routes_folder: str | os.PathLike[str] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        if on_update not in ON_UPDATE:
            raise ValueError(f"on_update={on_update!r}; expected one of {', '.join(ON_UPDATE)}")
        numbers = {"retries": retries, "version": version}
        for name, value in numbers.items():
            if value < 0:
                raise ValueError(f"{name} is {value}, expected at least 0")
        seconds = {"request_timeout_s": request_timeout_s, "down_timeout_s": down_timeout_s}
        for name, time_s in seconds.items():
            if not time_s > 0:
                raise ValueError(f"{name} is {time_s}, expected a positive time")
        self._members, known_key = _members(urls)
        self._labels = Labels(secrets.token_hex(4) if run is None else run)
        self._api_key = api_key or known_key or os.environ.get("PRIMERL_API_KEY")
        if self._api_key is not None and not self._api_key.isprintable():
            raise ValueError("the api_key has characters that a header can't hold")
        self._on_update = on_update
        self._request_timeout_s = request_timeout_s
        self._down_timeout_s = down_timeout_s
        self._retries = retries
        self._routes_folder = None if routes_folder is None else Path(routes_folder).absolute()
        if self._routes_folder is not None:
            self._routes_folder.mkdir(parents=True, exist_ok=True)
        if vocab_size is not None and vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size}, expected at least 1")
        self._told = version
        self._vocab_size = vocab_size
        self._context_length: int | None = None
        self._parts: _Parts | None = None
        self._closed = False
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        # What is known crosses; connections, the thread and what was published last do not.
        state = {**self.__dict__, "_told": self.version, "_parts": None}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    # ---- what is served ----

    @property
    def version(self) -> PolicyVersion:
        """The version of the slowest server in use; known within 0.2 s of a change."""
        return max(self._told, self._running().fleet.version)

    @property
    def newest_version(self) -> PolicyVersion:
        """The newest version that a server is known to serve; others may be behind it."""
        return max(self.version, self._running().fleet.newest_version)

    @property
    def vocab_size(self) -> int | None:
        """The number of token ids; None where it was not given and no server has said it yet."""
        return self._vocab_size if self._parts is None else self._parts.requests.vocab_size

    def learn(self, version: PolicyVersion) -> None:
        """Another copy of this engine saw ``version`` served by every replica in use."""
        self._told = max(self._told, version)
        parts = self._running()
        parts.loop.call_soon(parts.fleet.learn, version)

    @property
    def context_length(self) -> int:
        """The most tokens of one request, as the servers say.

        Raises:
            RuntimeError: none could be reached.
        """
        if self._context_length is None:
            parts = self._running()
            self._context_length = parts.loop.submit(parts.fleet.context()).result()
        return self._context_length

    @property
    def dtype(self) -> str:
        """The dtype that the servers compute in, such as ``"bfloat16"``.

        Raises:
            RuntimeError: none could be reached, or they differ.
        """
        parts = self._running()
        return str(parts.loop.submit(agreed(parts.fleet, SERVED_DTYPE, 60.0)).result())

    # ---- requests ----

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """Sample one completion; cancelling the awaiting task ends the request on its server.

        Nothing but ``params.stop_token_ids`` ends a completion early. Each logprob is of the
        distribution that was sampled, and each version of the weights that sampled its token.

        Raises:
            BadCompletion: a server's answer breaks the contract of engines. It is not asked for
                again: what is wrong once is to be seen.
            ValueError: the prompt is empty or exceeds the context with ``max_tokens``, or vLLM
                refuses the request.
            RuntimeError: no server served for ``down_timeout_s``, the retries were used up, or
                it took longer than ``request_timeout_s``.
        """
        prompt = [int(token) for token in prompt_ids]
        await self._learn_context()
        self._check(prompt, params.max_tokens)
        if 0 < params.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature={params.temperature}: vLLM samples with {LEAST_TEMPERATURE} where "
                "less is asked for; use 0 (greedy), or at least that"
            )
        completion: Completion = await self._request(
            lambda parts: parts.requests.generate(prompt, params, session)
        )
        return completion

    async def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """The logprob of each token given those before it; raises as ``generate``.

        Returns:
            float32[t], at temperature 1; entry 0 is 0.
        """
        tokens = [int(token) for token in token_ids]
        await self._learn_context()
        self._check(tokens, 1)
        scores: np.ndarray = await self._request(lambda parts: parts.requests.score(tokens))
        return scores

    async def _request(self, coroutine: Callable[[_Parts], Any]) -> Any:
        parts = self._running()
        try:
            async with asyncio.timeout(self._request_timeout_s):
                return await asyncio.wrap_future(parts.loop.submit(coroutine(parts)))
        except TimeoutError:
            raise RuntimeError(
                f"a request took longer than {self._request_timeout_s:g} s: "
                f"{parts.fleet.replicas.describe()}"
            ) from None

    async def _learn_context(self) -> None:
        # In no thread of the loop's: one that waits for a server would outlive a cancelled task.
        if self._context_length is None:
            parts = await asyncio.to_thread(self._running)
            future = parts.loop.submit(parts.fleet.context())
            self._context_length = await asyncio.wrap_future(future)

    def _check(self, tokens: list[int], most: int) -> None:
        if not tokens:
            raise ValueError("the prompt is empty; a completion needs at least one token before it")
        if min(tokens) < 0:
            raise ValueError(f"the prompt has the token {min(tokens)}; expected numbers from 0 on")
        if len(tokens) + most > self.context_length:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and max_tokens={most} exceed the context of "
                f"{self.context_length} tokens"
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
        """Serve new weights in every server; returns when all do. Any thread may call it.

        Servers fetch and check ``update`` while they serve; then each pauses, loads and goes on.
        One that dies meanwhile is left out as long as another is left.

        Args:
            update: what the transport tells the servers' receiver, such as where the weights are.
            version: the policy version that they are.
            timeout_s: for all of it.
            send: called in this thread while all servers wait to receive (NCCL).

        Returns:
            The receipt of each worker, by url.

        Raises:
            ValueError: ``version`` is older than what is served.
            RuntimeError: a server did not prepare it (then none has changed anything), or did not
                load it (then that one stays paused and is not used until a later load succeeds).
        """
        parts = self._running()
        if version < self.version:
            raise ValueError(f"version {version} is older than {self.version}, which is served")
        meetings: queue.Queue[Rendezvous | None] = queue.Queue()
        future = parts.loop.submit(
            parts.updates.load(update, version, timeout_s, None if send is None else meetings.put)
        )
        try:
            if send is not None:
                future.add_done_callback(lambda _: meetings.put(None))
                meeting = meetings.get()
                if meeting is not None and meeting.ready.wait(timeout_s) and not meeting.broken:
                    send()
            receipts: dict[str, list[dict[str, Any]]] = future.result()
        except BaseException:
            future.cancel()
            raise
        return receipts

    def adopt(self, version: PolicyVersion, *, timeout_s: float = 60.0) -> None:
        """Declare that what the servers hold now is the policy of ``version``.

        For a checkpoint that nothing was published to: an evaluation, or step 0 of a run that
        starts from the folder that the servers loaded.

        Raises:
            ValueError: ``version`` is older than what is served.
            RuntimeError: a server did not take it, or one failed to load weights before.
        """
        parts = self._running()
        if version < self.version:
            raise ValueError(f"version {version} is older than {self.version}, which is served")
        parts.loop.submit(parts.updates.adopt(version, timeout_s)).result()

    def call(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
        max_bytes: int = 1 << 24,
    ) -> dict[str, Any]:
        """POST ``body`` to a route of every live server: ``{url: answer}``.

        Raises:
            RuntimeError: one failed, or answered more than ``max_bytes``.
            ValueError: one refused it.
        """
        parts = self._running()
        content = b"" if body is None else msgspec.json.encode(body)
        coroutine = call_route(parts.fleet, path, content, timeout_s, max_bytes=max_bytes)
        answers: dict[str, Any] = parts.loop.submit(coroutine).result()
        return answers

    def probe(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 8,
        temperatures: Sequence[float] | None = None,
        timeout_s: float = 600.0,
    ) -> dict[str, list[dict[str, np.ndarray]]]:
        """What each server makes of fixed sequences, to be compared with the trainer's own.

        They go before all requests that wait in a server (``serve_vllm``: by their priority).

        Args:
            sequences: token ids, at least one each.
            max_new_tokens: that each is continued by.
            temperatures: at which the continuation of each is sampled, with a fixed seed; 0 is
                greedy, which all are by default.
            timeout_s: for all of it.

        Returns:
            By url, for each sequence: ``scores`` float32[t] (as ``score``), and the continuation:
            ``token_ids`` int32[n], ``logprobs`` float32[n] (at its temperature; where that is 0, at
            1).

        Raises:
            ValueError: a sequence is empty or exceeds the context.
            RuntimeError: a server failed.
        """
        tokens = [[int(token) for token in sequence] for sequence in sequences]
        for one in tokens:
            self._check(one, max_new_tokens)
        parts = self._running()
        answers: dict[str, list[dict[str, np.ndarray]]] = parts.loop.submit(
            probe(
                parts.fleet,
                tokens,
                max_new_tokens=max_new_tokens,
                temperatures=[0.0] * len(tokens) if temperatures is None else temperatures,
                timeout_s=timeout_s,
            )
        ).result()
        return answers

    def read_weights(
        self, names: Sequence[str], *, turn: int = 0, timeout_s: float = 600.0
    ) -> dict[str, list[dict[str, Any]]]:
        """Digests of the tensors that each server computes with; see ``weights.readback``.

        Args:
            names: of the published tensors.
            turn: which columns are read of layers that vLLM has packed.
            timeout_s: for all of it.

        Returns:
            By url, the readings of all its workers.

        Raises:
            RuntimeError, ValueError: a server failed, or was not started by ``serve_vllm`` and
                can't read its tensors back.
        """
        body = {"method": READ_WEIGHTS, "kwargs": {"names": list(names), "turn": turn}}
        answers = self.call(COLLECTIVE_RPC, body, timeout_s=timeout_s)
        return {
            url: [reading for worker in answer["results"] for reading in worker]
            for url, answer in answers.items()
        }

    # ---- replicas ----

    def replicas(self) -> list[dict[str, Any]]:
        """Each server: ``url``, ``alive``, ``serving``, ``version``, ``in_flight``, ``error``."""
        parts = self._running()
        rows: list[dict[str, Any]] = parts.loop.submit(parts.fleet.report()).result()
        return rows

    def metrics(self, *, timeout_s: float = 60.0) -> dict[str, dict[str, float]]:
        """Counters and gauges of vLLM, by server and name.

        Raises:
            RuntimeError: a server failed.
        """
        parts = self._running()
        coroutine = read_metrics(parts.fleet, timeout_s)
        values: dict[str, dict[str, float]] = parts.loop.submit(coroutine).result()
        return values

    def join(self, url: Any) -> None:
        """Add a server, for all copies of this engine."""
        with self._lock:
            self._members.write(dict.fromkeys([*self._members.urls, _url(url)]))

    def leave(self, url: Any) -> None:
        """Give a server no more requests, from any copy of this engine; those it has may end."""
        with self._lock:
            self._members.write(one for one in self._members.urls if one != _url(url))

    # ---- life ----

    def close(self) -> None:
        """End the requests in flight and stop watching the servers, which go on."""
        with self._lock:
            self._closed = True
            parts, self._parts = self._parts, None
            if parts is not None:
                parts.loop.stop()
            self._members.close()

    def __enter__(self) -> "VLLMEngine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _running(self) -> _Parts:
        """What talks to the servers, from the first use on; each copy has its own thread."""
        if (parts := self._parts) is not None:
            return parts
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine was closed")
            if self._parts is None:
                self._parts = self._start()
            return self._parts

    def _start(self) -> _Parts:
        loop = BackgroundLoop("primerl-vllm")

        async def build() -> _Parts:
            fleet = Fleet(
                self._members,
                self._labels,
                api_key=self._api_key,
                version=self._told,
                down_timeout_s=self._down_timeout_s,
            )
            requests = Requests(
                fleet,
                keeps=self._on_update == "keep",
                retries=self._retries,
                routes_folder=self._routes_folder,
                vocab_size=self._vocab_size,
            )
            return _Parts(loop, fleet, requests, Updates(fleet, on_update=self._on_update))

        parts: _Parts = loop.submit(build()).result()
        loop.submit(parts.fleet.run()).add_done_callback(_report)
        with contextlib.suppress(NotInTime):
            loop.submit(parts.fleet.first_look()).result(LOOK_S)
        return parts


def _report(watch: "Future[None]") -> None:
    """Say that the watch over the servers has ended, unless it was cancelled."""
    if not watch.cancelled() and (error := watch.exception()) is not None:
        log.error("the servers are not watched any more: %s", summary(error))


def _members(urls: Any) -> tuple[Members, str | None]:
    """The urls, and the key that goes with servers that were given in place of urls."""
    servers = [urls] if hasattr(urls, "url") else urls
    if isinstance(servers, str | os.PathLike):
        return Members(servers), None
    keys = {one.api_key for one in servers if hasattr(one, "api_key")} - {None}
    if len(keys) > 1:
        raise ValueError("the servers have several keys; give them one: serve_vllm(..., api_key=)")
    return Members([_url(one) for one in servers]), next(iter(keys), None)


def _url(server: Any) -> str:
    return tidy(server.url if hasattr(server, "url") else server)
