"""``SharedMemory``, a transport to engines on the trainer's host, through memory."""

import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Literal, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor, nn

from primerl._common.checkpoint_tensors import Quantizer, published_bytes
from primerl._common.ranks import (
    is_first_rank,
    on_first_rank,
    on_first_rank_gathering,
    whole_tensors,
)
from primerl._common.shared_folder import SharedFolder
from primerl._common.supported_adapters import refuse_unsupported_adapters
from primerl.weights.transports.disk import Disk
from primerl.weights.transports.receipts import Fetcher, Receipt, check_engines, on_all_ranks
from primerl.weights.transports.transport import Transport


@runtime_checkable
class Receiver(Protocol):
    """Protocol of engines in the trainer's process that take new weights while they serve."""

    def update_weights(
        self, tensors: Mapping[str, Tensor], *, version: int, timeout_s: float = ...
    ) -> None:
        """Load ``tensors`` as ``version``; return once new tokens are sampled with them."""
        ...


class SharedMemory(Transport):
    """A transport that publishes a model's weights to engines on the same host.

        transport = weights.SharedMemory(model, engine)
        receipt = transport.publish(version=1)

    An engine in this process copies directly from the trainer's tensors, and the trainer waits for
    the copy. Servers (``VLLMEngine``) map a file in the host's shared memory, in a private folder
    that is removed when this process ends. If the shared memory has no room for two versions, as in
    many containers, the folder is a temporary one on disk. Parameters and saved buffers are sent,
    including buffers that steer a router. A tensor that is shared under two names is sent once.

    A model that is sharded over ranks is gathered for each publication, so all ranks create a
    transport and call ``publish``. Only rank 0 has engines.

    Args:
        model: the trainer's model.
        engines: the engines that serve the model, on rank 0.
        encoding: ``"full"`` or ``"delta"``, for servers.
        dtype: the dtype in which parameters are sent to servers, usually their own; None keeps the
            trainer's.
        quantize: ``fp8.CheckpointQuantizer``, for servers of a quantized checkpoint.
        timeout_s: the timeout of loading a version into one engine.

    Raises:
        ValueError: rank 0 has no engine, or another rank has one; ``quantize`` is given with an
            engine in this process, which copies master weights; or the model has adapters other
            than plain LoRA.
    """

    def __init__(
        self,
        model: nn.Module,
        *engines: Receiver | Fetcher,
        encoding: Literal["full", "delta"] = "full",
        dtype: torch.dtype | None = None,
        quantize: Quantizer | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        check_engines(engines)
        refuse_unsupported_adapters(model)
        self._model = model
        self._receivers = [one for one in engines if isinstance(one, Receiver)]
        if quantize is not None and self._receivers:
            raise ValueError(
                "an engine in this process copies the trainer's master weights, not quantized "
                "ones: convert its model like the trainer's (fp8.convert_linears), and leave "
                "quantize out"
            )
        servers = [one for one in engines if not isinstance(one, Receiver)]
        self._timeout_s = timeout_s
        folder = None
        if servers:
            size = published_bytes(model, dtype, quantize)
            # Servers read a version until they have the next one. With deltas, the host also keeps
            # a copy of the tensors.
            versions = 4 if encoding == "delta" else 2
            place = SharedFolder(f"publications-{uuid.uuid4().hex}", room=versions * size)
            weakref.finalize(self, place.close)
            folder = place.path
        # None only on rank 0 without servers. Other ranks always take part in gathering.
        self._disk: Disk | None = None
        if servers or not is_first_rank():
            self._disk = Disk(
                model,
                *servers,
                folder=folder,
                encoding=encoding,
                dtype=dtype,
                quantize=quantize,
                timeout_s=timeout_s,
            )

    def _publish(self, version: int) -> Receipt:
        here, served = self._kinds()
        copying = self._copy(version) if here else {}
        receipt = Receipt(version=version)
        if served:
            receipt = self._to_servers.publish(version)
        return self._with_copying(receipt, copying)

    def _start(self, version: int) -> "tuple[Callable[[], Receipt], Future[Any] | None]":
        here, served = self._kinds()
        if not served:
            return super()._start(version)
        copying = self._copy(version) if here else {}  # engines in this process copy at once
        pending = self._to_servers.start(version)
        return lambda: self._with_copying(pending.wait(), copying), pending.work

    @property
    def _to_servers(self) -> Disk:
        assert self._disk is not None, "only rank 0 may have none"
        return self._disk

    def _with_copying(self, receipt: Receipt, copying: dict[str, float]) -> Receipt:
        """Add the seconds for which engines in this process copied the weights."""
        seconds = {
            phase: receipt.seconds.get(phase, 0.0) + copying.get(phase, 0.0)
            for phase in receipt.seconds | copying
        }
        return on_all_ranks(attrs.evolve(receipt, seconds=seconds))

    def _kinds(self) -> list[bool]:
        """Return whether rank 0 has engines in its process, and whether it has servers."""
        kinds: list[bool] = on_first_rank(lambda: [bool(self._receivers), self._disk is not None])
        return kinds

    def _copy(self, version: int) -> dict[str, float]:
        """Have engines in this process copy the weights; return the seconds by phase."""
        started = time.perf_counter()
        gathered = whole_tensors(self._model)
        seconds: dict[str, float] = {}

        def work() -> None:
            named = dict(gathered)
            if any(tensor.device.type == "cuda" for tensor in named.values()):
                torch.cuda.synchronize()  # the engine copies on another stream
            seconds["gather"] = time.perf_counter() - started
            for engine in self._receivers:
                engine.update_weights(named, version=version, timeout_s=self._timeout_s)
            seconds["load"] = time.perf_counter() - started - seconds["gather"]

        on_first_rank_gathering(work, gathered)
        return seconds
