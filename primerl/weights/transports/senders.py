"""The ranks that broadcast a trainer's weights, each in an NCCL group of its own."""

import contextlib
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from primerl._common.ranks import exchange, on_every_rank, on_first_rank
from primerl._common.threads import in_thread
from primerl.weights.transports.broadcast_group import (
    Communicator,
    Membership,
    Rendezvous,
    address_towards,
    as_bytes,
    connected,
)

_POLL_S = 0.001


@attrs.frozen(kw_only=True, eq=False)
class BroadcastGroups:
    """The NCCL groups of each sender and the workers that existed when they were formed."""

    key: str
    """Identifies the groups, which are all formed anew together."""
    workers: dict[str, int]
    """The number of workers of each server, by url."""
    stores: list[list[Any]]
    """Address and port of each sender's rendezvous."""
    meeting: Rendezvous | None
    """This sender's, which has to exist while workers join; None if this rank does not send."""
    connecting: "Future[Communicator] | None"

    def leave(self) -> None:
        """Leave the group of this rank."""
        if self.connecting is None or not self.connecting.done():
            return
        if self.connecting.exception() is None:
            self.connecting.result().destroy()


@attrs.define(kw_only=True, eq=False)
class GroupFormation:
    """Forms the groups of the senders anew when servers join or leave, or after an error.

    All ranks create it, and call its methods.
    """

    ranks: dist.ProcessGroup | None
    """A gloo group of all ranks; None without a process group."""
    sends: bool
    """Whether this rank sends."""
    address: str | None
    """This host's address, as workers reach it; None to find it."""
    timeout_s: float
    connect: Callable[[Membership], Communicator]
    unique_id: Callable[[], bytes]
    _groups: BroadcastGroups | None = None

    def of(self, workers: Callable[[], dict[str, int]]) -> BroadcastGroups:
        """Return the groups of the live servers.

        ``workers`` returns the number of workers of each server, by url; only rank 0 calls it.

        Raises:
            RuntimeError: a rank could not form a group.
        """
        live = on_first_rank(workers, self.ranks)
        current = None if self._groups is None else [self._groups.key, self._groups.workers]
        # After an error that only some ranks noticed, only those have left their groups.
        all_have = all(one == current for one in exchange(current, self.ranks))
        if self._groups is None or not all_have or self._groups.workers != live:
            self.leave()
            self._groups = self._formed(live)
        return self._groups

    def leave(self) -> None:
        """Leave the groups, so that new ones are formed for the next publication."""
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.leave()

    def _formed(self, workers: Mapping[str, int]) -> BroadcastGroups:
        key, first_host = on_first_rank(
            lambda: [uuid.uuid4().hex, socket.gethostname()], self.ranks
        )
        members = 1 + sum(workers.values())
        server = urlsplit(next(iter(workers), "")).hostname or ""
        meeting: Rendezvous | None = None
        connecting: Future[Communicator] | None = None

        def meet() -> list[Any] | None:
            nonlocal meeting
            if not self.sends:
                return None
            meeting = Rendezvous(
                self.address or address_towards(server, first_host=first_host),
                world_size=members,
                unique_id=self.unique_id(),
                timeout_s=self.timeout_s,
            )
            return [meeting.address, meeting.port]

        stores = [store for store in on_every_rank(meet, self.ranks) if store is not None]
        if meeting is not None:
            place = meeting.membership
            connecting = in_thread(lambda: self.connect(place))
        return BroadcastGroups(
            key=key,
            workers=dict(workers),
            stores=stores,
            meeting=meeting,
            connecting=connecting,
        )


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
