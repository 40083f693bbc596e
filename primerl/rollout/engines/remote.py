"""An engine that lives in another process, reached over a channel.

An engine in the trainer's process (``TransformersEngine`` shares its memory) stays there; the
worker's process, and those of environments, hold a ``RemoteEngine``. An engine that is itself a
client of a server elsewhere has ``portable = True`` and crosses as a copy.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from primerl.rollout.engines.contract import newest_version
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.errors import summary
from primerl.rollout.processes.channel import Channel
from primerl.types import Completion, PolicyVersion, SamplingParams

POLL_S = 0.01  # how soon a newly served version is told to the other process

log = logging.getLogger(__name__)


@attrs.frozen
class EngineAddress:
    """What a child needs to reach an engine of its parent."""

    index: int
    version: PolicyVersion
    context_length: int
    vocab_size: int | None = None
    name: str = "engine"


@attrs.frozen
class Answer:
    """A completion, and what its engine serves by the time that it is there."""

    completion: Completion
    version: PolicyVersion
    newest_version: PolicyVersion


class EngineHost:
    """Serves engines of this process to child processes: the ``generate`` handler of a channel."""

    def __init__(self) -> None:
        self._engines: dict[int, Engine] = {}
        self._indices = itertools.count()

    def address(self, engine: Engine) -> EngineAddress:
        """Where a child finds ``engine``, which is served from now on."""
        known = [index for index, one in self._engines.items() if one is engine]
        index = known[0] if known else next(self._indices)
        self._engines[index] = engine
        return _address(index, engine)

    @contextlib.contextmanager
    def lease(self, engine: Engine) -> Iterator[EngineAddress]:
        """Serve ``engine`` while the body runs."""
        index = next(self._indices)
        self._engines[index] = engine
        try:
            yield _address(index, engine)
        finally:
            del self._engines[index]

    async def generate(
        self,
        index: int,
        prompt_ids: np.ndarray,
        params: SamplingParams,
        session: str | None,
    ) -> Answer:
        """Sample with an engine of this process, for another one."""
        engine = self._engines[index]
        completion = await engine.generate(prompt_ids.tolist(), params, session=session)
        return Answer(completion, engine.version, newest_version(engine))

    async def report_versions(self, notify: Callable[..., Any]) -> None:
        """Tell the versions that engines serve, whenever one changes; runs until cancelled.

        An engine that can't say its version is logged, once for each error, and asked again.
        """
        told: dict[int, PolicyVersion] = {}
        failures: dict[int, str] = {}
        while True:
            for index, engine in list(self._engines.items()):
                try:
                    version = int(engine.version)
                except Exception as error:  # whatever a stranger's property raises
                    if failures.get(index) != summary(error):
                        failures[index] = summary(error)
                        log.error("the engine can't say its version: %s", summary(error))
                    continue
                failures.pop(index, None)
                if told.get(index) != version:
                    told[index] = version
                    notify("serves", index, version)
            await asyncio.sleep(POLL_S)


def _address(index: int, engine: Engine) -> EngineAddress:
    vocab_size = getattr(engine, "vocab_size", None)
    name = type(engine).__name__
    return EngineAddress(index, engine.version, engine.context_length, vocab_size, name)


class RemoteEngine:
    """An ``Engine`` whose weights and requests are in the parent process.

    ``version`` is the latest that the parent's engine has told, by itself or beside a completion;
    what a completion says of itself is not believed before it was checked.
    """

    def __init__(self, channel: Channel, address: EngineAddress) -> None:
        self.version: PolicyVersion = address.version
        self.newest_version: PolicyVersion = address.version
        self.context_length = address.context_length
        self.vocab_size = address.vocab_size
        self._index = address.index
        self._channel = channel

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """Sample one completion in the parent process; what the engine raises is raised."""
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        answer: Answer = await self._channel.call("generate", self._index, prompt, params, session)
        self.version = max(self.version, answer.version)
        self.newest_version = max(self.newest_version, answer.newest_version)
        return answer.completion


class RemoteEngines:
    """The engines that a child knows, by their address or as the copies that crossed."""

    def __init__(self, channel: Channel | None) -> None:
        self._channel = channel
        self._known: dict[int, RemoteEngine] = {}

    def find(self, where: "EngineAddress | Engine") -> Engine:
        """The engine at an address; an engine that crossed is returned as it is."""
        if not isinstance(where, EngineAddress):
            return where
        if where.index not in self._known:
            assert self._channel is not None, "an address comes over a channel"
            self._known[where.index] = RemoteEngine(self._channel, where)
        self.serves(where.index, where.version)
        return self._known[where.index]

    def serves(self, index: int, version: PolicyVersion) -> None:
        """Take note of a version that is served now."""
        if index in self._known:  # news of an update may overtake each other
            self._known[index].version = max(version, self._known[index].version)

    def forget(self, where: "EngineAddress | Engine | None") -> None:
        """This engine is not asked any more: its parent stops serving it, or it is a copy."""
        if isinstance(where, EngineAddress):
            self._known.pop(where.index, None)
        elif where is not None and self._channel is not None and hasattr(where, "close"):
            where.close()


def portable(engine: Engine) -> bool:
    """Whether a copy of ``engine`` in another process serves as well as the original."""
    return bool(getattr(engine, "portable", False))
