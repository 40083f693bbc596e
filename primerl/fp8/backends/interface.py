"""Interface of FP8 backends, and checks of their operands."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor

from primerl._common.forward_passes import group_ends
from primerl.fp8.format import Format, Quantized


@attrs.frozen(kw_only=True, eq=False)
class Groups:
    """Rows sorted by group: where each group ends, on the device and on the host."""

    ends: Int[Tensor, " e"]
    bounds: tuple[tuple[int, int], ...]
    """The first row of each group, and the row after its last."""

    @classmethod
    def read(cls, ends: Int[Tensor, " e"], *, rows: int) -> "Groups":
        """Read where groups end, for which the host waits for the device once.

        If ``ends`` has no values (a meta or fake tensor), all groups are assumed to be equally
        large.

        Raises:
            ValueError: groups overlap, or don't cover all rows.
        """
        found = group_ends(ends, rows)
        bounds = tuple(itertools.pairwise([0, *found]))
        if any(end < begin for begin, end in bounds) or bounds[-1][1] != rows:
            raise ValueError(
                f"groups end at {found}; expected nondecreasing numbers, of which the last is "
                f"{rows}, the number of rows"
            )
        return cls(ends=ends, bounds=bounds)


@runtime_checkable
class Backend(Protocol):
    """Backend that computes ``a b^T`` for operands with rows along the summed dimension."""

    name: str

    def refusal(self, form: Format, device: torch.device) -> str | None:
        """Return why this backend can't multiply in a format on a device; None if it can."""
        ...

    def multiply(self, a: Quantized, b: Quantized, *, dtype: torch.dtype) -> Float[Tensor, "m n"]:
        """Compute ``a[m, k] b[n, k]^T``."""
        ...

    def multiply_grouped(
        self, a: Quantized, b: Quantized, groups: Groups, *, dtype: torch.dtype
    ) -> Float[Tensor, "m n"]:
        """Multiply the rows of ``a[m, k]`` in group i by ``b[i, n, k]^T``."""
        ...


def check_operands(a: Quantized, b: Quantized) -> None:
    """Check that two operands can be multiplied.

    Raises:
        ValueError: the operands differ in scale type, block size or length of the summed dimension.
    """
    if a.scale != b.scale:
        raise ValueError(
            f"scales of type {a.scale!r} and {b.scale!r} can't be multiplied: quantize both "
            "operands with the same scale= (the sampler's)"
        )
    if a.block != b.block or a.values.shape[-1] != b.values.shape[-1]:
        raise ValueError(
            f"operands of shapes {tuple(a.values.shape)} and {tuple(b.values.shape)}, in blocks "
            f"of {a.block} and {b.block}, can't be multiplied: their last dimensions or blocks "
            "differ"
        )


def by_group(
    backend: Backend, a: Quantized, b: Quantized, groups: Groups, *, dtype: torch.dtype
) -> Float[Tensor, "m n"]:
    """Implement ``multiply_grouped`` with one product per nonempty group."""
    parts = [
        backend.multiply(_rows(a, begin, end), _matrix(b, index), dtype=dtype)
        for index, (begin, end) in enumerate(groups.bounds)
        if end > begin
    ]
    return torch.cat(parts) if parts else a.values.new_zeros(0, b.values.shape[-2], dtype=dtype)


def _rows(a: Quantized, begin: int, end: int) -> Quantized:
    return Quantized(
        values=a.values[begin:end], scales=a.scales[begin:end], rows=a.rows, block=a.block
    )


def _matrix(b: Quantized, index: int) -> Quantized:
    return Quantized(values=b.values[index], scales=b.scales[index], rows=b.rows, block=b.block)


def check_signature(function: Callable[..., Any], parameters: list[str]) -> None:
    """Check that a library's function has the parameters that this code passes.

    Raises:
        RuntimeError: parameters are missing; the message names them.
    """
    try:
        found = inspect.signature(function).parameters
    except ValueError:  # an extension's function without a signature
        return
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in found.values()):
        return
    missing = [name for name in parameters if name not in found]
    if missing:
        raise RuntimeError(
            f"{function.__module__}.{function.__name__} has no parameter {', '.join(missing)}; "
            f"it has {', '.join(found)}: this version is not supported, use another backend"
        )
