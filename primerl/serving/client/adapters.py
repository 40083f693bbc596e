"""Adapter updates on all vLLM servers of a fleet."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from primerl.serving import names
from primerl.serving.client.calls import rpc
from primerl.serving.client.http import NotFound
from primerl.serving.client.servers import ServerState
from primerl.serving.client.updates import SendBarrier, Updates
from primerl.types import PolicyVersion


class AdapterUpdates(Updates):
    """Loader of adapter versions, each under a distinct name beside the previous version.

    The servers do not pause. Requests in flight finish with the version that they started with, and
    new requests name the new version, so all tokens of a completion have the same version. (With
    vLLM's ``load_inplace``, the engine would read the adapter's files again at every step, for as
    long as requests name the adapter.)
    """

    # A server reports the adapter before its digest is compared, and may have to unload it again.
    accepts_early = False

    async def _prepare(self, server: ServerState, update: Mapping[str, Any]) -> None:
        """Check that the server can load adapters of this rank."""
        states = await rpc(self._fleet, server, names.PREPARE_ADAPTER)
        most = min((one["most_rank"] for one in states), default=0)
        if most < update["rank"]:
            why = f"up to rank {most}" if most else "no adapters"
            raise ValueError(
                f"{server.url} takes {why}, and the adapter has rank {update['rank']}: start it "
                f"by serve_vllm(..., enable_lora=True, max_lora_rank={max(8, update['rank'])})"
            )

    async def _swap(
        self,
        server: ServerState,
        update: Mapping[str, Any],
        version: PolicyVersion,
        meeting: SendBarrier | None,
    ) -> list[dict[str, Any]]:
        """Load the new version, compare its digest, and unload the old version.

        A server that loaded an adapter with another digest keeps the old version.
        """
        assert meeting is None, "adapters are read from a folder, not sent"
        label = self._fleet.labels.name(version)
        states = await rpc(self._fleet, server, names.PREPARE_ADAPTER)
        await self._unload(server, label)  # loaded if this version was published before
        started = time.perf_counter()
        body = {"lora_name": label, "lora_path": update["adapter"]}
        try:
            await self._fleet.http.post(server.url, names.LOAD_ADAPTER, body)
        except NotFound as error:
            raise RuntimeError(
                f"{server.url} can't load the adapter {update['adapter']}: the server does not "
                "see that folder, or was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 "
                f"({error})"
            ) from error
        seconds = {"load": time.perf_counter() - started}
        arrived = False
        try:
            receipts = await rpc(
                self._fleet,
                server,
                names.READ_ADAPTER,
                layers=update["layers"],
                digest=update["digest"],
                known=[number for one in states for number in one["numbers"]],
                version=version,
            )
            arrived = all(receipt["digest"] == update["digest"] for receipt in receipts)
        finally:
            if not arrived:
                await self._unload(server, label)
        if arrived:
            self._accept(version)
            self._fleet.servers.loaded(server, label, version)
            self._fleet.tell()
            for name in await self._fleet.models(server):
                if name != label and self._fleet.labels.number(name) is not None:
                    await self._unload(server, name)
        return [{**receipt, "seconds": seconds} for receipt in receipts]

    async def _unload(self, server: ServerState, label: str) -> None:
        """Unload an adapter for new requests; requests in flight finish with it."""
        with contextlib.suppress(NotFound):
            await self._fleet.http.post(server.url, names.UNLOAD_ADAPTER, {"lora_name": label})
