"""New weights for vLLM servers: the order of calls, for all of them at once."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from threading import Event
from typing import Any

import attrs
import msgspec
import numpy as np

from primerl.rollout import vllm_wire as wire
from primerl.rollout.replicas import Replica
from primerl.rollout.vllm_fleet import Fleet
from primerl.rollout.vllm_http import ServerFailed, Unreachable
from primerl.types import PolicyVersion, SamplingParams

ON_UPDATE = {
    "recompute": "mode=keep&clear_cache=true",
    "keep": "mode=keep&clear_cache=false",
    "drain": "mode=wait&clear_cache=true",
}
MARK_S = 10.0
SEED_S = 600.0
SEED_AGAIN_S = 5.0
UNSEEDED = "default"  # what vLLM calls the weights of its checkpoint

log = logging.getLogger(__name__)


@attrs.frozen
class Publication:
    """What a replica that returns is given; ``update`` is None for the servers' checkpoint."""

    version: PolicyVersion
    update: Mapping[str, Any] | None


class Rendezvous:
    """Where replicas wait until all are ready to receive, and a thread that will send."""

    def __init__(self, parties: int) -> None:
        self._missing = parties
        self._all = asyncio.Event()
        self.ready = Event()
        self.broken = False

    async def arrive(self) -> None:
        """Wait for the others; raises where one of them can't receive."""
        self._missing -= 1
        if not self._missing:
            self._open()
        await self._all.wait()
        if self.broken:
            raise ServerFailed("another replica could not get ready to receive the weights")

    def give_up(self) -> None:
        """One of the parties can't receive: nothing is sent."""
        self.broken = True
        self._open()

    def _open(self) -> None:
        self._all.set()
        self.ready.set()


