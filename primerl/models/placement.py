"""The mapping from tensors of a Hugging Face checkpoint to regions of a model's parameters."""

from collections.abc import Iterable

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from primerl._common.checkpoint_tensors import converted, distinct_tensors, layers_of

Region = tuple[slice, ...]

# The dimensions of the small parameters on which transformers' conversion is traced.
SMALL = 4


@attrs.frozen
class ParameterPart:
    """A tensor of the checkpoint, and the region of a parameter that it fills."""

    source: str
    """Name of the tensor in the checkpoint."""
    axes: tuple[int | None, ...]
    """For each axis of the parameter, the source's axis along it; None: a single index."""
    begins: tuple[float, ...]
    """Begin of the region on each axis: an index if ``axes`` has None, else a fraction of the
    axis."""
    ends: tuple[float, ...]

    def region(self, shape: torch.Size, source_shape: Iterable[int]) -> Region:
        """Compute the region of a parameter of this shape.

        Raises:
            ValueError: the source's shape is not that of the region.
        """
        expected = [1] * sum(axis is not None for axis in self.axes)
        found = []
        for axis, begin, end, whole in zip(self.axes, self.begins, self.ends, shape, strict=True):
            scale = 1 if axis is None else whole
            found.append(slice(round(begin * scale), round(end * scale)))
            if axis is not None:
                expected[axis] = found[-1].stop - found[-1].start
        if list(source_shape) != expected:
            raise ValueError(
                f"{self.source} of the checkpoint has shape {list(source_shape)}, but the model's "
                f"configuration requires {expected}"
            )
        return tuple(found)


def pieces(model: nn.Module) -> dict[str, list[ParameterPart]]:
    """Map each parameter and saved buffer to the checkpoint's tensors that it consists of.

    ``transformers`` fuses experts when it loads and splits them when it saves. The mapping is found
    by applying its own conversion to small tensors of numbered elements: the numbers in the result
    show where each element came from.

    Raises:
        ValueError: a tensor of the checkpoint is not a block of one parameter.
    """
    tensors = distinct_tensors(model)
    found: dict[str, list[ParameterPart]] = {name: [] for name in tensors}
    for names in layers_of(tensors):
        numbered, first = {}, 0
        for name in names:
            shape = _small(name, tensors[name].shape)
            count = max(shape.numel(), 1)
            numbered[name] = torch.arange(first, first + count).view(shape)
            first += count
        owners = dict(numbered)  # a copy, because the conversion empties its argument
        for source, numbers in converted(model, numbered).items():
            owner = _owner(owners, numbers)
            if owner is None:
                raise ValueError(
                    f"{source} of the checkpoint combines several parameters of the model; "
                    "expected a block of one parameter"
                )
            found[owner].append(_piece(source, numbers, owners[owner], tensors[owner].shape))
    return found


def local_region(tensor: Tensor) -> Region:
    """Return the region of a tensor that this rank holds: the whole tensor if not sharded."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    rows = [torch.arange(size) for size in tensor.shape]
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    # The innermost mesh dimension, such as that of experts, was sharded first.
    for dimension in reversed(range(tensor.device_mesh.ndim)):
        axis = getattr(tensor.placements[dimension], "dim", None)
        if axis is not None:
            parts = rows[axis].chunk(tensor.device_mesh.size(dimension))
            index = coordinate[dimension]
            rows[axis] = parts[index] if index < len(parts) else rows[axis][:0]
    found = tuple(slice(int(r[0]), int(r[-1]) + 1) if len(r) else slice(0, 0) for r in rows)
    local = tensor.to_local().shape
    if any(part.stop - part.start != size for part, size in zip(found, local, strict=True)):
        raise ValueError(f"a shard has shape {tuple(local)}, but expected the region {found}")
    return found


def _small(name: str, shape: torch.Size) -> torch.Size:
    """Shrink all dimensions of a shape, except the number of experts."""
    stacked = len(shape) == 3 or "experts" in name
    kept = shape[:1] if stacked else shape[:0]
    return torch.Size([*kept, *(min(size, SMALL) for size in shape[len(kept) :])])


def _owner(numbered: dict[str, Tensor], numbers: Tensor) -> str | None:
    low, high = int(numbers.min()), int(numbers.max())
    for name, own in numbered.items():
        first = int(own.reshape(-1)[0])
        if first <= low and high < first + own.numel():
            return name
    return None


def _piece(source: str, numbers: Tensor, whole: Tensor, shape: torch.Size) -> ParameterPart:
    where = torch.unravel_index(numbers - whole.reshape(-1)[:1], whole.shape) if whole.ndim else ()
    axes: list[int | None] = []
    spans: list[tuple[float, float]] = []
    for axis, along in enumerate(where):
        moves = {k: along.diff(dim=k) for k in range(numbers.ndim) if numbers.shape[k] > 1}
        follows = [k for k, steps in moves.items() if (steps != 0).any()]
        if not follows and numbers.ndim == whole.ndim:  # an axis with one entry in both tensors
            follows = [k for k in range(numbers.ndim) if k not in moves and k not in axes][:1]
        elif len(follows) == 1 and (moves[follows[0]] != 1).any():
            follows = []  # not contiguous along this axis
        first, last = int(along.min()), int(along.max()) + 1
        if follows:
            axes.append(follows[0])
            spans.append((first / whole.shape[axis], last / whole.shape[axis]))
        elif last == first + 1 and whole.shape[axis] == shape[axis]:
            axes.append(None)
            spans.append((first, last))
        else:
            raise ValueError(
                f"{source} of the checkpoint is not a contiguous block of a parameter of the model"
            )
    return ParameterPart(
        source, tuple(axes), tuple(b for b, _ in spans), tuple(e for _, e in spans)
    )
