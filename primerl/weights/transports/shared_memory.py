"""Publishing to engines on the trainer's host, through memory."""

import time
import uuid
import weakref
from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor, nn

from primerl._common.checkpoint_tensors import (
    Quantizer,
    distinct_tensors,
    wire_dtypes,
)
from primerl._common.ranks import (
    is_first_rank,
    on_first_rank,
    on_first_rank_gathering,
    whole_tensors,
)
from primerl._common.shared_folder import SharedFolder
from primerl.weights.transports.disk import Disk
from primerl.weights.transports.receipts import Fetcher, Receipt, check_engines, on_all_ranks


@runtime_checkable
class Receiver(Protocol):
    """An engine that takes new weights while it serves."""

    def update_weights(
        self, tensors: Mapping[str, Tensor], *, version: int, timeout_s: float = ...
    ) -> None:
        """Serve ``tensors`` as ``version`` from the next token on; return when it does."""
        ...


class SharedMemory:
    """Publishes a model's weights to engines on the same host.

        transport = weights.SharedMemory(model, engine)
        receipt = transport.publish(version=1)

    An engine in this process copies from the trainer's tensors in place, so nothing is staged and
    the trainer waits for one copy. Servers (``VLLMEngine``) map a file in the host's shared memory,
    in a private folder that is removed when this process ends. If the shared memory has no room for
    two versions, as in many containers, that folder is on disk, among the temporary ones.
    Parameters and saved buffers are sent (those that steer a router among them), a tensor that is
    shared under two names once.

    A model that is sharded over ranks is gathered for each publication, so all ranks make a
    transport and call ``publish``. Only rank 0 has engines.

    Args:
        model: the trainer's.
        engines: that serve it, on rank 0.
        encoding: for servers, ``"full"`` or ``"delta"``.
        dtype: of parameters for servers, usually their own; None keeps the trainer's.
        quantize: for servers of a quantized checkpoint: ``fp8.CheckpointQuantizer``.
        timeout_s: how long one engine may take.

    Raises:
        ValueError: rank 0 has no engine, or another rank has one; or an engine in this process,
            which copies master weights, is to get quantized ones.
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
        self._model = model
        self._receivers = [one for one in engines if isinstance(one, Receiver)]
        if quantize is not None and self._receivers:
            raise ValueError(
                "an engine in this process copies the trainer's master weights, and no quantized "
                "ones: convert its model as the trainer's (fp8.convert_linears), and leave "
                "quantize out"
            )
        servers = [one for one in engines if not isinstance(one, Receiver)]
        self._timeout_s = timeout_s
        folder = None
        if servers:
            size = _sent_bytes(model, dtype, quantize)
            # Servers read a version until they have the next. Of deltas, they keep a copy as well.
            versions = 4 if encoding == "delta" else 2
            place = SharedFolder(f"publications-{uuid.uuid4().hex}", room=versions * size)
            weakref.finalize(self, place.close)
            folder = place.path
        self._disk: Disk | None = None  # rank 0 may have no servers; the others help to gather
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

    def publish(self, version: int) -> Receipt:
        """Put the weights of ``version`` into every engine; returns when all serve them.

        Raises:
            RuntimeError: an engine did not take them in time, or not as they were sent; the
                message says what was caught, and where.
        """
        here, served = on_first_rank(lambda: [bool(self._receivers), self._disk is not None])
        receipt = Receipt(version=version)
        if served:
            assert self._disk is not None, "each rank but 0 has one"
            receipt = self._disk.publish(version)
        if here:
            copying, before = self._copy(version), receipt.seconds
            seconds = {
                phase: before.get(phase, 0.0) + copying.get(phase, 0.0)
                for phase in before | copying
            }
            receipt = attrs.evolve(receipt, seconds=seconds)
        return on_all_ranks(receipt)

    def _copy(self, version: int) -> dict[str, float]:
        """Have engines in this process copy; the seconds by phase."""
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


def _sent_bytes(model: nn.Module, dtype: torch.dtype | None, quantize: Quantizer | None) -> int:
    """About the bytes of a version, of which quantized ones have a scale for 16 bytes or more."""
    dtypes = wire_dtypes(model, dtype, quantize)
    quantized = set() if quantize is None else quantize.parameters
    return sum(
        tensor.numel() * 5 // 4 if name in quantized else tensor.numel() * dtypes[name].itemsize
        for name, tensor in distinct_tensors(model).items()
    )
