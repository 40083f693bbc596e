"""Matrices that are divided among ranks, made whole: each on one of them, and back."""

from collections.abc import Callable, Iterable, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

BATCH_ELEMENTS = 2**28
"""Elements of whole matrices, per rank, that are on the way at a time."""


@attrs.frozen(eq=False)
class Division:
    """How the matrices of a tensor ``[n, rows, columns]`` lie on ranks."""

    group: dist.ProcessGroup
    dimension: int
    """1 or 2: each rank has some of the rows, or of the columns."""
    sizes: tuple[int, ...]
    """How many of them, of each rank of the group."""


def division(parameter: Tensor) -> Division | None:
    """How a parameter's matrices are divided; None if this rank has those that it has whole.

    Raises:
        ValueError: its matrices are divided along two dimensions of its mesh, or in another way.
    """
    if not isinstance(parameter, DTensor):
        return None
    mesh, over = parameter.device_mesh, []
    for of_mesh, placement in enumerate(parameter.placements):
        if mesh.size(of_mesh) == 1 or isinstance(placement, Replicate):
            continue
        dimension = getattr(placement, "dim", None)  # of Shard, and of FSDP2's _StridedShard
        if dimension is None:
            raise ValueError(f"Muon cannot gather a parameter placed as {parameter.placements}")
        if parameter.ndim == 2 or dimension % 3:  # otherwise whole matrices lie on each rank
            over.append((of_mesh, dimension % parameter.ndim))
    if not over:
        return None
    of_mesh, dimension = over[0]
    if len(over) > 1:
        raise ValueError(
            f"Muon cannot gather a matrix that is divided more than once ({parameter.placements}); "
            "expected parameters sharded by parallel.shard"
        )
    sizes = _chunks(parameter.shape[dimension], mesh.size(of_mesh))
    return Division(mesh.get_group(of_mesh), dimension + 3 - parameter.ndim, sizes)


def _chunks(length: int, ranks: int) -> tuple[int, ...]:
    """The sizes of the parts that ``torch.chunk`` makes, empty ones too."""
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
        """Of orthogonalizing it, but for a factor."""
        return self.shape[0] * self.shape[1] * min(self.shape)


def map_whole(
    tensors: Sequence[Tensor],
    divisions: Sequence[Division | None],
    function: Callable[[Tensor, int], Tensor],
    *,
    batch_elements: int = BATCH_ELEMENTS,
) -> list[Tensor]:
    """Apply a function to whole matrices, each on one of the ranks that have parts of it.

    Every rank of a group gets matrices of about equal cost. They travel in batches: an all-to-all
    brings the parts of each matrix together, another brings those of the results back.

    Args:
        tensors: this rank's ``[n, rows, columns]``; all ranks pass theirs in the same order.
        divisions: of each, by ``division``.
        function: ``(matrices[n, rows, columns], index of their tensor) -> results``, of the same
            shape and dtype.
        batch_elements: of whole matrices for each rank, in a batch.
    """
    results = [
        function(tensor, index) if of is None else torch.empty_like(tensor)
        for index, (tensor, of) in enumerate(zip(tensors, divisions, strict=True))
    ]
    by_group: dict[dist.ProcessGroup, list[_Matrix]] = {}
    for tensor, of in enumerate(divisions):
        if of is not None:
            shape = list(tensors[tensor].shape)
            shape[of.dimension] = sum(of.sizes)
            matrices = [_Matrix(tensor, n, (shape[1], shape[2])) for n in range(shape[0])]
            by_group.setdefault(of.group, []).extend(matrices)
    for group, matrices in by_group.items():
        ranks = dist.get_world_size(group)
        for batch in _batches(matrices, ranks * batch_elements):
            exchange = _Exchange(group, batch, tensors, divisions)
            mine = {
                index: function(whole.unsqueeze(0), batch[index].tensor)[0]
                for index, whole in exchange.gather().items()
            }
            exchange.return_parts(mine, results)
    return results


def _batches(matrices: list[_Matrix], elements: int) -> Iterable[list[_Matrix]]:
    """Alike ones together, so that the ranks of a batch get equal shares."""
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
    """Each to the rank that has least so far."""
    loads, owners = [0] * ranks, []
    for cost in costs:
        owner = loads.index(min(loads))
        loads[owner] += cost
        owners.append(owner)
    return owners


class _Exchange:
    """One batch of matrices, on its way to their owners and back."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        batch: list[_Matrix],
        tensors: Sequence[Tensor],
        divisions: Sequence[Division | None],
    ) -> None:
        self._group, self._batch, self._tensors = group, batch, tensors
        self._rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._divisions = [of for of in (divisions[m.tensor] for m in batch) if of is not None]
        owners = _owners([matrix.cost for matrix in batch], ranks)
        self._of_rank = [[i for i, o in enumerate(owners) if o == rank] for rank in range(ranks)]
        self._mine = self._of_rank[self._rank]

    def _shape(self, index: int, rank: int) -> tuple[int, int]:
        """Of a rank's part of a matrix."""
        rows, columns = self._batch[index].shape
        of = self._divisions[index]
        return (of.sizes[rank], columns) if of.dimension == 1 else (rows, of.sizes[rank])

    def gather(self) -> dict[int, Tensor]:
        """The whole matrices that this rank owns, by their index in the batch."""
        sent = [
            [self._tensors[self._batch[i].tensor][self._batch[i].index] for i in indices]
            for indices in self._of_rank
        ]
        received = self._all_to_all(sent, [self._mine] * len(sent), range(len(sent)))
        return {
            index: torch.cat(
                [parts[n] for parts in received], dim=self._divisions[index].dimension - 1
            )
            for n, index in enumerate(self._mine)
        }

    def return_parts(self, mine: dict[int, Tensor], results: list[Tensor]) -> None:
        """Send the parts of this rank's results to where they belong, and write those received."""
        split = [
            torch.split(mine[i], list(of.sizes), dim=of.dimension - 1)
            for i in self._mine
            for of in [self._divisions[i]]
        ]
        ranks = range(len(self._of_rank))
        sent = [[parts[rank] for parts in split] for rank in ranks]
        received = self._all_to_all(sent, self._of_rank, [self._rank] * len(ranks))
        for indices, parts in zip(self._of_rank, received, strict=True):
            for i, part in zip(indices, parts, strict=True):
                results[self._batch[i].tensor][self._batch[i].index].copy_(part)

    def _all_to_all(
        self, sent: list[list[Tensor]], indices: list[list[int]], parts_of: Iterable[int]
    ) -> list[list[Tensor]]:
        """From each rank r: of the matrices ``indices[r]``, the parts of rank ``parts_of[r]``."""
        like = self._tensors[0]
        flat = [tensor.reshape(-1) for of_rank in sent for tensor in of_rank]
        shapes = [
            [self._shape(index, part) for index in of_rank]
            for of_rank, part in zip(indices, parts_of, strict=True)
        ]
        sizes = [[rows * columns for rows, columns in of_rank] for of_rank in shapes]
        received = like.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            received,
            torch.cat(flat) if flat else like.new_empty(0),
            [sum(of_rank) for of_rank in sizes],
            [sum(tensor.numel() for tensor in of_rank) for of_rank in sent],
            group=self._group,
        )
        return [
            [
                part.view(shape)
                for part, shape in zip(torch.split(of_rank, size), shape_of, strict=True)
            ]
            for of_rank, size, shape_of in zip(
                torch.split(received, [sum(of_rank) for of_rank in sizes]),
                sizes,
                shapes,
                strict=True,
            )
        ]
