"""``Adapter``, a transport of a low-rank adapter to servers that have the base model."""

import os
import secrets
import shutil
import time
import uuid
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from primerl._common.adapters import (
    adapter_config,
    adapter_tensors,
    saved_part,
    write_adapter,
)
from primerl._common.digests import digest_of, digest_of_all
from primerl._common.files import saved_folder
from primerl._common.ranks import is_first_rank, on_first_rank_gathering
from primerl._common.shared_folder import SharedFolder
from primerl._common.supported_adapters import require_servable
from primerl.weights.transports.receipts import (
    Fetcher,
    Receipt,
    check_engines,
    check_receipts,
    on_all_ranks,
)
from primerl.weights.transports.transport import Transport

REQUEST_S = 600.0  # the assumed timeout of requests, for engines that don't have the attribute


class Adapter(Transport):
    """A transport that publishes only a low-rank adapter (LoRA, arXiv:2106.09685) of a model.

        with serving.serve_vllm(folder, enable_lora=True, max_lora_rank=16) as server:
            engine = serving.VLLMEngine(server, adapter="policy")
            transport = weights.Adapter(model, engine)
            receipt = transport.publish(version=1)

    Servers apply the adapter to their own base model, which must equal the trainer's; the canary
    compares the two. Each version is a folder in ``peft``'s format, which vLLM loads beside the
    previous version, without a pause. A request in flight finishes with the version that it started
    with. Therefore the folder of a replaced version is kept until the longest request has timed
    out. A server that can't serve a version keeps its old one.

    All ranks of a sharded trainer create a transport and call ``publish``; only rank 0 has engines.

    Args:
        model: the trainer's model, to which ``peft.inject_adapter_in_model`` added the adapter.
        engines: engines that sample under an adapter, on rank 0. Several may serve the same
            adapter.
        folder: a folder that the servers' hosts share; None for this host's shared memory. Several
            adapters may be published in the same folder.
        adapter: the adapter's name in the model. The engines may have other names for it.
        dtype: the dtype that the servers compute in, to which the adapter is cast; None keeps the
            trainer's.
        timeout_s: the timeout of loading a version.

    Raises:
        ValueError: the model has no such adapter, or trains other parameters too; rank 0 has no
            engine, or an engine that samples under no adapter.
    """

    def __init__(
        self,
        model: nn.Module,
        *engines: Fetcher,
        folder: str | os.PathLike[str] | None = None,
        adapter: str = "default",
        dtype: torch.dtype | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        check_engines(engines, adapters=True)
        require_servable(model, adapter)
        self.adapter = adapter
        self._model = model
        self._engines: Sequence[Any] = engines
        self._dtype = dtype
        self._timeout_s = timeout_s
        self._folder = None if folder is None else Path(folder).absolute()
        self._latest: Path | None = None
        self._replaced: list[tuple[float, Path]] = []  # (time of the replacement, folder)
        if is_first_rank() and self._folder is None:
            place = SharedFolder(f"adapters-{uuid.uuid4().hex}")
            weakref.finalize(self, place.close)
            self._folder = place.path

    def _publish(self, version: int) -> Receipt:
        require_servable(self._model, self.adapter)
        tensors = adapter_tensors(self._model, self.adapter)
        receipt = on_first_rank_gathering(lambda: self._send(version, tensors), tensors)
        return on_all_ranks(receipt or Receipt(version=version))

    def _send(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Receipt:
        assert self._folder is not None, "rank 0 has a folder"
        started = time.perf_counter()
        sent = {name: self._on_wire(tensor) for name, tensor in tensors}
        gathered = time.perf_counter()
        digest = self._digest(sent)
        encoded = time.perf_counter()
        # A new name each time, because vLLM does not read a path again that it has loaded before.
        place = self._folder / f"{version:08d}-{secrets.token_hex(4)}"
        with saved_folder(place, marker="adapter_config.json") as partial:
            write_adapter(partial, adapter_config(self._model, self.adapter), sent)
        written = time.perf_counter()
        try:
            servers = self._load(place, version, digest, sent)
        except BaseException:
            self._replaced.append((time.monotonic(), place))  # a server may have loaded it
            raise
        loaded = time.perf_counter()
        self._retain(place)
        return Receipt(
            version=version,
            kind="adapter",
            digest=digest,
            tensors=len(sent),
            bytes=sum(path.stat().st_size for path in place.iterdir()),
            seconds={
                "gather": gathered - started,
                "encode": encoded - gathered,
                "write": written - encoded,
                "load": loaded - written,
            },
            servers=servers,
        )

    def _on_wire(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", self._dtype or tensor.dtype).contiguous()

    def _digest(self, sent: dict[str, Tensor]) -> str:
        """Return the digest of the tensors that servers will hold: A, and B times its scale."""
        held = {}
        for name, tensor in sent.items():
            layer, factor = saved_part(name)
            module: Any = self._model.get_submodule(layer)
            scale = module.scaling[self.adapter] if factor == "B" else 1.0
            held[f"{layer}.{factor}"] = digest_of(tensor * scale)
        return digest_of_all(held)

    def _load(
        self, place: Path, version: int, digest: str, sent: dict[str, Tensor]
    ) -> dict[str, list[dict[str, Any]]]:
        update = {
            "adapter": str(place),
            "layers": sorted({saved_part(name)[0] for name in sent}),
            "rank": max(t.shape[0] for name, t in sent.items() if saved_part(name)[1] == "A"),
            "digest": digest,
        }
        servers: dict[str, list[dict[str, Any]]] = {}
        for engine in self._engines:
            servers |= engine.load_weights(update, version=version, timeout_s=self._timeout_s)
        check_receipts(servers, version=version, digest=digest, tensors=len(sent))
        return servers

    def _retain(self, place: Path) -> None:
        """Remove the folders that no request in flight can need; vLLM may read the others again."""
        now = time.monotonic()
        if self._latest is not None:
            self._replaced.append((now, self._latest))
        self._latest = place
        longest = max(getattr(one, "request_timeout_s", REQUEST_S) for one in self._engines)
        while self._replaced and now - self._replaced[0][0] > longest:
            shutil.rmtree(self._replaced.pop(0)[1], ignore_errors=True)
