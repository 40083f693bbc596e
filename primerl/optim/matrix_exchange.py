"""Exchange of sharded matrices: gather each on one rank, and scatter the results back."""

from collections.abc import Callable, Iterable, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

BATCH_ELEMENTS = 2**28
"""Number of elements of gathered matrices that each rank holds at a time."""


@attrs.frozen(eq=False)
class MatrixSharding:
    """Sharding of the matrices of a tensor ``[n, rows, columns]`` over a process group."""

    group: dist.ProcessGroup
    dimension: int
    """Sharded dimension: 1 if each rank holds some of the rows, 2 for columns."""
    sizes: tuple[int, ...]
    """Number of rows or columns on each rank of the group."""


def matrix_sharding(parameter: Tensor) -> MatrixSharding | None:
    """Return the sharding of a parameter's matrices; None if each matrix is whole on its rank."""
    if not isinstance(parameter, DTensor):
        return None
    mesh, sharded = parameter.device_mesh, []
    for mesh_dimension, placement in enumerate(parameter.placements):
        if mesh.size(mesh_dimension) == 1 or isinstance(placement, Replicate):
            continue
        dimension = getattr(placement, "dim", None)  # Shard, or FSDP2's _StridedShard
        if dimension is None:
            raise ValueError(
                "Muon can only gather parameters with placements Shard and Replicate, not "
                f"{parameter.placements}"
            )
        if parameter.ndim == 2 or dimension % 3:  # otherwise each rank holds whole matrices
            sharded.append((mesh_dimension, dimension % parameter.ndim))
    if not sharded:
        return None
    mesh_dimension, dimension = sharded[0]
    if len(sharded) > 1:
        raise ValueError(
            f"Muon cannot gather a matrix sharded over several mesh dimensions (placements "
            f"{parameter.placements}); expected parameters sharded by parallel.shard"
        )
    sizes = _chunks(parameter.shape[dimension], mesh.size(mesh_dimension))
    return MatrixSharding(mesh.get_group(mesh_dimension), dimension + 3 - parameter.ndim, sizes)


def _chunks(length: int, ranks: int) -> tuple[int, ...]:
    """Return the sizes of the chunks that ``torch.chunk`` makes, including empty chunks."""
    size = -(-length // ranks)
    return tuple(max(0, min(size, length - rank * size)) for rank in range(ranks))


@attrs.frozen(eq=False)
class _Matrix:
    """Index and shape of one matrix in one of the tensors."""

    tensor: int
    index: int
    shape: tuple[int, int]

    @property
    def cost(self) -> int:
        """Cost of orthogonalizing the matrix, proportional to FLOPs."""
        return self.shape[0] * self.shape[1] * min(self.shape)


def map_matrices(
    tensors: Sequence[Tensor],
    shardings: Sequence[MatrixSharding | None],
    function: Callable[[Tensor, int], Tensor],
) -> list[Tensor]:
    """Apply a function to whole matrices, gathering each sharded matrix on one of its ranks.

    The ranks of a group get about equal shares of the cost. For each batch of matrices, one
    all-to-all gathers the parts of each matrix on one rank, and another returns the parts of the
    results.

    Args:
        tensors: this rank's parts, ``[n, rows, columns]``; all ranks must pass them in the same
            order.
        shardings: the sharding of each tensor, from ``matrix_sharding``.
        function: ``(matrices[n, rows, columns], index of their tensor) -> results``, with results
            of the same shape and dtype.

    Returns:
        This rank's parts of the results, in the order of ``tensors``.
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
            exchange = _MatrixBatch(group, batch, tensors, shardings)
            mine = {
                index: function(whole.unsqueeze(0), batch[index].tensor)[0]
                for index, whole in exchange.gather().items()
            }
            exchange.return_parts(mine, results)
    return results


def _batches(matrices: list[_Matrix], elements: int) -> Iterable[list[_Matrix]]:
    """Yield batches of matrices of similar cost, so that each can be divided evenly over ranks."""
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
    """Assign each matrix to the rank with the least cost so far, and return the ranks."""
    loads, owners = [0] * ranks, []
    for cost in costs:
        owner = loads.index(min(loads))
        loads[owner] += cost
        owners.append(owner)
    return owners


class _MatrixBatch:
    """The exchange of one batch of matrices: gathered on their owners and scattered back."""

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
        """Return the shape of a rank's part of a matrix."""
        rows, columns = self._batch[index].shape
        sharding = self._shardings[index]
        size = sharding.sizes[rank]
        return (size, columns) if sharding.dimension == 1 else (rows, size)

    def gather(self) -> dict[int, Tensor]:
        """Gather the matrices that this rank owns, and return them by their index in the batch."""
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
        """Scatter the results of this rank's matrices, and write the received parts to results."""
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
        """Send ``sent[r]`` to each rank r, and receive parts of the matrices ``indices[r]``.

        The received parts have the shapes of rank ``parts[r]``'s parts of those matrices.
        """
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
