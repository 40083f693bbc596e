"""Tensors that a checkpoint loader is given, and a record of those that it used."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that read no element of a tensor, beside those that _reads_nothing finds by a rule.
_NO_READS = {"_unsafe_view", "is_pinned", "is_same_size", "is_set_to", "resize_as_"}


class TrackedTensors(TorchDispatchMode):
    """Iterable of named tensors for a loader, which records the tensors that the loader ignored.

        with TrackedTensors(tensors) as tracked:
            model.load_weights(tracked)
        assert not tracked.ignored

    A tensor counts as used once an operation of torch has read its elements in the context, also
    through a view, or has changed them. Shapes, dtypes, views and new tensors of the same shape do
    not count: vLLM takes views of an expert before it decides whether this worker needs the expert.
    The loader gets plain tensors, which share the memory of those that came.

    Some uses are not seen, so that the tensor is reported as ignored although it was used: those in
    other threads, those after the context, and those that bypass torch's dispatcher (``numpy()``,
    ``tolist()``, a kernel that is given ``data_ptr()``, or ``parameter.data = tensor`` while the
    parameter is not read afterwards).

    Args:
        tensors: the tensors by name.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = tensors
        self._names: set[str] = set()
        self._used: set[str] = set()
        self._storages: dict[int, tuple[StorageWeakRef, str]] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors:
            self._names.add(name)
            given = _with_own_storage(tensor)
            # While there is a weak reference, no other storage gets the same address.
            reference = StorageWeakRef(given.untyped_storage())  # type: ignore[no-untyped-call]
            self._storages[reference.cdata] = reference, name
            yield name, given

    @property
    def ignored(self) -> list[str]:
        """The names of the tensors that the loader was given and did not use."""
        return sorted(self._names - self._used)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _reads_nothing(func):
            with torch._C.DisableTorchFunctionSubclass():
                storages = _storages_in((*args, *(kwargs or {}).values()))
            self._used.update(self._storages[one][1] for one in storages & self._storages.keys())
        return result


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor on the same memory that shares its storage only with its own views."""
    plain = tensor.resolve_conj().resolve_neg()
    return torch.empty(0, dtype=plain.dtype, device=plain.device).set_(
        plain.untyped_storage()[:], plain.storage_offset(), plain.shape, plain.stride()
    )


def _storages_in(values: Iterable[Any]) -> set[int]:
    """Return the addresses of the storages of all tensors among values, lists included."""
    parts = [part for one in values for part in (one if isinstance(one, list | tuple) else [one])]
    return {
        part.untyped_storage()._cdata
        for part in parts
        if isinstance(part, Tensor) and part.layout is torch.strided
    }


@functools.cache
def _reads_nothing(func: Any) -> bool:
    """Return whether an operation only takes views, asks for metadata, or makes tensors alike."""
    name = func.__name__.partition(".")[0]
    return func.is_view or name in _NO_READS or name.startswith("new_") or name.endswith("_like")
