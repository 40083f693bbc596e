"""The time of a publication, by phases: while training waits, and beside it."""

from collections.abc import Sequence

import attrs

from primerl._common.owned_layers import owner_of_each
from primerl.planning.hardware import Hardware
from primerl.planning.server_memory import ServerPlan
from primerl.planning.traffic import Traffic
from primerl.planning.trainer_memory import TrainerLayout

PASSES_OF_MEMORY = 16
"""How often a byte that is gathered passes a GPU's memory: six times while layers are assembled
from what ranks send, and ten times while they are quantized."""


@attrs.frozen(kw_only=True)
class PublicationTime:
    """Seconds of a publication by phase, each after the one before it."""

    start: dict[str, float]
    """Phases of ``Transport.start``, for which training waits."""
    beside: dict[str, float]
    """Phases beside training. Sampling waits for the last one, ``pause``."""

    @property
    def phases(self) -> dict[str, float]:
        """All phases, in order."""
        return self.start | self.beside


def publication_times(
    layout: TrainerLayout,
    server: ServerPlan,
    traffic: Traffic,
    *,
    gathered: Sequence[int],
    published: Sequence[int],
    serving_nodes: int,
    speeds: Hardware,
) -> dict[str, PublicationTime]:
    """Return the times of a ``full`` version and of a ``delta``, by these names.

    The weights stay in the memory of the trainer's hosts. On one host, servers map them there
    (``weights.SharedMemory``); with several hosts, serving nodes read them by TCP
    (``weights.Network``).

    Args:
        layout: the trainer's ranks.
        server: the plan of a server; all servers load at once.
        traffic: the bytes of publications.
        gathered: the bytes of each layer as its owner receives it, in 16 bits.
        published: the bytes of each layer as it is sent.
        serving_nodes: the number of nodes that serve.
        speeds: the speeds of the machines.
    """
    ranks = range(layout.ranks)
    owners = owner_of_each(published, ranks)

    def held(sizes: Sequence[int], among: int, each: int) -> int:
        """Bytes of the layers of the rank, or of the node, that owns most."""
        sums = [0] * among
        for size, owner in zip(sizes, owners, strict=True):
            sums[owner // each] += size
        return max(sums)

    received = held(gathered, layout.ranks, 1)
    share = held(published, layout.ranks, 1)
    of_node = held(published, layout.nodes, layout.gpus_per_node)
    changed = traffic.weights_delta / traffic.weights
    workers = min(server.gpus, layout.gpus_per_node)
    threads = workers * speeds.threads
    writing = layout.gpus_per_node * speeds.copying
    one_host = layout.nodes == 1

    def reading(size: float) -> float:
        """Seconds in which each serving node reads so many bytes of all parts."""
        if one_host:
            return size / (workers * speeds.copying)
        sent = size * serving_nodes * of_node / traffic.weights  # by the node that owns most
        return max(size, sent) / speeds.tcp

    link = speeds.nvlink if one_host else speeds.network
    start = {
        "gather": received / link,
        "convert": received * PASSES_OF_MEMORY / (speeds.memory * speeds.memory_fraction),
        "copy to host memory": share / speeds.pcie,
    }
    needed = server.weights_of(workers)
    # Hashed once for the host, and once more by each worker that loads it.
    hashing = (needed + workers * server.weights) / (threads * speeds.hashing)
    pause = {"pause": server.weights / speeds.copying}
    full = {
        "encode": share / speeds.hashing + share / speeds.copying,
        "write": of_node / writing,
        "read": reading(needed),
        "patch and hash": hashing,
    }
    delta = {
        "encode": share / (speeds.threads * speeds.encoding),
        "write": of_node * changed / writing,
        "read": reading(traffic.weights_delta),
        "patch and hash": needed / (threads * speeds.patching) + hashing,
    }
    return {
        "full": PublicationTime(start=start, beside=full | pause),
        "delta": PublicationTime(start=start, beside=delta | pause),
    }
