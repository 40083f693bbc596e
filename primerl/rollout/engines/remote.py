"""Use of a process's engines from its child processes, over a channel.

An engine in the trainer's process stays there: ``TransformersEngine`` shares that process's memory.
The worker's process, and the processes of environments, hold a ``RemoteEngine``. An engine that is
itself a client of a server elsewhere is ``portable``: the worker's process holds a copy of it.

A child learns the version of any engine in one way: the parent calls the child's handler ``serves``
when the version has changed, and before each message that may depend on it (a call of the trainer,
a completion). A channel preserves the order of messages.
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
from primerl.rollout.engines.token_sequence import TokenSequence, as_int32
from primerl.rollout.errors import summary
from primerl.rollout.processes.channel import Channel
from primerl.types import Completion, PolicyVersion, SamplingParams

POLL_S = 0.01  # the delay within which a newly served version is reported to the child

log = logging.getLogger(__name__)


class RemoteEngine:
    """An ``Engine`` whose weights and requests are in the parent process.

    ``version`` is the latest version that the parent has reported; completions are checked against
    it. ``routes`` is a copy of the engine's store of expert routes.
    """

    def __init__(self, index: int, engine: Engine) -> None:
        self.version: PolicyVersion = engine.version
        self.newest_version: PolicyVersion = newest_version(engine)
        self.context_length = engine.context_length
        self.vocab_size: int | None = getattr(engine, "vocab_size", None)
        self.routes: RouteStore | None = getattr(engine, "routes", None)
        self.reports_metrics = hasattr(engine, "metrics")
        self.channel: Channel | None = None
        self._index = index

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """Sample one completion in the parent process; raise what the engine raises there."""
        assert self.channel is not None, "RemoteEngines.find connects it"
        prompt = as_int32(prompt_ids)
        completion: Completion = await self.channel.call(
            "generate", self._index, prompt, params, session
        )
        return completion

    async def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of the engine in the parent process, or raise its error."""
        assert self.channel is not None, "RemoteEngines.find connects it"
        metrics: dict[str, dict[str, float]] = await self.channel.call("metrics", self._index)
        return metrics


@attrs.frozen
class EngineAddress:
    """An address of the parent's engine, as sent to a child, with a ``RemoteEngine`` or a copy."""

    index: int
    name: str
    engine: Engine


@attrs.define(eq=False)
class _Served:
    """An engine, with the versions last reported to its child."""

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
    """Serves engines of this process to child processes, through handlers of a channel."""

    def __init__(self) -> None:
        self._served: dict[int, _Served] = {}
        self._indices = itertools.count()

    def add(
        self, engine: Engine, notify: Callable[..., Any], *, portable: bool = False
    ) -> EngineAddress:
        """Serve ``engine`` from now on; return its address for a child.

        Args:
            engine: an engine of this process.
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
        """Serve ``engine``, as ``add`` does, while the body of the ``with`` statement runs."""
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
        """Sample with an engine of this process, on behalf of a child."""
        served = self._served[index]
        prompt = TokenSequence(prompt_ids)
        completion = await served.engine.generate(prompt, params, session=session)
        served.report()
        return completion

    async def metrics(self, index: int) -> Any:
        """Return the metrics of an engine of this process, on behalf of a child."""
        engine: Any = self._served[index].engine
        return await asyncio.to_thread(engine.metrics)

    def report(self) -> None:
        """Report to each child the versions that its engines serve, if they have changed.

        If an engine can't report its version, that is logged once for each distinct error, and the
        engine is asked again later.
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
        """Report versions until cancelled."""
        while True:
            self.report()
            await asyncio.sleep(POLL_S)


class RemoteEngines:
    """The engines that a child uses, found by address; its own engines are passed through."""

    def __init__(self, channel: Channel | None) -> None:
        self._channel = channel
        self._known: dict[int, Engine] = {}

    def find(self, where: EngineAddress | Engine) -> Engine:
        """Return the engine at an address; return an engine of this process as it is."""
        if not isinstance(where, EngineAddress):
            return where
        if isinstance(where.engine, RemoteEngine):
            where.engine.channel = self._channel
        return self._known.setdefault(where.index, where.engine)

    def serves(self, index: int, version: PolicyVersion, newest: PolicyVersion) -> None:
        """Record the oldest and newest version that an engine's servers serve."""
        engine = self._known.get(index)
        if isinstance(engine, RemoteEngine):
            engine.version = version
            engine.newest_version = newest
        elif engine is not None and hasattr(engine, "learn"):
            engine.learn(version)

    def forget(self, where: EngineAddress | Engine | None) -> None:
        """Forget an engine that the parent no longer serves; close it if it is a copy."""
        if isinstance(where, EngineAddress):
            engine = self._known.pop(where.index, None)
            if engine is not None and hasattr(engine, "close"):
                engine.close()


def is_portable(engine: Engine) -> bool:
    """Return whether a copy of ``engine`` in another process can replace the original."""
    return bool(getattr(engine, "portable", False))
