"""Publishing through a folder that trainer and engines share."""

import os
from pathlib import Path

import torch
from torch import nn

from primerl._ranks import is_first_rank
from primerl.weights.transports.folder_transport import FolderTransport, check_engines
from primerl.weights.transports.publisher import Publisher
from primerl.weights.transports.receipts import Fetcher, Receipt, on_all_ranks


class Disk:
    """Publishes a model's weights through a folder, local or on a network.

        transport = weights.Disk(model, engine, folder="/shared/run/weights", encoding="delta")
        receipt = transport.publish(version=1)

    Each version is a safetensors file and a manifest of digests, visible once it is complete. With
    ``encoding="delta"`` only the 16-bit words that changed travel, exactly; each host keeps one
    copy of the tensors in shared memory, which its engines patch and load from. The folder keeps
    the last full version and what follows, for engines that missed versions or join late.

    All ranks of a sharded trainer make a transport and call ``publish``; rank 0 has the engines.

    Args:
        model: the trainer's.
        engines: that serve it, on rank 0.
        folder: that engines see under the same path; may be None on ranks other than 0.
        encoding: ``"full"`` or ``"delta"``.
        dtype: of parameters on the wire, usually the engines' own; None keeps the trainer's.
        snapshot_every: how often a version is published in full with ``"delta"``.
        timeout_s: how long engines may take to load a version.

    Raises:
        ValueError: an argument is out of range, or rank 0 has no engine or folder.
    """

    def __init__(
        self,
        model: nn.Module,
        *engines: Fetcher,
        folder: str | os.PathLike[str] | None,
        encoding: str = "full",
        dtype: torch.dtype | None = None,
        snapshot_every: int = 16,
        timeout_s: float = 600.0,
    ) -> None:
        check_engines(engines)
        publisher = None
        if is_first_rank():
            if folder is None:
                raise ValueError("folder is None; rank 0 writes the weights, so pass it a path")
            publisher = Publisher(Path(folder), encoding=encoding, snapshot_every=snapshot_every)
        self._transport = FolderTransport(
            model, engines, publisher, dtype=dtype, timeout_s=timeout_s
        )

    def publish(self, version: int) -> Receipt:
        """Put the weights of ``version`` into every engine and check that they arrived.

        A delta that does not arrive is followed by the full version.

        Raises:
            RuntimeError: they did not arrive; the message says what was caught, and where.
        """
        return on_all_ranks(self._transport.publish(version))
