"""Calls of a portable engine that a child process samples itself, with leave of its parent.

Prompts and tokens travel between the child and the engine's servers. Each call is asked for, and
its outcome reported, through the parent: there it is recorded, waits during an outage, and is
counted like any other call.

    child: record(call) ──► parent ──► child: sample(call) ──► server
"""

import itertools
import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs

from primerl.rollout.engines.contract import EngineLimits, newest_version
from primerl.rollout.engines.observed import CallRecord
from primerl.rollout.engines.protocol import Engine, RouteStore
from primerl.rollout.processes.channel import Channel
from primerl.types import Completion, PolicyVersion, SamplingParams


@attrs.frozen
class DirectAddress:
    """The address of an engine of the parent, for a child that samples with a copy."""

    index: int
    copy: int
    """The number of the copy, which the child's rollouts share."""
    pickled: bytes
    """The engine, from which a child that has no copy makes one."""


@attrs.define(eq=False)
class _DirectCall:
    """A call that waits for the parent's leave, or is being sampled."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    completion: Completion | None = None


class DirectEngine:
    """An engine in a child process for one rollout, whose calls the parent records."""

    def __init__(self, channel: Channel, index: int, engine: Engine) -> None:
        self._channel = channel
        self._index = index
        self._engine = engine
        self._numbers = itertools.count()
        self._calls: dict[int, _DirectCall] = {}

    @property
    def version(self) -> PolicyVersion:
        """The version that the engine serves."""
        return self._engine.version

    @property
    def newest_version(self) -> PolicyVersion:
        """The newest version that any of the engine's servers serves."""
        return newest_version(self._engine)

    @property
    def context_length(self) -> int:
        """The engine's context length, in tokens."""
        return self._engine.context_length

    @property
    def vocab_size(self) -> int | None:
        """The number of token ids; None if it is unknown."""
        return getattr(self._engine, "vocab_size", None)

    @property
    def routes(self) -> RouteStore | None:
        """The engine's store of expert routes; None if they are not recorded."""
        return getattr(self._engine, "routes", None)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """Sample one completion from here; the parent waits during outages, and raises errors."""
        number = next(self._numbers)
        call = self._calls[number] = _DirectCall(prompt_ids, params)
        try:
            await self._channel.call("record", self._index, number, session)
        finally:
            del self._calls[number]
        assert call.completion is not None, "the parent returns once the call is sampled"
        return call.completion

    async def sample(self, number: int, session: str | None, version: PolicyVersion) -> CallRecord:
        """Sample a call that the parent has admitted; ``version`` is the one it saw served."""
        call = self._calls[number]
        if hasattr(self._engine, "learn"):
            self._engine.learn(version)
        served = self._engine.version
        completion = await self._engine.generate(call.prompt_ids, call.params, session=session)
        call.completion = completion
        limits = EngineLimits.of(self._engine, oldest=served)
        found = CallRecord.of(completion, len(call.prompt_ids), call.params, limits)
        return attrs.evolve(found, completion=None)


class DirectEngines:
    """The engines with which a child samples itself; the rollouts of a child share its copies."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._engines: dict[int, DirectEngine] = {}
        self._copies: dict[int, Engine] = {}
        self._users: Counter[int] = Counter()

    def find(self, where: DirectAddress) -> DirectEngine:
        """Return the engine of one rollout."""
        if where.copy not in self._copies:
            self._copies[where.copy] = pickle.loads(where.pickled)
        copy = self._copies[where.copy]
        self._users[where.copy] += 1
        engine = self._engines[where.index] = DirectEngine(self._channel, where.index, copy)
        return engine

    def forget(self, where: DirectAddress) -> None:
        """Forget the engine of a rollout that has ended; close a copy that no rollout uses."""
        del self._engines[where.index]
        self._users[where.copy] -= 1
        if not self._users[where.copy]:
            copy: Any = self._copies.pop(where.copy)
            if hasattr(copy, "close"):
                copy.close()

    async def sample(
        self, index: int, number: int, session: str | None, version: PolicyVersion
    ) -> CallRecord:
        """Sample a call of a rollout's engine, as ``DirectEngine.sample`` does."""
        return await self._engines[index].sample(number, session, version)
