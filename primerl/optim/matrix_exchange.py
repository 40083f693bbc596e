"""Gathering sharded matrices, each to one rank, and scattering the results back."""

from collections.abc import Callable, Iterable, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

BATCH_ELEMENTS = 2**28
"""Elements of gathered matrices on each rank at a time."""


@attrs.frozen(eq=False)
class MatrixSharding:
    """How the matrices of a tensor ``[n, rows, columns]`` are sharded."""

    group: dist.ProcessGroup
    dimension: int
    """1 or 2: each rank has some of the rows, or some of the columns."""
    sizes: tuple[int, ...]
    """Rows or columns of each rank of the group."""


def matrix_sharding(parameter: Tensor) -> MatrixSharding | None:
    """How a parameter's matrices are sharded; None if each lies whole on its rank."""
    if not isinstance(parameter, DTensor):
        return None
    mesh, sharded = parameter.device_mesh, []
    for mesh_dimension, placement in enumerate(parameter.placements):
        if mesh.size(mesh_dimension) == 1 or isinstance(placement, Replicate):
            continue
        dimension = getattr(placement, "dim", None)  # Shard, or FSDP2's _StridedShard
        if dimension is None:
            raise ValueError(f"Muon cannot gather a parameter placed as {parameter.placements}")
        if parameter.ndim == 2 or dimension % 3:  # otherwise whole matrices lie on each rank
            sharded.append((mesh_dimension, dimension % parameter.ndim))
    if not sharded:
        return None
    mesh_dimension, dimension = sharded[0]
    if len(sharded) > 1:
        raise ValueError(
            f"Muon cannot gather a matrix that is divided more than once ({parameter.placements}); "
            "expected parameters sharded by parallel.shard"
        )
    sizes = _chunks(parameter.shape[dimension], mesh.size(mesh_dimension))
    return MatrixSharding(mesh.get_group(mesh_dimension), dimension + 3 - parameter.ndim, sizes)


