"""Publishing to engines that share the trainer's memory."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from primerl.weights.gathering import is_first_rank, whole_tensors


@runtime_checkable
class Receiver(Protocol):
    """An engine that takes new weights while it serves."""

    def update_weights(
        self, tensors: Mapping[str, Tensor], *, version: int, timeout_s: float = ...
    ) -> None:
        """Serve ``tensors`` as ``version`` from the next token on; return when it does."""
        ...


class SharedMemory:
    """Publishes a model's weights to engines in the same process.

        transport = weights.SharedMemory(model, engine)
        transport.publish(version=1)

    Engines copy from the trainer's tensors where they lie, so nothing is staged and the trainer
    waits for one copy. Parameters and saved buffers go (those that steer a router among them), a
    tensor that is shared under two names once.

    A model that is sharded over ranks is gathered for each publication, so all ranks make a
    transport and call ``publish``. Only rank 0 has engines.

    Args:
        model: the trainer's.
        engines: that serve it, on rank 0.
        timeout_s: how long one engine may take.

    Raises:
        ValueError: rank 0 has no engine, or another rank has one.
    """

    def __init__(self, model: nn.Module, *engines: Receiver, timeout_s: float = 600.0) -> None:
        if is_first_rank() and not engines:
            raise ValueError("there is no engine to publish to")
        if engines and not is_first_rank():
            raise ValueError("only rank 0 publishes to engines; pass none on the other ranks")
        self._model = model
        self._engines = engines
        self._timeout_s = timeout_s

    def publish(self, version: int) -> None:
        """Put the weights of ``version`` into every engine; returns when all serve them.

        Raises:
            RuntimeError: an engine did not take them in time.
        """
        # Ranks without an engine only help to gather.
        named = {name: whole for name, whole in whole_tensors(self._model) if self._engines}
        if any(tensor.device.type == "cuda" for tensor in named.values()):
            torch.cuda.synchronize()  # the engine copies on another stream
        for engine in self._engines:
            engine.update_weights(named, version=version, timeout_s=self._timeout_s)
