"""Updates of an adapter on all vLLM servers of a fleet."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from primerl.serving import names
from primerl.serving.client.calls import rpc
from primerl.serving.client.http import NotFound
from primerl.serving.client.replicas import Replica
from primerl.serving.client.updates import Rendezvous, Updates
from primerl.types import PolicyVersion


class AdapterUpdates(Updates):
    """Loads each version of an adapter under a name of its own, beside the version before it.

    Nothing pauses. Requests in flight end with the version that they began with, new ones name the
    new one, so all tokens of a completion are of one version. (vLLM's ``load_inplace`` would read
    the adapter's files again at every step of the engine, for as long as requests name it.)
    """

    accepts_early = False  # until it was compared, a server reports what it may unload again

    async def _prepare(self, replica: Replica, update: Mapping[str, Any]) -> None:
        """Check that the server can load the adapter."""
        states = await rpc(self._fleet, replica, names.PREPARE_ADAPTER)
        most = min((one["most_rank"] for one in states), default=0)
        if most < update["rank"]:
            why = f"up to rank {most}" if most else "no adapters"
            raise ValueError(
                f"{replica.url} takes {why}, and this one has rank {update['rank']}: start it by "
                f"serve_vllm(..., enable_lora=True, max_lora_rank={max(8, update['rank'])})"
            )

    async def _swap(
        self,
        replica: Replica,
        update: Mapping[str, Any],
        version: PolicyVersion,
        meeting: Rendezvous | None,
    ) -> list[dict[str, Any]]:
        """Load the new version, compare what arrived, and unload the old one.

        A server to which something else arrived keeps the old version.
        """
        assert meeting is None, "adapters are read from a folder, not sent"
        label = self._fleet.labels.name(version)
        states = await rpc(self._fleet, replica, names.PREPARE_ADAPTER)
        await self._unload(replica, label)  # of a version that is published again
        started = time.perf_counter()
        body = {"lora_name": label, "lora_path": update["adapter"]}
        try:
            await self._fleet.http.post(replica.url, names.LOAD_ADAPTER, body)
        except NotFound as error:
            raise RuntimeError(
                f"{replica.url} can't load {update['adapter']}: it sees no such folder, or was "
                f"started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 ({error})"
            ) from error
        seconds = {"load": time.perf_counter() - started}
        arrived = False
        try:
            receipts = await rpc(
                self._fleet,
                replica,
                names.READ_ADAPTER,
                layers=update["layers"],
                digest=update["digest"],
                known=[number for one in states for number in one["numbers"]],
                version=version,
            )
            arrived = all(receipt["digest"] == update["digest"] for receipt in receipts)
        finally:
            if not arrived:
                await self._unload(replica, label)
        if arrived:
            self._accept(version)
            self._fleet.replicas.loaded(replica, label, version)
            self._fleet.tell()
            for name in await self._fleet.models(replica):
                if name != label and self._fleet.labels.number(name) is not None:
                    await self._unload(replica, name)
        return [{**receipt, "seconds": seconds} for receipt in receipts]

    async def _unload(self, replica: Replica, label: str) -> None:
        """Let no new request have an adapter; those in flight end with it."""
        with contextlib.suppress(NotFound):
            await self._fleet.http.post(replica.url, names.UNLOAD_ADAPTER, {"lora_name": label})