def _chunks(length: int, ranks: int) -> tuple[int, ...]:
    """The sizes of the parts that ``torch.chunk`` makes, empty ones included."""
    size = -(-length // ranks)
    return tuple(max(0, min(size, length - rank * size)) for rank in range(ranks))


@attrs.frozen(eq=False)
class _Matrix:
    """One matrix of one tensor."""

    tensor: int
    index: int
    shape: tuple[int, int]

    @property
    def cost(self) -> int:
        """Proportional to the FLOPs of orthogonalizing it."""
        return self.shape[0] * self.shape[1] * min(self.shape)


def map_matrices(
    tensors: Sequence[Tensor],
    shardings: Sequence[MatrixSharding | None],
    function: Callable[[Tensor, int], Tensor],
) -> list[Tensor]:
    """Apply a function to whole matrices, each on one of the ranks that have parts of it.

    The ranks of a group get matrices of about equal cost. In each batch of matrices, an all-to-all
    gathers the parts of each on its rank, and another returns the parts of the results.

    Args:
        tensors: this rank's ``[n, rows, columns]``; all ranks pass theirs in the same order.
        shardings: of each tensor, from ``matrix_sharding``.
        function: ``(matrices[n, rows, columns], index of their tensor) -> results``, of the same
            shape and dtype.
    """
    results = [
        function(tensor, index) if sharding is None else torch.empty_like(tensor)
        for index, (tensor, sharding) in enumerate(zip(tensors, shardings, strict=True))
    ]
    by_group: dict[dist.ProcessGroup, list[_Matrix]] = {}
    for tensor, sharding in enumerate(shardings):
        if sharding is not None:
            shape = list(tensors[tensor].shape)
            shape[sharding.dimension] = sum(sharding.sizes)
            matrices = [_Matrix(tensor, n, (shape[1], shape[2])) for n in range(shape[0])]
            by_group.setdefault(sharding.group, []).extend(matrices)
    for group, matrices in by_group.items():
        ranks = dist.get_world_size(group)
        for batch in _batches(matrices, ranks * BATCH_ELEMENTS):
            exchange = _Exchange(group, batch, tensors, shardings)
            mine = {
                index: function(whole.unsqueeze(0), batch[index].tensor)[0]
                for index, whole in exchange.gather().items()
            }
            exchange.return_parts(mine, results)
    return results


def _batches(matrices: list[_Matrix], elements: int) -> Iterable[list[_Matrix]]:
    """Batches of matrices of similar cost, so that ranks get equal shares of each batch."""
    batch: list[_Matrix] = []
    held = 0
    for matrix in sorted(matrices, key=lambda matrix: -matrix.cost):
        size = matrix.shape[0] * matrix.shape[1]
        if batch and held + size > elements:
            yield batch
            batch, held = [], 0
        batch.append(matrix)
        held += size
    yield batch


def _owners(costs: list[int], ranks: int) -> list[int]:
    """The rank of each matrix: the one with the least cost so far."""
    loads, owners = [0] * ranks, []
    for cost in costs:
        owner = loads.index(min(loads))
        loads[owner] += cost
        owners.append(owner)
    return owners


class _Exchange:
    """One batch of matrices, gathered to their owners and scattered back."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        batch: list[_Matrix],
        tensors: Sequence[Tensor],
        shardings: Sequence[MatrixSharding | None],
    ) -> None:
        self._group, self._batch, self._tensors = group, batch, tensors
        self._rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        found = (shardings[matrix.tensor] for matrix in batch)
        self._shardings = [sharding for sharding in found if sharding is not None]
        owners = _owners([matrix.cost for matrix in batch], ranks)
        self._owned = [[i for i, o in enumerate(owners) if o == rank] for rank in range(ranks)]
        self._mine = self._owned[self._rank]

    def _shape(self, index: int, rank: int) -> tuple[int, int]:
        """The shape of a rank's part of a matrix."""
        rows, columns = self._batch[index].shape
        sharding = self._shardings[index]
        size = sharding.sizes[rank]
        return (size, columns) if sharding.dimension == 1 else (rows, size)

    def gather(self) -> dict[int, Tensor]:
        """The whole matrices that this rank owns, by their index in the batch."""
        sent = [
            [self._tensors[self._batch[i].tensor][self._batch[i].index] for i in indices]
            for indices in self._owned
        ]
        received = self._all_to_all(sent, [self._mine] * len(sent), range(len(sent)))
        return {
            index: torch.cat(
                [parts[n] for parts in received], dim=self._shardings[index].dimension - 1
            )
            for n, index in enumerate(self._mine)
        }

    def return_parts(self, mine: dict[int, Tensor], results: list[Tensor]) -> None:
        """Scatter this rank's results, and write the parts that it receives."""
        split = [
            torch.split(mine[i], list(sharding.sizes), dim=sharding.dimension - 1)
            for i in self._mine
            for sharding in [self._shardings[i]]
        ]
        ranks = range(len(self._owned))
        sent = [[parts[rank] for parts in split] for rank in ranks]
        received = self._all_to_all(sent, self._owned, [self._rank] * len(ranks))
        for indices, parts in zip(self._owned, received, strict=True):
            for i, part in zip(indices, parts, strict=True):
                results[self._batch[i].tensor][self._batch[i].index].copy_(part)

    def _all_to_all(
        self, sent: list[list[Tensor]], indices: list[list[int]], parts: Iterable[int]
    ) -> list[list[Tensor]]:
        """Receive from each rank r, of the matrices ``indices[r]``, the parts of ``parts[r]``."""
        like = self._tensors[0]
        flat = [tensor.reshape(-1) for tensors in sent for tensor in tensors]
        shapes = [
            [self._shape(index, part) for index in matrices]
            for matrices, part in zip(indices, parts, strict=True)
        ]
        received = like.new_empty(sum(_elements(each) for each in shapes))
        dist.all_to_all_single(
            received,
            torch.cat(flat) if flat else like.new_empty(0),
            [_elements(each) for each in shapes],
            [sum(tensor.numel() for tensor in tensors) for tensors in sent],
            group=self._group,
        )
        arrived = iter(
            torch.split(received, [rows * cols for each in shapes for rows, cols in each])
        )
        return [[next(arrived).view(shape) for shape in each] for each in shapes]


def _elements(shapes: list[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in shapes)
