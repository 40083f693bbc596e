"""A client of vLLM servers."""

import asyncio
import contextlib
import os
import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as NotInTime
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs
import msgspec
import numpy as np

from primerl.rollout.background_loop import BackgroundLoop
from primerl.rollout.members import Members, tidy
from primerl.rollout.vllm_fleet import Fleet
from primerl.rollout.vllm_updates import ON_UPDATE, Rendezvous, Updates
from primerl.rollout.vllm_wire import LEAST_TEMPERATURE, Labels
from primerl.types import Completion, PolicyVersion, SamplingParams

LOOK_S = 2.0  # in which servers are let say what they serve when an engine is first used


@attrs.frozen
class _Parts:
    """What talks to the servers."""

    loop: BackgroundLoop
    fleet: Fleet
    updates: Updates


class VLLMEngine:
    """Samples from vLLM servers (``rollout.serve_vllm``), one or many, that hold the same policy.

        with rollout.serve_vllm(model) as server:
            engine = rollout.VLLMEngine(server)
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
    ) -> None:
        if on_update not in ON_UPDATE:
            raise ValueError(f"on_update={on_update!r}; expected one of {', '.join(ON_UPDATE)}")
        for name, value, least in (("retries", retries, 0), ("version", version, 0)):
            if value < least:
                raise ValueError(f"{name} is {value}, expected at least {least}")
        for name, seconds in (
            ("request_timeout_s", request_timeout_s),
            ("down_timeout_s", down_timeout_s),
        ):
            if not seconds > 0:
                raise ValueError(f"{name} is {seconds}, expected a positive time")
        servers = [urls] if hasattr(urls, "url") else urls
        if not isinstance(servers, str | os.PathLike):
            keys = {one.api_key for one in servers if hasattr(one, "api_key")} - {None}
            if len(keys) > 1:
                raise ValueError("the servers have several keys; give them one: serve_vllm(api_key=)")
            api_key = api_key if api_key is not None else next(iter(keys), None)
            servers = [one.url if hasattr(one, "url") else one for one in servers]
        self._members = Members(servers)
        self._labels = Labels(run or secrets.token_hex(4))
        self._api_key = api_key if api_key is not None else os.environ.get("PRIMERL_API_KEY")
        if self._api_key is not None and not (self._api_key.isascii() and self._api_key.isprintable()):
            raise ValueError("the api_key has characters that a header can't hold")
        self._on_update = on_update
        self._request_timeout_s = request_timeout_s
        self._down_timeout_s = down_timeout_s
        self._retries = retries
        self._routes_folder = None if routes_folder is None else Path(routes_folder).absolute()
        if self._routes_folder is not None:
            self._routes_folder.mkdir(parents=True, exist_ok=True)
        self._told = version
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
        """The version of the slowest replica that serves."""
        return max(self._told, self._running().fleet.version)

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

    # ---- requests ----

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """Sample one completion; cancelling the awaiting task ends the request on its server."""
        prompt = [int(token) for token in prompt_ids]
        if self._context_length is None:
            await asyncio.to_thread(lambda: self.context_length)
        self._check(prompt, params.max_tokens)
        if 0 < params.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature={params.temperature}: vLLM samples with {LEAST_TEMPERATURE} where "
                "less is asked for; use 0 (greedy), or at least that"
            )
        completion: Completion = await self._request(
            lambda fleet: fleet.generate(prompt, params, session)
        )
        return completion

    async def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """The logprob of each token given those before it, at temperature 1.

        Returns:
            float32[t]; entry 0 is 0.
        """
        tokens = [int(token) for token in token_ids]
        if self._context_length is None:
            await asyncio.to_thread(lambda: self.context_length)
        self._check(tokens, 1)
        scores: np.ndarray = await self._request(lambda fleet: fleet.score(tokens))
        return scores

    async def _request(self, coroutine: Callable[[Fleet], Any]) -> Any:
        parts = self._running()
        try:
            async with asyncio.timeout(self._request_timeout_s):
                return await asyncio.wrap_future(parts.loop.submit(coroutine(parts.fleet)))
        except TimeoutError:
            raise RuntimeError(
                f"a request took longer than {self._request_timeout_s:g} s: "
                f"{parts.fleet.replicas.describe()}"
            ) from None

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
        """Serve new weights in every live replica; returns when all do."""
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
        """Declare that what the servers hold now is the policy of ``version``."""
        parts = self._running()
        if version < self.version:
            raise ValueError(f"version {version} is older than {self.version}, which is served")
        parts.loop.submit(parts.updates.adopt(version, timeout_s)).result()

    def call(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 60.0
    ) -> dict[str, Any]:
        """POST ``body`` to a route of every live replica: ``{url: answer}``."""
        parts = self._running()
        content = b"" if body is None else msgspec.json.encode(body)
        coroutine = parts.updates.call(path, content, timeout_s)
        answers: dict[str, Any] = parts.loop.submit(coroutine).result()
        return answers

    def probe(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 8,
        timeout_s: float = 60.0,
    ) -> dict[str, list[dict[str, np.ndarray]]]:
        """What each replica makes of fixed sequences, to be compared with the trainer's."""
        tokens = [[int(token) for token in sequence] for sequence in sequences]
        for one in tokens:
            self._check(one, max_new_tokens)
        parts = self._running()
        answers: dict[str, list[dict[str, np.ndarray]]] = parts.loop.submit(
            parts.updates.probe(tokens, max_new_tokens=max_new_tokens, timeout_s=timeout_s)
        ).result()
        return answers

    # ---- replicas ----

    def replicas(self) -> list[dict[str, Any]]:
        """Each replica: ``url``, ``alive``, ``serving``, ``version``, ``in_flight``, ``error``."""
        parts = self._running()
        rows: list[dict[str, Any]] = parts.loop.submit(parts.fleet.report()).result()
        return rows

    def metrics(self, *, timeout_s: float = 60.0) -> dict[str, dict[str, float]]:
        """vLLM's metrics, by replica and name."""
        parts = self._running()
        coroutine = parts.updates.metrics(timeout_s)
        values: dict[str, dict[str, float]] = parts.loop.submit(coroutine).result()
        return values

    def join(self, url: Any) -> None:
        """Add a server, for all copies of this engine."""
        with self._lock:
            new = tidy(url.url if hasattr(url, "url") else url)
            self._members.write(dict.fromkeys([*self._members.urls, new]))

    def leave(self, url: Any) -> None:
        """Give a server no more requests, from any copy of this engine; those it has may end."""
        with self._lock:
            old = tidy(url.url if hasattr(url, "url") else url)
            self._members.write(one for one in self._members.urls if one != old)

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

        async def build() -> tuple[Fleet, Updates]:
            fleet = Fleet(
                self._members,
                self._labels,
                api_key=self._api_key,
                keeps=self._on_update == "keep",
                version=self._told,
                retries=self._retries,
                down_timeout_s=self._down_timeout_s,
                routes_folder=self._routes_folder,
            )
            return fleet, Updates(fleet, on_update=self._on_update)

        fleet, updates = loop.submit(build()).result()
        loop.submit(fleet.run())
        with contextlib.suppress(NotInTime):
            loop.submit(fleet.first_look()).result(LOOK_S)
        return _Parts(loop, fleet, updates)
