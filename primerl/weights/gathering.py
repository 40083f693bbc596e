"""A model's tensors, whole, whether or not they are sharded."""

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def whole_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter and saved buffer by name, one at a time; a shared one once.

    Gathering a sharded tensor is a collective: every rank iterates to the end.
    """
    distinct = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    for name, tensor in model.state_dict().items():
        if name in distinct:
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_first_rank() -> bool:
    """Whether this rank writes and publishes: rank 0, also of a world of one."""
    return not dist.is_initialized() or dist.get_rank() == 0
