"""Engines of one process, used from a child process over a channel.

An engine in the trainer's process (``TransformersEngine`` shares its memory) stays there; the
worker's process, and those of environments, hold a ``RemoteEngine``. An engine that is itself a
client of a server elsewhere is ``portable``: the worker's process holds a copy of it.

A child learns the version of any engine in one way: the parent calls its handler ``serves`` when
the version has changed, and before each message that may depend on it (a call of the trainer, a
completion). A channel preserves the order of messages.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from primerl.rollout.engines.contract import newest_version
from primerl.rollout.engines.protocol import Engine, RouteStore
from primerl.rollout.errors import summary
from primerl.rollout.processes.channel import Channel
from primerl.types import Completion, PolicyVersion, SamplingParams

POLL_S = 0.01  # how soon a newly served version is reported to the other process

log = logging.getLogger(__name__)


class RemoteEngine:
    """An ``Engine`` whose weights and requests are in the parent process.

    ``version`` is the latest that the parent has reported; a completion is checked against it.
    ``routes`` is a copy of the engine's store of expert routes.
    """

    def __init__(self, index: int, engine: Engine) -> None:
        self.version: PolicyVersion = engine.version
        self.newest_version: PolicyVersion = newest_version(engine)
        self.context_length = engine.context_length
        self.vocab_size: int | None = getattr(engine, "vocab_size", None)
        self.routes: RouteStore | None = getattr(engine, "routes", None)
        self.channel: Channel | None = None
        self._index = index

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """Sample one completion in the parent process; what the engine raises is raised."""
        assert self.channel is not None, "RemoteEngines.find connects it"
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        completion: Completion = await self.channel.call(
            "generate", self._index, prompt, params, session
        )
        return completion

    async def metrics(self) -> dict[str, dict[str, float]]:
        """Those of the engine in the parent process; what it raises is raised."""
        assert self.channel is not None, "RemoteEngines.find connects it"
        metrics: dict[str, dict[str, float]] = await self.channel.call("metrics", self._index)
        return metrics


@attrs.frozen
class EngineAddress:
    """An engine of the parent, as it is sent to a child: a ``RemoteEngine``, or a copy."""

    index: int
    name: str
    engine: Engine


@attrs.define(eq=False)
class _Served:
    """An engine, and the versions last reported to its child."""

    engine: Engine
    notify: Callable[[PolicyVersion, PolicyVersion], None]
    reported: tuple[PolicyVersion, PolicyVersion] | None = None
    failure: str = ""

    def report(self) -> None:
        versions = int(self.engine.version), newest_version(self.engine)
        if versions != self.reported:
            self.reported = versions
            self.notify(*versions)


class EngineHost:
    """Serves engines of this process to child processes: handlers of a channel."""

    def __init__(self) -> None:
        self._served: dict[int, _Served] = {}
        self._indices = itertools.count()

    def add(
        self, engine: Engine, notify: Callable[..., Any], *, portable: bool = False
    ) -> EngineAddress:
        """Serve ``engine`` from now on; returns its address for a child.

        Args:
            engine: of this process.
            notify: calls a handler of the child without waiting for it.
            portable: whether the child gets a copy.
        """
        index = next(self._indices)
        crossing: Engine = engine if portable else RemoteEngine(index, engine)
        self._served[index] = _Served(engine, functools.partial(notify, "serves", index))
        return EngineAddress(index, type(engine).__name__, crossing)

    @contextlib.contextmanager
    def lease(
        self, engine: Engine, notify: Callable[..., Any], *, portable: bool = False
    ) -> Iterator[EngineAddress]:
        """Serve ``engine``, as ``add`` does, while the body runs."""
        address = self.add(engine, notify, portable=portable)
        try:
            yield address
        finally:
            del self._served[address.index]

    async def generate(
        self,
        index: int,
        prompt_ids: np.ndarray,
        params: SamplingParams,
        session: str | None,
    ) -> Completion:
        """Sample with an engine of this process, for another one."""
        served = self._served[index]
        completion = await served.engine.generate(prompt_ids.tolist(), params, session=session)
        served.report()
        return completion

    async def metrics(self, index: int) -> Any:
        """The metrics of an engine of this process, for another one."""
        engine: Any = self._served[index].engine
        return await asyncio.to_thread(engine.metrics)

    def report(self) -> None:
        """Tell each child the versions that its engines serve, where they have changed.

        An engine that can't report its version is logged, once for each error, and asked again.
        """
        for served in list(self._served.values()):
            try:
                served.report()
                served.failure = ""
            except Exception as error:  # a user's property may raise anything
                if served.failure != summary(error):
                    served.failure = summary(error)
                    log.error("the engine can't report its version: %s", summary(error))

    async def keep_reporting(self) -> None:
        """Report until cancelled."""
        while True:
            self.report()
            await asyncio.sleep(POLL_S)


class RemoteEngines:
    """The engines that a child knows, by their address or as objects of its own process."""

    def __init__(self, channel: Channel | None) -> None:
        self._channel = channel
        self._known: dict[int, Engine] = {}

    def find(self, where: EngineAddress | Engine) -> Engine:
        """The engine at an address; an engine of this process is returned as it is."""
        if not isinstance(where, EngineAddress):
            return where
        if isinstance(where.engine, RemoteEngine):
            where.engine.channel = self._channel
        return self._known.setdefault(where.index, where.engine)

    def serves(self, index: int, version: PolicyVersion, newest: PolicyVersion) -> None:
        """The parent reports what an engine serves: the slowest of its replicas, and the newest."""
        engine = self._known.get(index)
        if isinstance(engine, RemoteEngine):
            engine.version = version
            engine.newest_version = newest
        elif engine is not None and hasattr(engine, "learn"):
            engine.learn(version)

    def forget(self, where: EngineAddress | Engine | None) -> None:
        """The parent stops serving an engine; a copy of it is closed."""
        if isinstance(where, EngineAddress):
            engine = self._known.pop(where.index, None)
            if engine is not None and hasattr(engine, "close"):
                engine.close()


def is_portable(engine: Engine) -> bool:
    """Whether a copy of ``engine`` in another process serves as well as the original."""
    return bool(getattr(engine, "portable", False))
