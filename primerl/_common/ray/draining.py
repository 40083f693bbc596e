"""Nodes of a Ray cluster that are to leave it, so that work can leave them first."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping

from primerl._common.optional import require
from primerl._common.ray import cluster

POLL_S = 1.0

_log = logging.getLogger(__name__)


async def nodes() -> AsyncIterator[Mapping[str, float]]:
    """Yield, again and again, the ids of the nodes that are to leave, with their seconds left.

    The same node is yielded until it is gone. Cancel the task that iterates to end this.
    """
    ray = require("ray", extra="ray")
    while True:
        asking = asyncio.ensure_future(asyncio.to_thread(cluster.draining))
        try:
            found = await asyncio.shield(asking)
            if found:
                yield found
        except (RuntimeError, ray.exceptions.RayError) as error:  # the head may be restarting
            _log.warning("the nodes that are to leave are not known: %s", error)
        except asyncio.CancelledError:
            await asyncio.wait([asking])  # Ray must not be shut down meanwhile
            raise
        await asyncio.sleep(POLL_S)
