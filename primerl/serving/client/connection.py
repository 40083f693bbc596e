"""The connection between one copy of an engine and its servers."""

import contextlib
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import attrs

from primerl.rollout.errors import summary
from primerl.rollout.processes.background_loop import BackgroundLoop
from primerl.serving.client.adapters import AdapterUpdates
from primerl.serving.client.dispatcher import Dispatcher
from primerl.serving.client.fleet import Fleet
from primerl.serving.client.server_urls import ServerUrls
from primerl.serving.client.settings import ConnectionSettings
from primerl.serving.client.updates import Updates
from primerl.types import PolicyVersion

FIRST_LOOK_S = 2.0  # how long a new connection waits for the servers' versions

T = TypeVar("T")
log = logging.getLogger(__name__)


@attrs.frozen
class Connection:
    """The objects that communicate with the servers, on an event loop in a dedicated thread."""

    loop: BackgroundLoop
    fleet: Fleet
    dispatcher: Dispatcher
    updates: Updates

    @classmethod
    def open(
        cls,
        members: ServerUrls,
        settings: ConnectionSettings,
        *,
        version: PolicyVersion,
        prefill: ServerUrls | None = None,
    ) -> "Connection":
        """Connect to the servers, and poll them until ``close``."""
        loop = BackgroundLoop("primerl-vllm")

        async def build() -> Connection:
            fleet = Fleet(members, settings, version=version, prefill=prefill)
            adapter = settings.labels.adapter
            updates = Updates(fleet) if adapter is None else AdapterUpdates(fleet)
            return cls(loop, fleet, Dispatcher(fleet), updates)

        connection: Connection = loop.submit(build()).result()
        loop.submit(connection.fleet.watch()).add_done_callback(_log_end_of_watch)
        with contextlib.suppress(TimeoutError):
            loop.submit(connection.fleet.poll_all()).result(FIRST_LOOK_S)
        return connection

    def run(self, ask: Callable[[Fleet], Coroutine[Any, Any, T]]) -> T:
        """Run ``ask(fleet)`` on the connection's event loop and return its result."""
        result: T = self.loop.submit(ask(self.fleet)).result()
        return result

    def close(self) -> None:
        """Cancel the requests in flight and stop polling the servers."""
        self.loop.stop()


def _log_end_of_watch(watch: "Future[None]") -> None:
    if not watch.cancelled() and (error := watch.exception()) is not None:
        log.error("the vLLM servers are no longer polled: %s", summary(error))
