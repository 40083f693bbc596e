"""The connection of one copy of an engine to its servers, and its settings."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import attrs

from primerl.rollout.engines.vllm.client.dispatcher import Dispatcher
from primerl.rollout.engines.vllm.client.fleet import Fleet
from primerl.rollout.engines.vllm.client.members import Members
from primerl.rollout.engines.vllm.client.updates import ON_UPDATE, Updates
from primerl.rollout.engines.vllm.protocol.labels import Labels
from primerl.rollout.errors import summary
from primerl.rollout.processes.background_loop import BackgroundLoop
from primerl.types import PolicyVersion

FIRST_LOOK_S = 2.0  # how long a new connection waits for the servers' versions

T = TypeVar("T")
log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Settings:
    """How an engine talks to its servers: the arguments of ``VLLMEngine`` of these names."""

    api_key: str | None
    on_update: str
    request_timeout_s: float
    down_timeout_s: float
    retries: int
    routes_folder: Path | None
    vocab_size: int | None

    def __attrs_post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.isprintable():
            raise ValueError("the api_key has characters that an HTTP header can't hold")
        if self.on_update not in ON_UPDATE:
            raise ValueError(
                f"on_update={self.on_update!r}; expected one of {', '.join(ON_UPDATE)}"
            )
        if self.retries < 0:
            raise ValueError(f"retries is {self.retries}, expected at least 0")
        for name in ("request_timeout_s", "down_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a positive time")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"vocab_size is {self.vocab_size}, expected at least 1")


@attrs.frozen
class Connection:
    """What talks to the servers, on an event loop in a thread of its own."""

    loop: BackgroundLoop
    fleet: Fleet
    dispatcher: Dispatcher
    updates: Updates

    @classmethod
    def open(
        cls, members: Members, labels: Labels, settings: Settings, *, version: PolicyVersion
    ) -> "Connection":
        """Connect to the servers, and watch them until ``close``."""
        loop = BackgroundLoop("primerl-vllm")

        async def build() -> Connection:
            fleet = Fleet(
                members,
                labels,
                api_key=settings.api_key,
                version=version,
                down_timeout_s=settings.down_timeout_s,
            )
            dispatcher = Dispatcher(
                fleet,
                keeps_prefixes=settings.on_update == "keep",
                retries=settings.retries,
                routes_folder=settings.routes_folder,
                vocab_size=settings.vocab_size,
            )
            return cls(loop, fleet, dispatcher, Updates(fleet, on_update=settings.on_update))

        connection: Connection = loop.submit(build()).result()
        loop.submit(connection.fleet.watch()).add_done_callback(_log_end_of_watch)
        with contextlib.suppress(TimeoutError):
            loop.submit(connection.fleet.poll_all()).result(FIRST_LOOK_S)
        return connection

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the connection's event loop."""
        result: T = self.loop.submit(coroutine).result()
        return result

    async def run_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The same for a caller on another event loop."""
        result: T = await asyncio.wrap_future(self.loop.submit(coroutine))
        return result

    def close(self) -> None:
        """Cancel the requests in flight and stop watching the servers."""
        self.loop.stop()


def _log_end_of_watch(watch: "Future[None]") -> None:
    if not watch.cancelled() and (error := watch.exception()) is not None:
        log.error("the servers are no longer watched: %s", summary(error))
