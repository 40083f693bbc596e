"""Ranks that exist in this process only."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"


@contextlib.contextmanager
def imagined_ranks(world_size: int, *, rank: int = 0) -> Iterator[None]:
    """Be one rank of a world whose others don't exist: no process starts, and nothing is sent.

    ``parallel.mesh`` and ``parallel.shard`` give this process what that rank would hold.
    Collectives return at once, and what they return has the right shape and no meaning.

    Args:
        world_size: number of ranks.
        rank: the one to be.

    Raises:
        ValueError: there is no such rank.
        RuntimeError: a process group runs already.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, expected 0 to {world_size - 1}")
    if dist.is_initialized():
        raise RuntimeError("a process group runs already; plan in a process that has none")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
