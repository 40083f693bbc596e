"""A tracing allocator: the bytes of all tensors that are alive, and their peak."""

import weakref
from contextlib import ExitStack
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from primerl._common.forward_passes import placing_on_host
from primerl._common.ranks import local_part


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations create in this context, while they are alive.

    It works for tensors with and without values. A storage counts from the operation that returns
    it until it is freed. Workspace within an operation is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes that are alive, without those in host memory."""
        self.peak = 0
        """The maximum of ``now`` since the last ``restart``."""
        self.host = 0
        """Bytes that the model moved to host memory since the beginning."""
        self._sizes: dict[int, int] = {}
        """Size of each storage by address."""
        self._contexts = ExitStack()

    def __enter__(self) -> "LiveBytes":
        self._contexts.enter_context(placing_on_host(self._move_to_host))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._contexts.close()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in pytree.tree_leaves(result):
            if isinstance(one, Tensor):
                self._add(one)
        self.peak = max(self.peak, self.now)
        return result

    def restart(self) -> int:
        """Return the peak since the last call, and begin a new one."""
        peak, self.peak = self.peak, self.now
        return peak

    def ignore(self, *tensors: Tensor) -> None:
        """Do not count the storages of tensors, because they are counted elsewhere."""
        for tensor in tensors:
            self._add(tensor)
            place = local_part(tensor).untyped_storage()._cdata
            self.now -= self._sizes[place]
            self._sizes[place] = 0

    def _add(self, tensor: Tensor) -> None:
        storage = local_part(tensor).untyped_storage()
        place = storage._cdata
        if place not in self._sizes:
            self._sizes[place] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._forget, place)

    def _forget(self, place: int) -> None:
        self.now -= self._sizes.pop(place)

    def _move_to_host(self, tensor: Tensor) -> None:
        self.ignore(tensor)
        self.host += tensor.untyped_storage().nbytes()
