"""Checks of tensor arguments, with errors that name the argument."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from primerl._common.host_memory import together

P = ParamSpec("P")
R = TypeVar("R")

_KINDS: dict[str, Callable[[torch.dtype], bool]] = {
    "a floating-point": lambda dtype: dtype.is_floating_point,
    "a bool": lambda dtype: dtype == torch.bool,
    # As indices, torch refuses other dtypes, and treats uint8 as a mask.
    "an int32 or int64": lambda dtype: dtype in (torch.int32, torch.int64),
}


def checked(*, finite: Iterable[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to check its tensors against its jaxtyping annotations before each call.

    Every argument annotated with a shape must be a tensor with a dtype of the annotated kind. An
    axis must have the same size in all arguments that name it. Arguments listed in ``finite`` must
    be finite: they come from elsewhere, and a NaN in them is a mistake upstream.

    Raises (when the decorated function is called):
        ValueError: an argument has the wrong shape or dtype, or is not finite; the message names
            it, its shape or dtype, and the argument that it conflicts with.
    """
    must_be_finite = frozenset(finite)

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(fn).parameters
        names = list(parameters)
        optional = {name for name in names if parameters[name].default is None}
        specs = {
            name: spec
            for name in names
            if (spec := _specification(parameters[name].annotation)) is not None
        }

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
            tensors = {
                name: given[name]
                for name in specs
                if name in given and not (given[name] is None and name in optional)
            }
            _check_shapes(tensors, specs)
            for name in tensors:
                if name in must_be_finite:
                    require_finite(name, tensors[name])
            return fn(*args, **kwargs)

        return call

    return decorate


def require_finite(name: str, x: Tensor, rows: Tensor | None = None) -> None:
    """Raise ValueError if a tensor has an infinite or NaN entry, in ``rows`` if given."""
    if torch.compiler.is_compiling():  # the check would break the graph
        return
    if rows is None:
        (x,) = together(x)
        wrong = ~x.isfinite()
    else:
        x, rows = together(x, rows)
        wrong = ~x.isfinite() & rows
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        where = ", ".join(map(str, first))
        what = "rows" if x.ndim == 1 else "entries"
        raise ValueError(
            f"{name}[{where}] is {x[first].item()} ({int(wrong.sum())} of {x.numel()} {what} are "
            f"not finite); expected finite {name}: in rows that are not trained, put any finite "
            "number, such as 0"
        )


def _specification(annotation: Any) -> tuple[str, list[str]] | None:
    """The kind of dtype and the axes of a jaxtyping annotation, which may be ``| None``.

    None for any other annotation.
    """
    alternatives = get_args(annotation)
    if len(alternatives) == 2 and alternatives[1] is type(None):
        annotation = alternatives[0]
    axes, dtypes = getattr(annotation, "dim_str", None), getattr(annotation, "dtypes", None)
    if axes is None or not isinstance(dtypes, tuple | list):
        return None
    named = {"bool": "a bool", "float32": "a floating-point"}
    kind = next((named[dtype] for dtype in named if dtype in dtypes), "an int32 or int64")
    return kind, axes.split()


def _check_shapes(tensors: dict[str, Any], specs: dict[str, tuple[str, list[str]]]) -> None:
    sizes: dict[str, tuple[int, str]] = {}

    def beside(other: str) -> str:
        return f"but {other} has shape {tuple(tensors[other].shape)}"

    for name, x in tensors.items():
        kind, axes = specs[name]
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is of type {type(x).__name__}, expected a torch tensor")
        shape = tuple(x.shape)
        if len(shape) != len(axes):
            known = next((f"{beside(other)}: " for _, other in sizes.values()), "")
            raise ValueError(f"{name} has shape {shape}, {known}expected [{', '.join(axes)}]")
        if not _KINDS[kind](x.dtype):
            raise ValueError(f"{name} has dtype {x.dtype}, expected {kind} tensor")
        for axis, size in zip(axes, shape, strict=True):
            expected, other = sizes.setdefault(axis, (size, name))
            if size != expected:
                raise ValueError(
                    f"{name} has shape {shape}, {beside(other)}: expected the same {axis}"
                )
