"""Imagined ranks: a process group of which only this process exists."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"


@contextlib.contextmanager
def imagined_ranks(world_size: int, *, rank: int = 0) -> Iterator[None]:
    """Act as one rank of a world of imagined ranks: no process starts, and nothing is sent.

    ``parallel.mesh`` and ``parallel.shard`` give this process the shards that this rank would hold.
    Collectives return at once; their results have the right shapes, but meaningless values.

    Args:
        world_size: the number of ranks.
        rank: the rank of this process.

    Raises:
        ValueError: there is no such rank.
        RuntimeError: a process group is initialized already.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, expected 0 to {world_size - 1}")
    if dist.is_initialized():
        raise RuntimeError("a process group is initialized already; plan in a process without one")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
