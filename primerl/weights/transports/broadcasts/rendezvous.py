"""The meeting of a sender and the engines' workers that form an NCCL group."""

import ipaddress
import socket
from datetime import timedelta

import attrs
from torch._C._distributed_c10d import TCPStore


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
