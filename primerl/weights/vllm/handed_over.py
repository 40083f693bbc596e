"""Which of the tensors that were handed to a loader it did anything with."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class HandedOver:
    """Named tensors on their way to a loader, and the names of those that it ignored.

        handed = HandedOver(tensors)
        model.load_weights(handed)
        assert not handed.ignored

    A loader that skips a tensor by its name never reads its elements; every other applies some
    operation of torch to it. That needs no knowledge of the names that the loader maps it to.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._tensors = tensors
        self._used: set[str] = set()
        self._names: list[str] = []

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors:
            self._names.append(name)
            watched = tensor.as_subclass(_Watched)
            watched.name_in_checkpoint, watched.used = name, self._used
            yield name, watched

    @property
    def ignored(self) -> list[str]:
        """Names of tensors that nothing was done with."""
        return sorted(set(self._names) - self._used)


class _Watched(Tensor):
    """A tensor that notes its name when something is done with it; the results are plain."""

    name_in_checkpoint: str
    used: set[str]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for one in (*args, *(kwargs or {}).values()):
            for part in one if isinstance(one, list | tuple) else (one,):
                if isinstance(part, _Watched) and "used" in part.__dict__:
                    part.used.add(part.name_in_checkpoint)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
