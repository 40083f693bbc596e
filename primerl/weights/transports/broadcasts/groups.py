"""NCCL groups, each of one rank of a trainer and the engines' workers."""

import socket
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from primerl._common.optional import require
from primerl._common.ranks import exchange, on_every_rank, on_first_rank
from primerl._common.threads import in_thread
from primerl.weights.transports.broadcasts.rendezvous import (
    Membership,
    Rendezvous,
    address_towards,
)


@runtime_checkable
class Communicator(Protocol):
    """Protocol of objects that connect the ranks of a group."""

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Fill ``tensor`` with rank ``src``'s tensor; on a GPU, in stream order."""
        ...

    def destroy(self) -> None:
        """Leave the group. A broadcast that waits for others, in any thread, gives up."""
        ...


def new_unique_id() -> bytes:
    """Create the id of a new NCCL group, with vLLM's binding of the library."""
    wrapper = require("vllm.distributed.device_communicators.pynccl_wrapper", extra="vllm")
    return bytes(wrapper.NCCLLibrary().ncclGetUniqueId().internal)


def connect_nccl(place: Membership, device: torch.device) -> Communicator:
    """Connect with vLLM's NCCL communicator; block until all members have joined.

    Raises:
        RuntimeError: NCCL does not work on this machine.
    """
    pynccl = require("vllm.distributed.device_communicators.pynccl", extra="vllm")
    communicator: Any = pynccl.PyNcclCommunicator.from_unique_id_bytes(
        place.unique_id, rank=place.rank, world_size=place.world_size, device=device
    )
    if communicator.disabled:  # its broadcasts would silently do nothing
        raise RuntimeError(
            "NCCL is not available on this machine; weights.NCCL needs GPUs for the trainer and "
            "the engines"
        )
    found: Communicator = communicator
    return found


def connected(connecting: "Future[Communicator]", *, to: str, timeout_s: float) -> Communicator:
    """Wait for a communicator that connects in a thread; ``to`` names its peers in the error.

    Raises:
        RuntimeError: it did not connect within ``timeout_s``.
    """
    if not wait([connecting], timeout_s).done:
        raise RuntimeError(f"connecting to {to} by NCCL took longer than {timeout_s:g} s")
    return connecting.result()


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
