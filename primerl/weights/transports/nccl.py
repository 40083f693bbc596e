"""``NCCL``, a transport from GPU to GPU by NCCL broadcasts."""

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor, nn

from primerl._common.checkpoint_tensors import TensorLayout, checkpoint_layout, checkpoint_tensors
from primerl._common.digests import TensorDigest, digest_of, digest_of_all
from primerl._common.ranks import on_first_rank_gathering
from primerl.weights.transports.broadcast_group import (
    Communicator,
    Membership,
    Rendezvous,
    connect_nccl,
    connected,
    in_thread,
    new_unique_id,
)
from primerl.weights.transports.receipts import (
    Fetcher,
    Receipt,
    check_engines,
    check_receipts,
    on_all_ranks,
)

_POLL_S = 0.001


@runtime_checkable
class BroadcastServers(Fetcher, Protocol):
    """Protocol of engines that report their servers' numbers of workers, such as ``VLLMEngine``."""

    def workers(self) -> dict[str, int]:
        """Return the number of workers of every live server, by url."""
        ...


@attrs.frozen
class _BroadcastGroup:
    """An NCCL group of the trainer and the workers that existed when it was formed."""

    key: str
    workers: dict[str, int]
    meeting: Rendezvous
    connecting: "Future[Communicator]"


class NCCL:
    """A transport that publishes a model's weights to engines on GPUs, from memory to memory.

        with serving.serve_vllm(model, weight_transfer="primerl_nccl") as server:
            transport = weights.NCCL(model, serving.VLLMEngine(server))
            receipt = transport.publish(version=1)

    Tensors are broadcast layer by layer through vLLM's NCCL communicator while the servers are
    paused. A new group is formed when servers join or leave. A server that joins late gets its
    weights with the next publication; use ``Disk`` if it must not wait for that.

    All ranks of a sharded trainer create a transport and call ``publish``; only rank 0 has the
    engine.

    Args:
        model: the trainer's model.
        engines: one engine with all servers on rank 0, and none on the other ranks.
        dtype: the dtype in which parameters are sent, usually the engine's own; None keeps the
            trainer's.
        address: this host's address, as the servers' workers reach it.
        timeout_s: the timeout of a publication.
        connect: joins the group; by NCCL by default.
        unique_id: creates the id of a new group; NCCL's by default.

    Raises:
        ValueError: rank 0 has no engine or several, or another rank has one.
    """

    def __init__(
        self,
        model: nn.Module,
        *engines: BroadcastServers,
        dtype: torch.dtype | None = None,
        address: str = "127.0.0.1",
        timeout_s: float = 600.0,
        connect: Callable[[Membership, torch.device], Communicator] = connect_nccl,
        unique_id: Callable[[], bytes] = new_unique_id,
    ) -> None:
        check_engines(engines)
        if len(engines) > 1:
            raise ValueError(f"got {len(engines)} engines; pass one engine that has all servers")
        self._model = model
        self._engines = engines
        self._dtype = dtype
        self._address = address
        self._timeout_s = timeout_s
        self._connect = connect
        self._unique_id = unique_id
        self._group: _BroadcastGroup | None = None

    def publish(self, version: int) -> Receipt:
        """Load the weights of ``version`` into every server and check that they arrived.

        Raises:
            RuntimeError: the weights did not arrive; the message says which check failed, and
                where.
        """
        tensors = checkpoint_tensors(self._model, dtype=self._dtype)
        receipt = on_first_rank_gathering(lambda: self._publish(version, tensors), tensors)
        return on_all_ranks(receipt or Receipt(version=version))

    def _publish(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> Receipt:
        started = time.perf_counter()
        engine = self._engines[0]
        layout = checkpoint_layout(self._model, dtype=self._dtype)
        group = self._current_group(engine)
        update = {
            "version": version,
            "address": group.meeting.address,
            "port": group.meeting.port,
            "group": group.key,
            "names": list(layout),
            "dtypes": [str(e.dtype).removeprefix("torch.") for e in layout.values()],
            "shapes": [list(e.shape) for e in layout.values()],
        }
        digests: dict[str, TensorDigest] = {}
        seconds: dict[str, float] = {}

        def send() -> None:
            began = time.perf_counter()
            communicator = connected(group.connecting, to="the engines", timeout_s=self._timeout_s)
            self._broadcast(communicator, layout, tensors, digests)
            seconds["write"] = time.perf_counter() - began

        try:
            servers = engine.load_weights(
                update, version=version, timeout_s=self._timeout_s, send=send
            )
            digest = digest_of_all(digests)
            check_receipts(servers, version=version, digest=digest, tensors=len(layout))
        except BaseException:
            self._group = None  # its members may have reached different tensors
            raise
        seconds["load"] = time.perf_counter() - started - seconds["write"]
        return Receipt(
            version=version,
            kind="full",
            digest=digest,
            tensors=len(layout),
            bytes=sum(entry.nbytes for entry in layout.values()),
            seconds=seconds,
            servers=servers,
        )

    def _current_group(self, engine: BroadcastServers) -> _BroadcastGroup:
        workers = engine.workers()
        if self._group is None or self._group.workers != workers:
            world_size = 1 + sum(workers.values())
            unique_id = self._unique_id()
            meeting = Rendezvous(
                self._address,
                world_size=world_size,
                unique_id=unique_id,
                timeout_s=self._timeout_s,
            )
            place = Membership(0, world_size, unique_id)
            device = next(self._model.parameters()).device
            connecting = in_thread(lambda: self._connect(place, device))
            self._group = _BroadcastGroup(uuid.uuid4().hex, workers, meeting, connecting)
        return self._group

    def _broadcast(
        self,
        communicator: Communicator,
        layout: dict[str, TensorLayout],
        tensors: Iterator[tuple[str, Tensor]],
        digests: dict[str, TensorDigest],
    ) -> None:
        """Broadcast tensors in the order that was announced to the workers."""
        expected = iter(layout.items())
        for name, tensor in tensors:
            if next(expected, None) != (name, TensorLayout(tensor.dtype, tuple(tensor.shape))):
                raise RuntimeError(
                    f"{name} is not the next tensor that was announced to the engines"
                )
            digests[name] = digest_of(tensor)
            communicator.broadcast(tensor.contiguous(), src=0)
        if missing := [name for name, _ in expected]:
            raise RuntimeError(f"tensors were announced but not sent: {', '.join(missing[:5])}")
        self._wait_for_the_gpu()

    def _wait_for_the_gpu(self) -> None:
        """Wait for the broadcasts, with a timeout: if a member is lost, they never end."""
        if next(self._model.parameters()).device.type != "cuda":
            return
        done: Any = torch.cuda.current_stream().record_event()
        deadline = time.monotonic() + self._timeout_s
        while not done.query():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the broadcast took longer than {self._timeout_s:g} s")
            time.sleep(_POLL_S)
