"""Tensors that record whether a checkpoint loader used them."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class TrackedTensors:
    """Iterable of named tensors for a loader, which records the tensors that the loader ignored.

        tracked = TrackedTensors(tensors)
        model.load_weights(tracked)
        assert not tracked.ignored

    A tensor counts as used once any torch operation was applied to it. A loader that skips a tensor
    by its name applies none. Therefore this works whatever names the loader maps the tensors to.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._tensors = tensors
        self._used: set[str] = set()
        self._names: list[str] = []

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors:
            self._names.append(name)
            tracked = tensor.as_subclass(_Tracked)
            tracked.name_in_checkpoint, tracked.used = name, self._used
            yield name, tracked

    @property
    def ignored(self) -> list[str]:
        """The names of the tensors that the loader did not use."""
        return sorted(set(self._names) - self._used)


class _Tracked(Tensor):
    """A tensor that records its name when an operation uses it; results are plain tensors."""

    name_in_checkpoint: str
    used: set[str]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for one in (*args, *(kwargs or {}).values()):
            for part in one if isinstance(one, list | tuple) else (one,):
                if isinstance(part, _Tracked) and "used" in part.__dict__:
                    part.used.add(part.name_in_checkpoint)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