class Updates:
    """Publishes to the servers of a fleet, and seeds those that return; on the fleet's loop."""

    def __init__(self, fleet: Fleet, *, on_update: str) -> None:
        self._fleet = fleet
        self._pause = ON_UPDATE[on_update]
        self._latest: Publication | None = None
        self._busy = asyncio.Lock()
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._marks: set[asyncio.Task[None]] = set()
        fleet.unseeded = self._seed_soon

    async def load(
        self,
        update: Mapping[str, Any],
        version: PolicyVersion,
        timeout_s: float,
        ready: Callable[[Rendezvous], None] | None,
    ) -> dict[str, list[dict[str, Any]]]:
        """Put ``update`` into all live replicas; see ``VLLMEngine.load_weights``."""
        deadline = time.monotonic() + timeout_s
        async with self._busy:
            await self._fleet.first_look()
            replicas = self._fleet.replicas.live()
            prepared = await self._each(
                replicas, lambda one: self._rpc(one, "prepare_weights", {"update": dict(update)}),
                deadline, f"version {version} was not prepared, and nothing is changed",
            )
            meeting = Rendezvous(len(prepared)) if ready is not None else None
            if ready is not None and meeting is not None:
                ready(meeting)
            self._latest = None  # until it is known that some replica takes it
            receipts: dict[Replica, list[dict[str, Any]]] = {}

            async def swap(replica: Replica) -> None:
                receipts[replica] = await self._swap(replica, update, version, meeting)
                if meeting is None:
                    self._latest = Publication(version, dict(update))

            await self._each(
                list(prepared), swap, deadline, f"version {version} was not loaded everywhere"
            )
            return {replica.url: receipt for replica, receipt in receipts.items()}

    async def adopt(self, version: PolicyVersion, timeout_s: float) -> None:
        """Call what the live replicas hold now ``version``."""
        async with self._busy:
            await self._fleet.first_look()
            replicas = self._fleet.replicas.live()
            fresh = all(one.label == UNSEEDED for one in replicas)
            await self._each(
                replicas, lambda one: self._name(one, version), time.monotonic() + timeout_s,
                f"version {version} was not adopted everywhere",
            )
            self._latest = Publication(version, None) if fresh else None

    async def call(self, path: str, body: bytes, timeout_s: float) -> dict[str, Any]:
        """The answers of all live replicas to a request, decoded."""
        await self._fleet.first_look()
        answers = await self._each(
            self._fleet.replicas.live(), lambda one: self._post(one, path, body),
            time.monotonic() + timeout_s, f"{path} failed",
        )
        return {replica.url: _decode(answer) for replica, answer in answers.items()}

    async def metrics(self, timeout_s: float) -> dict[str, dict[str, float]]:
        """The metrics of all live replicas."""
        await self._fleet.first_look()
        pages = await self._each(
            self._fleet.replicas.live(),
            lambda one: self._fleet.http.get(one.url, "/metrics"),
            time.monotonic() + timeout_s, "no metrics",
        )
        return {one.url: wire.read_metrics(page.decode()) for one, page in pages.items()}

    async def probe(
        self, sequences: Sequence[Sequence[int]], *, max_new_tokens: int, timeout_s: float
    ) -> dict[str, list[dict[str, np.ndarray]]]:
        """Each replica's scores of the sequences, and its greedy continuations."""
        await self._fleet.first_look()
        params = SamplingParams(max_tokens=max_new_tokens, temperature=0)

        async def one(replica: Replica, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
            # Two requests: vLLM scores without its prefix cache, and what serves uses it.
            salt = replica.label or ""
            scored, continued = await asyncio.gather(
                self._fleet.ask(replica, wire.score_body(token_ids)),
                self._fleet.ask(replica, wire.generate_body(token_ids, params, salt=salt)),
            )
            content = continued.choices[0].logprobs
            return {
                "scores": wire.prompt_scores(scored, token_ids),
                "token_ids": np.array(continued.choices[0].token_ids, dtype=np.int32),
                "logprobs": np.array(
                    [token.logprob for token in content.content] if content else [],
                    dtype=np.float32,
                ),
            }

        async def every(replica: Replica) -> list[dict[str, np.ndarray]]:
            return list(await asyncio.gather(*(one(replica, tokens) for tokens in sequences)))

        numbered = [one for one in self._fleet.replicas.live() if one.version is not None]
        answers = await self._each(
            numbered, every, time.monotonic() + timeout_s, "the probe failed"
        )
        return {replica.url: answer for replica, answer in answers.items()}

    # ---- one replica ----

    async def _swap(
        self,
        replica: Replica,
        update: Mapping[str, Any],
        version: PolicyVersion,
        meeting: Rendezvous | None,
    ) -> list[dict[str, Any]]:
        """Pause, load, resume; a replica in which this fails serves no more until a later load."""
        touched = False
        try:
            await self._post(replica, f"/pause?{self._pause}")
            touched = True
            await self._post(replica, "/start_weight_update")
            if meeting is not None:
                await meeting.arrive()
            await self._post(replica, "/update_weights", _encode({"update_info": dict(update)}))
            label = self._fleet.labels.name(version)
            await self._post(
                replica, "/finish_weight_update", _encode({"weight_version": label})
            )
            await self._post(replica, "/resume")
        except BaseException as error:
            if meeting is not None:
                meeting.give_up()
            if touched:
                self._mark_failed(replica)
            elif not isinstance(error, Unreachable):
                self._later(self._resume(replica))
            raise
        self._fleet.replicas.serves(replica, label, version)
        self._fleet.tell()
        return await self._rpc(replica, "weight_receipt", {})

    def _mark_failed(self, replica: Replica) -> None:
        """Nobody uses the replica: neither this copy of the engine nor, by its label, others."""
        if not replica.alive:
            return
        self._fleet.heard(replica, wire.Labels.FAILED)
        self._later(self._set_label(replica, wire.Labels.FAILED))

    def _later(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._marks.add(task)
        task.add_done_callback(self._marks.discard)

    async def _resume(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(MARK_S):
                await self._post(replica, "/resume")
        except (Unreachable, ServerFailed, RuntimeError, ValueError, TimeoutError) as error:
            log.error("%s could not be resumed: %s", replica.url, error)

    async def _set_label(self, replica: Replica, label: str) -> None:
        try:
            async with asyncio.timeout(MARK_S):
                await self._post(
                    replica, "/update_weight_version", _encode({"new_version": label})
                )
        except (Unreachable, ServerFailed, RuntimeError, ValueError, TimeoutError) as error:
            log.error("%s could not be told that it is %r: %s", replica.url, label, error)

    async def _name(self, replica: Replica, version: PolicyVersion) -> None:
        label = self._fleet.labels.name(version)
        await self._post(replica, "/update_weight_version", _encode({"new_version": label}))
        self._fleet.replicas.serves(replica, label, version)
        self._fleet.tell()

    # ---- replicas that return ----

    def _seed_soon(self, replica: Replica) -> None:
        """Give a replica that is up without weights the latest, unless that is under way."""
        failed = replica.label == wire.Labels.FAILED
        if self._latest is None or self._busy.locked() or failed or replica in self._tasks:
            return
        task = self._tasks[replica] = asyncio.create_task(self._seed(replica))
        task.add_done_callback(lambda _: self._tasks.pop(replica, None))

    async def _seed(self, replica: Replica) -> None:
        async with self._busy:
            latest = self._latest
            if latest is None or replica.version is not None or not replica.alive:
                return
            try:
                async with asyncio.timeout(SEED_S):
                    if latest.update is None:
                        await self._name(replica, latest.version)
                    else:
                        update = {"update": dict(latest.update)}
                        await self._rpc(replica, "prepare_weights", update)
                        await self._swap(replica, latest.update, latest.version, None)
            except (Unreachable, ServerFailed, RuntimeError, ValueError, TimeoutError) as error:
                log.error("%s could not be seeded: %s", replica.url, error or "it took too long")
            else:
                log.info("%s was seeded with version %d", replica.url, latest.version)
                return
        await asyncio.sleep(SEED_AGAIN_S)

    # ---- requests ----

    async def _each(
        self,
        replicas: Sequence[Replica],
        call: Callable[[Replica], Awaitable[Any]],
        deadline: float,
        what: str,
    ) -> dict[Replica, Any]:
        """Call for all replicas at once; those that die are left out while others remain.

        Raises:
            RuntimeError: a call failed otherwise, or all replicas are gone.
        """

        async def bounded(replica: Replica) -> Any:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await call(replica)

        results = await asyncio.gather(*map(bounded, replicas), return_exceptions=True)
        answers: dict[Replica, Any] = {}
        failures = []
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, Unreachable):
                self._fleet.lost(replica, str(result))
            elif isinstance(result, TimeoutError):
                failures.append(f"{replica.url} did not answer in time")
            elif isinstance(result, Exception):
                failures.append(str(result) or type(result).__name__)
            elif isinstance(result, BaseException):
                raise result
            else:
                answers[replica] = result
        if failures:
            raise RuntimeError(f"{what}: {'; '.join(failures)}")
        if not answers:
            raise RuntimeError(f"{what}: {self._fleet.replicas.describe()}")
        return answers

    async def _post(self, replica: Replica, path: str, body: bytes = b"") -> bytes:
        return await self._fleet.http.post(replica.url, path, body)

    async def _rpc(
        self, replica: Replica, method: str, arguments: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """The results of a method of the worker extension, one for each worker."""
        body = _encode({"method": method, "kwargs": arguments})
        answer = _decode(await self._post(replica, "/collective_rpc", body))
        results = answer.get("results") if isinstance(answer, dict) else None
        return results if isinstance(results, list) else []


def _encode(value: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(value)


def _decode(content: bytes) -> Any:
    try:
        return msgspec.json.decode(content) if content else None
    except msgspec.DecodeError as error:
        raise RuntimeError(f"a server answered what is no JSON: {content[:200]!r}") from error
