"""Ray actors that run code of this process on other hosts of the cluster."""

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from primerl._common.optional import require
from primerl._common.processes.launch import search_path
from primerl._common.ray import cluster, host_actor
from primerl._common.ray.host_actor import HostActor
from primerl._common.ray.versions import differences, versions

_lock = threading.Lock()  # of the list of modules that are pickled by value


class NoRoom(RuntimeError):
    """No host has room for another process now; one may join later."""


class ActorLost(RuntimeError):
    """An actor has ended, or can't be reached; the message says how."""


async def start(
    kind: type[HostActor], *, resources: Mapping[str, float], timeout_s: float
) -> tuple[Any, str, str]:
    """Start an actor on some host; return its handle, the host's name and its node's id.

    Args:
        kind: the class of the actor, whose module is pickled.
        resources: what the actor takes of its node.
        timeout_s: how long a node with room for the actor is waited for.

    Raises:
        NoRoom: no node had room for the actor in time.
        ActorLost: the actor was lost before it answered.
        RuntimeError: the actor failed, or its host has other versions.
    """
    handle = _create(kind, resources)
    try:
        with errors():
            async with asyncio.timeout(timeout_s):
                host, node, theirs = await handle.open.remote(search_path())
        if different := differences(theirs, versions()):
            raise RuntimeError(
                f"the host {host} has {different}; install the same versions on every host"
            )
    except TimeoutError:
        end(handle)
        raise NoRoom(
            f"no node of the Ray cluster had room for an actor with {dict(resources)} within "
            f"{timeout_s:g} s; its nodes: {cluster.offered()}; start one with "
            "`ray start --resources`"
        ) from None
    except BaseException:
        end(handle)
        raise
    return handle, host, node


def end(handle: Any) -> None:
    """End an actor, without waiting."""
    ray = require("ray", extra="ray")
    if ray.is_initialized():
        ray.kill(handle)


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Raise Ray's errors as ``ActorLost``, or as ``RuntimeError`` if an actor's method failed."""
    ray = require("ray", extra="ray")
    try:
        yield
    except ray.exceptions.RayActorError as error:  # its node was lost, for example
        raise ActorLost(f"a Ray actor was lost: {reason(error)}") from error
    except ray.exceptions.RayError as error:
        raise RuntimeError(f"a Ray actor failed: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return the sentences of Ray's long message that say what happened."""
    lines = [line for line in str(error).splitlines() if line and not line[0].isspace()]
    return " ".join(lines).partition(" Some common causes")[0] or type(error).__name__


def _create(kind: type[HostActor], resources: Mapping[str, float]) -> Any:
    ray = require("ray", extra="ray")
    made = ray.remote(kind).options(
        num_cpus=resources.get("CPU", 0),
        resources={name: amount for name, amount in resources.items() if name != "CPU"},
        scheduling_strategy="SPREAD",
        max_concurrency=1000,
    )
    by_value = (host_actor, sys.modules[kind.__module__])
    with _lock:
        for module in by_value:
            ray.cloudpickle.register_pickle_by_value(module)
        try:
            return made.remote()
        finally:
            for module in by_value:
                ray.cloudpickle.unregister_pickle_by_value(module)
