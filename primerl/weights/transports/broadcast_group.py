"""Formation of an NCCL group of one rank of a trainer and the engines' workers."""

import ipaddress
import socket
import threading
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Protocol, TypeVar, runtime_checkable

import attrs
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from primerl._common.digests import flat
from primerl._common.optional import require

T = TypeVar("T")


@runtime_checkable
class Communicator(Protocol):
    """Protocol of objects that connect the ranks of a group."""

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Fill ``tensor`` with rank ``src``'s tensor; on a GPU, in stream order."""
        ...

    def destroy(self) -> None:
        """Leave the group. A broadcast that waits for others, in any thread, gives up."""
        ...


@attrs.frozen
class Membership:
    """One process's rank in a group, and the data that members need to connect."""

    rank: int
    world_size: int
    unique_id: bytes


class Rendezvous:
    """A TCP store on a sender's host that assigns ranks to workers.

    Args:
        address: the sender's address, as workers reach it; the store listens on no other address.
        world_size: the number of workers, plus 1 for the sender, which is rank 0.
        unique_id: the id of the NCCL group.
        timeout_s: the timeout of the store's operations.

    Raises:
        OSError: this host does not have the address.
    """

    def __init__(
        self, address: str, *, world_size: int, unique_id: bytes, timeout_s: float
    ) -> None:
        self.membership = Membership(0, world_size, unique_id)
        with socket.socket() as listener:
            try:
                listener.bind((address, 0))
            except OSError as error:
                raise OSError(
                    f"{address} is not an address of this host, {socket.gethostname()} ({error}); "
                    "pass address=, this host's address as the servers' workers reach it"
                ) from error
            listener.listen()
            self.address, self.port = listener.getsockname()
            self._store = TCPStore(
                self.address,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=listener.detach(),
            )
        self._store.set("unique_id", unique_id.hex())
        self._store.set("world_size", str(world_size))
        self._store.add("ranks", 1)  # the sender's


def address_towards(host: str, *, first_host: str, argument: str = "address") -> str:
    """Return this host's address on the interface through which it reaches ``host``.

    It is the local address of a UDP socket that is connected to ``host``; nothing is sent.

    Args:
        host: the name or address of a server's host.
        first_host: the name of rank 0's host, of which the trainer knows that it reaches ``host``.
        argument: the argument with which users choose another address.

    Raises:
        OSError: there is no IPv4 address of that name, or no route to it.
        ValueError: ``host`` is rank 0's loopback address, and this is another host.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # any port, because connecting sends nothing
        except OSError as error:
            if isinstance(error, socket.gaierror) and _has_ipv6(host):
                raise OSError(
                    f"{host} has only an IPv6 address, but weights travel by IPv4; pass "
                    f"{argument}=, an IPv4 address"
                ) from error
            raise OSError(
                f"this host has no route to the server at {host} ({error}); pass {argument}=, this "
                "host's address as the servers' workers reach it"
            ) from error
        address: str = probe.getsockname()[0]
    if ipaddress.ip_address(address).is_loopback and socket.gethostname() != first_host:
        raise ValueError(
            f"the servers listen on {host} of rank 0's host {first_host}, which gives no address "
            f"at which their workers reach {socket.gethostname()}; pass {argument}= there"
        )
    return address


def _has_ipv6(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None, socket.AF_INET6))
    except (socket.gaierror, UnicodeError):  # UnicodeError: a part of the name is too long
        return False


def join_group(address: str, port: int, *, timeout_s: float) -> Membership:
    """Join a group through its store; return this process's rank and the data to connect.

    Raises:
        RuntimeError: all ranks of the group are already taken.
    """
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    rank = store.add("ranks", 1) - 1
    world_size = int(store.get("world_size"))
    if rank >= world_size:
        raise RuntimeError(
            f"the broadcast group of {world_size} members is complete; a worker joined late, or "
            "restarted"
        )
    return Membership(rank, world_size, bytes.fromhex(store.get("unique_id").decode()))


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
            communicators[group].broadcast(as_bytes(tensor), src=0)
            check(name)
            yield name, tensor
            check(name)  # on a GPU, the tensor arrives when the caller reads it
    finally:
        timer.cancel()


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, ``uint8[n]``, because NCCL does not know all dtypes.

    They are a view if the tensor is contiguous, and otherwise a copy.
    """
    return flat(tensor).view(torch.uint8)
