"""Tensors that record whether a checkpoint loader used them."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Methods of tensors that return no tensor and read no element.
_METADATA = {
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "ndimension",
    "nelement",
    "numel",
    "size",
    "storage_offset",
    "stride",
    "__len__",
}


class TrackedTensors:
    """Iterable of named tensors for a loader, which records the tensors that the loader ignored.

        tracked = TrackedTensors(tensors)
        model.load_weights(tracked)
        assert not tracked.ignored

    A tensor counts as used once an operation has read its elements, also through a view. Shapes,
    dtypes and views alone do not count: vLLM takes views of an expert before it decides whether
    this worker needs the expert. So this works whatever names the loader maps the tensors to.

    Args:
        tensors: the tensors by name.
        on_use: is called once for each tensor, in the loader's thread, after its first use.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        on_use: Callable[[str, Tensor], None] | None = None,
    ) -> None:
        self._tensors = tensors
        self._on_use = on_use
        self._used: set[str] = set()
        self._names: list[str] = []

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors:
            self._names.append(name)
            yield name, _tracked(tensor, functools.partial(self._note_use, name, tensor))

    def _note_use(self, name: str, tensor: Tensor) -> None:
        if name not in self._used:
            self._used.add(name)
            if self._on_use is not None:
                self._on_use(name, tensor)

    @property
    def ignored(self) -> list[str]:
        """The names of the tensors that the loader did not use."""
        return sorted(set(self._names) - self._used)


class _Tracked(Tensor):
    """A tensor that calls ``note_use`` when an operation reads its elements.

    Its views are tracked too; other results are plain tensors.
    """

    note_use: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            sources = _tracked_in(args, kwargs or {})
            views = None if _writes(func) else _as_views(result, sources)
            if views is not None:
                return views
            if not _is_metadata(func):
                for source in sources:
                    source.note_use()
        return result


def _tracked(tensor: Tensor, note_use: Callable[[], None]) -> _Tracked:
    tracked = tensor.as_subclass(_Tracked)
    tracked.note_use = note_use
    return tracked


def _tracked_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Tracked]:
    """Return the tracked tensors among the arguments of an operation, lists included."""
    arguments = (*args, *kwargs.values())
    parts = [
        part for one in arguments for part in (one if isinstance(one, list | tuple) else [one])
    ]
    return [part for part in parts if isinstance(part, _Tracked) and "note_use" in part.__dict__]


def _as_views(result: Any, sources: Sequence[_Tracked]) -> Any:
    """Return a result of tensors that all share their memory with sources, tracked; else None."""
    results = result if isinstance(result, list | tuple) else (result,)
    views = []
    for one in results:
        source = _source_of(one, sources) if isinstance(one, Tensor) else None
        if source is None:
            return None
        views.append(_tracked(one, source.note_use))
    if isinstance(result, list | tuple):
        return type(result)(views) if views else None
    return views[0]


def _source_of(tensor: Tensor, sources: Sequence[_Tracked]) -> _Tracked | None:
    """Return the source with which a tensor shares its memory."""
    memory = tensor.untyped_storage()._cdata
    return next((one for one in sources if one.untyped_storage()._cdata == memory), None)


def _writes(func: Any) -> bool:
    """Return whether an operation changes its first argument, by torch's naming convention."""
    name = func.__name__
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _is_metadata(func: Any) -> bool:
    """Return whether an operation reads no element: a property such as ``shape``, or ``dim()``."""
    return func.__name__ == "__get__" or func.__name__ in _METADATA
