"""An engine's side of its servers: watches them, and takes requests to those that serve."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np

from primerl.rollout import vllm_wire as wire
from primerl.rollout.members import Members
from primerl.rollout.replicas import Replica, Replicas
from primerl.rollout.vllm_http import Http, ServerFailed, Unreachable
from primerl.types import Completion, PolicyVersion, SamplingParams

POLL_S = 0.15  # how soon a newly served version is known where no request is in flight
SILENT_S = 30.0  # a server that does not even say that it is healthy for this long is lost
FIRST_BACKOFF_S = 0.1
MOST_BACKOFF_S = 5.0
GENERATE = "/inference/v1/generate"

T = TypeVar("T")
log = logging.getLogger(__name__)


class _Again(Exception):
    """The request is to be sent again; ``free``: it never began, so this is no attempt."""

    def __init__(self, reason: str, *, free: bool = False, wait: bool = True) -> None:
        super().__init__(reason)
        self.free = free
        self.wait = wait


class Fleet:
    """The servers of one copy of an engine; all of it lives on one event loop."""

    def __init__(
        self,
        members: Members,
        labels: wire.Labels,
        *,
        api_key: str | None,
        keeps: bool,
        version: PolicyVersion,
        retries: int,
        down_timeout_s: float,
        routes_folder: Path | None,
    ) -> None:
        self.replicas = Replicas(members.urls, version=version)
        self.labels = labels
        self.version = version
        """Of the slowest replica that serves; read from other threads."""
        self.context_length: int | None = None
        self.unseeded: Callable[[Replica], None] | None = None
        """Called where a replica is up without weights of this run."""
        self._members = members
        self._keeps = keeps
        self._retries = retries
        self._down_timeout_s = down_timeout_s
        self._routes_folder = routes_folder
        self._changed = asyncio.Event()
        self._scopes: dict[Replica, set[asyncio.Timeout]] = {}
        self._watchers: dict[Replica, asyncio.Task[None]] = {}
        self.http = Http(api_key)

    async def run(self) -> None:
        """Watch the servers until cancelled."""
        try:
            while True:
                self._follow()
                await asyncio.sleep(POLL_S)
        finally:
            for task in self._watchers.values():
                task.cancel()
            self.http.close()

    async def first_look(self) -> None:
        """Ask every server once what it serves."""
        await asyncio.gather(*(self.look(replica) for replica in self.replicas))

    # ---- watching ----

    def _follow(self) -> None:
        """Watch those who joined, and no longer those who left."""
        try:
            if self._members.changed():
                urls = self._members.urls
                for url in urls:
                    self.replicas.join(url)
                for replica in self.replicas:
                    if replica.url not in urls:
                        self.replicas.leave(replica.url)
                        log.info("%s left", replica.url)
        except ValueError as error:
            log.error("the replicas stay as they were: %s", error)
        present = set(self.replicas)
        for replica in present - set(self._watchers):
            self._watchers[replica] = asyncio.create_task(self._watch(replica))
        for replica in set(self._watchers) - present:
            self._watchers.pop(replica).cancel()
        self.tell()

    async def _watch(self, replica: Replica) -> None:
        while True:
            await self.look(replica)
            await asyncio.sleep(POLL_S)

    async def look(self, replica: Replica) -> None:
        """Ask a server what it serves."""
        try:
            label = await self._label(replica)
            if self.context_length is None:
                await self._read_context(replica)
        except (Unreachable, wire.Refused, ServerFailed, RuntimeError, TimeoutError) as error:
            self.lost(replica, str(error) or f"no answer for {SILENT_S:.0f} s")
            if isinstance(error, TimeoutError):
                self._withdraw(replica)
            return
        self.heard(replica, label)
        if replica.version is None and self.unseeded is not None:
            self.unseeded(replica)

    def heard(self, replica: Replica, label: str | None) -> None:
        """A server calls its weights ``label``."""
        if self.replicas.heard(replica, label, self.labels.number(label)):
            self._withdraw(replica)
        self.tell()

    async def _label(self, replica: Replica) -> str | None:
        # Answered between two steps of the engine, so not while weights are loaded: that server
        # is healthy, and serves what it served.
        try:
            async with asyncio.timeout(SILENT_S):
                content = await self.http.get(replica.url, "/weight_info")
        except TimeoutError:
            async with asyncio.timeout(SILENT_S):
                await self.http.get(replica.url, "/health")
            return replica.label
        try:
            return wire.weight_infos.decode(content).weight_version
        except ValueError as error:
            raise RuntimeError(f"{replica.url} is no vLLM server: {error}") from error

    async def _read_context(self, replica: Replica) -> None:
        async with asyncio.timeout(SILENT_S):
            content = await self.http.get(replica.url, "/v1/models")
        try:
            lengths = [card.max_model_len for card in wire.model_cards.decode(content).data]
        except ValueError as error:
            raise RuntimeError(f"{replica.url} is no vLLM server: {error}") from error
        self.context_length = min([one for one in lengths if one], default=None)

    def lost(self, replica: Replica, error: str) -> None:
        """A server can't be reached."""
        if replica.alive:
            log.warning("%s is lost: %s", replica.url, error)
        self.replicas.lost(replica, error)
        self.tell()

    def _withdraw(self, replica: Replica) -> None:
        """Send what a replica has in flight to another one."""
        for scope in self._scopes.get(replica, ()):
            scope.reschedule(0)

    def tell(self) -> None:
        """Something is known that was not: wake who waits for a replica."""
        self.version = self.replicas.version
        self._changed.set()
        self._changed = asyncio.Event()

    def learn(self, version: PolicyVersion) -> None:
        """Another copy saw ``version`` served by every replica in use."""
        self.replicas.learn(version)
        self.tell()

    async def context(self) -> int:
        """The context length, as soon as a server says it.

        Raises:
            RuntimeError: none did for ``down_timeout_s``.
        """
        await self._wait(lambda: self.context_length, "no server has said its context length")
        assert self.context_length is not None
        return self.context_length

    async def report(self) -> list[dict[str, Any]]:
        """Each replica, as it is known."""
        serving = self.replicas.serving()
        return [
            {
                "url": one.url,
                "alive": one.alive,
                "serving": one in serving,
                "version": one.version,
                "in_flight": one.in_flight,
                "error": one.error,
            }
            for one in self.replicas
        ]

    # ---- requests ----

    async def generate(
        self, prompt: list[int], params: SamplingParams, session: str | None
    ) -> Completion:
        """One completion, from whichever replica serves."""

        def ask(replica: Replica) -> bytes:
            # The salt names the weights that the replica had when it was last asked: prefixes
            # that other weights computed are never used.
            return wire.generate_body(prompt, params, salt=replica.label or "")

        async def read(answer: wire.Answer, replica: Replica, label: str | None) -> Completion:
            choice = answer.choices[0]
            versions = self._versions(choice, replica, label)
            if choice.finish_reason not in ("stop", "length"):
                raise _Again(f"{replica.url} ended a request by {choice.finish_reason!r}")
            return wire.make_completion(choice, versions, await self._store_routes(choice))

        return await self._dispatch(session, ask, read)

    async def score(self, token_ids: list[int]) -> np.ndarray:
        """The logprobs of a sequence, from whichever replica serves."""

        async def read(answer: wire.Answer, replica: Replica, label: str | None) -> np.ndarray:
            return wire.prompt_scores(answer, token_ids)

        body = wire.score_body(token_ids)
        return await self._dispatch(None, lambda replica: body, read)

    async def ask(self, replica: Replica, body: bytes) -> wire.Answer:
        """The answer of one replica."""
        content = await self.http.post(replica.url, GENERATE, body)
        return wire.read_answer(content, replica.url)

    async def serving(self, session: str | None, avoid: set[str]) -> Replica:
        """The replica for a request, as soon as one serves.

        Raises:
            RuntimeError: none did for ``down_timeout_s``.
        """
        found: Replica = await self._wait(
            lambda: self.replicas.choose(session, avoid=avoid), "no replica has served"
        )
        return found

    async def _wait(self, look: Callable[[], T | None], what: str) -> T:
        deadline = time.monotonic() + self._down_timeout_s
        while (found := look()) is None:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                raise RuntimeError(
                    f"{what} for {self._down_timeout_s:g} s: {self.replicas.describe()}"
                ) from None
        return found

    async def _dispatch(
        self, session: str | None, ask: Callable[[Replica], bytes], read: Callable[..., Any]
    ) -> Any:
        """Send a request until it is answered, to another replica each time if there is one."""
        avoid: set[str] = set()
        failures: list[str] = []
        while True:
            replica = await self.serving(session, avoid)
            label = replica.label
            try:
                answer = await self._attempt(replica, ask(replica))
                return await read(answer, replica, label)
            except _Again as again:
                avoid.add(replica.url)
                if again.free:
                    continue
                failures.append(str(again))
                if len(failures) > self._retries:
                    raise RuntimeError(
                        f"a request failed {len(failures)} times: {'; '.join(failures)}"
                    ) from again
                if again.wait:
                    backoff = FIRST_BACKOFF_S * 2 ** (len(failures) - 1)
                    await asyncio.sleep(min(backoff, MOST_BACKOFF_S))

    async def _attempt(self, replica: Replica, body: bytes) -> wire.Answer:
        scopes = self._scopes.setdefault(replica, set())
        replica.in_flight += 1
        try:
            async with asyncio.timeout(None) as scope:
                scopes.add(scope)
                return await self.ask(replica, body)
        except Unreachable as error:
            self.lost(replica, str(error))
            raise _Again(str(error), free=not error.sent, wait=False) from error
        except ServerFailed as error:
            raise _Again(str(error)) from error
        except TimeoutError as error:
            raise _Again(f"{replica.url} was lost with the request", wait=False) from error
        finally:
            replica.in_flight -= 1
            scopes.discard(scope)

    def _versions(
        self, choice: wire.Choice, replica: Replica, label: str | None
    ) -> Sequence[PolicyVersion]:
        """The version of each token; raises ``_Again`` where the completion can't be used."""
        try:
            known = wire.span_versions(choice, self.labels)
        except ValueError as error:
            raise RuntimeError(f"{replica.url} answered wrong weight_versions: {error}") from error
        versions = [one for one in known if one is not None]
        if len(versions) < len(known):
            raise _Again(f"{replica.url} sampled with weights that are not this run's")
        if versions:
            if replica.alive:
                last = versions[-1]
                self.replicas.serves(replica, self.labels.name(last), last)
                self.tell()
            if self._keeps and versions[0] != self.labels.number(label):
                # Its prompt may have met a prefix in the cache that older weights computed.
                raise _Again(f"{replica.url} was updated before it began a request", wait=False)
        return versions

    async def _store_routes(self, choice: wire.Choice) -> str | None:
        content = wire.routed_experts(choice) if self._routes_folder is not None else None
        if content is None or self._routes_folder is None:
            return None
        path = self._routes_folder / f"{uuid4().hex}.npy"
        await asyncio.to_thread(path.write_bytes, content)
        return f"file:{path}"
