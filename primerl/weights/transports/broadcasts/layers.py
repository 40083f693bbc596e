"""Broadcasts of layers: a trainer's rank sends them, and the workers of its group receive them."""

import contextlib
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from primerl._common.digests import as_bytes
from primerl.weights.transports.broadcasts.groups import Communicator, connected

_POLL_S = 0.001


class LayerSender:
    """Broadcasts the layers of this rank to the workers of its group.

    On a GPU, it broadcasts on a CUDA stream of its own. If a worker is lost, that stream waits
    forever, while the trainer's own work goes on.

    Args:
        connecting: the communicator, once the group is connected; None if this rank has no layers.
        device: the trainer's device.
        timeout_s: how long connecting may take, and then all broadcasts together.
    """

    def __init__(
        self,
        connecting: "Future[Communicator] | None",
        device: torch.device,
        *,
        timeout_s: float,
    ) -> None:
        self._connecting = connecting
        self._communicator: Communicator | None = None
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._held: list[Tensor] = []  # keeps memory that a broadcast still reads

    def connect(self) -> None:
        """Wait until the group is connected.

        Raises:
            RuntimeError: it was not connected in time.
        """
        if self._connecting is not None:
            self._communicator = connected(
                self._connecting, to="the engines", timeout_s=self._timeout_s
            )
        self._deadline = time.monotonic() + self._timeout_s

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast tensors in order; on a GPU, return before the workers have them."""
        if self._communicator is None:
            assert not tensors, "only ranks with a group own layers"
            return
        self._held = [as_bytes(tensor) for tensor in tensors]
        with self._on_own_stream():
            for tensor in self._held:
                self._communicator.broadcast(tensor, src=0)

    def wait(self) -> None:
        """Wait until all workers have what was sent.

        Raises:
            RuntimeError: they did not receive it in time.
        """
        while self._stream is not None and not self._stream.query():
            if time.monotonic() > self._deadline:
                raise RuntimeError(f"the broadcast took longer than {self._timeout_s:g} s")
            time.sleep(_POLL_S)
        self._held = []

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield


def receive(
    announced: Iterable[tuple[str, str, Sequence[int], int]],
    communicators: Sequence[Communicator],
    *,
    device: torch.device,
    timeout_s: float,
) -> Generator[tuple[str, Tensor], None, None]:
    """Yield the tensors that senders broadcast, by name; the caller reads a tensor immediately.

    If they do not all arrive in time, such as after a sender's death, the groups are left. NCCL has
    no time limit itself: a worker would wait forever, and its server would answer no request.

    Args:
        announced: the name, the dtype, the shape and the index of the group of each tensor.
        communicators: the groups.
        device: where the tensors arrive.
        timeout_s: how long all tensors together may take.

    Raises:
        RuntimeError: a tensor did not arrive in time.
    """
    late = threading.Event()

    def give_up() -> None:
        late.set()
        for one in communicators:
            one.destroy()

    def check(name: str) -> None:
        if late.is_set():
            raise RuntimeError(
                f"{name} did not arrive: the trainer's broadcast took longer than {timeout_s:g} s, "
                "or a rank that sends has died"
            )

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        for name, dtype, shape, group in announced:
            tensor = torch.empty(list(shape), dtype=getattr(torch, dtype), device=device)
            # As bytes, because NCCL does not know all dtypes.
            communicators[group].broadcast(as_bytes(tensor), src=0)
            check(name)
            yield name, tensor
            check(name)  # on a GPU, the tensor arrives when the caller reads it
    finally:
        timer.cancel()
