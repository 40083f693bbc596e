"""Optimizer states in host memory, copied to the device part by part during a step."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from primerl._common.ranks import local_part
from primerl.optim.pinned_memory import PinnedMemory

PART_ELEMENTS = 2**28


class Offload(Optimizer):
    """Optimizer wrapper that keeps states in host memory and computes updates on the device.

    A step updates the parameters part by part. While one part is updated, the states of the next
    are copied to the device, and those of the previous are copied back. Results are bitwise those
    of the wrapped optimizer. Use the wrapper in its place, also for learning-rate schedules and
    checkpoints:

        optimizer = optim.Offload(torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True))

    On a CUDA device, host memory is pinned, and copies overlap with computation. ``prefetch`` lets
    the first copies overlap with the backward pass, too. On a CPU, states are copied too.

    Args:
        optimizer: an optimizer that updates each parameter from its own gradient and states, such
            as ``AdamW``, ``SGD`` or ``Muon``.
        part_elements: number of parameter elements in a part, over all ranks. The states of two
            parts are on the device at a time.

    Raises:
        ValueError: ``part_elements`` is below 1.
    """

    def __init__(self, optimizer: Optimizer, *, part_elements: int = PART_ELEMENTS) -> None:
        if part_elements < 1:
            raise ValueError(f"part_elements is {part_elements}, expected at least 1")
        self._optimizer = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)  # the same groups, not copies
        self._part_elements = part_elements
        self._on_host: dict[Tensor, dict[str, Tensor]] = {}
        self._copies = _Copies(_parameters(optimizer))
        self._ahead: dict[Tensor, dict[str, tuple[int, Tensor]]] = {}
        """Copies that ``prefetch`` made of states, with the versions of the states."""
        self._keep_on_host()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer."""
        if any(group is param_group for group in self._optimizer.param_groups):
            super().add_param_group(param_group)
        else:
            self._optimizer.add_param_group(param_group)
            self.param_groups = list(self._optimizer.param_groups)

    @torch.no_grad()
    def prefetch(self) -> None:
        """Start to copy the states of the first part to the device, before ``step`` needs them.

        Call it before the last backward pass of a step, during which the device copies them:

            optimizer.prefetch()
            objective.backward()
            optimizer.step()

        The copies take device memory until ``step``. Results don't change; a state that was loaded
        or written since then is copied again. Without states, as before the first step, nothing
        happens.
        """
        trained = [p for p in _parameters(self._optimizer) if p.requires_grad]
        self._copies.begin()
        with self._copies.to_device():
            for parameter, name, value in self._states(self._first_part(trained)):
                copies = self._ahead.setdefault(parameter, {})
                if name not in copies or copies[name][0] != _version(value):
                    copies[name] = _version(value), self._copies.copied(value)

    def _first_part(self, parameters: list[Tensor]) -> list[Tensor]:
        return next(_parts(parameters, self._part_elements), [])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; return the result of ``closure``, if given."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        gradients = {p: p.grad for p in _parameters(self._optimizer) if p.grad is not None}
        for parameter in gradients:  # the optimizer skips parameters without a gradient
            parameter.grad = None
        parts = list(_parts(gradients, self._part_elements))
        self._copies.begin()
        try:
            for n, part in enumerate(parts):
                self._fetch(part if n == 0 else [])
                self._ahead.clear()
                self._copies.arrive()
                self._fetch(parts[n + 1] if n + 1 < len(parts) else [])
                for parameter in part:
                    parameter.grad = gradients[parameter]
                self._optimizer.step()
                for parameter in part:
                    parameter.grad = None
                self._store(part)
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped optimizer; its tensors are in host memory."""
        self._copies.finish()
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; while it loads, all states are on the device at once."""
        self._copies.finish()
        self._optimizer.load_state_dict(state_dict)
        self._keep_on_host()

    def _keep_on_host(self) -> None:
        """Adopt the wrapped optimizer's groups, and move its states to the host."""
        self.param_groups = list(self._optimizer.param_groups)
        self.state = self._optimizer.state
        self._ahead.clear()
        self._store(_parameters(self._optimizer))

    def _states(self, parameters: list[Tensor]) -> Iterator[tuple[Tensor, str, Tensor]]:
        for parameter in parameters:
            for name, value in list(self._optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor) and value.ndim:  # not the step count
                    yield parameter, name, value

    def _fetch(self, parameters: list[Tensor]) -> None:
        with self._copies.to_device():
            for parameter, name, value in self._states(parameters):
                version, copy = self._ahead.get(parameter, {}).pop(name, (None, value))
                if version != _version(value):
                    copy = self._copies.copied(value)
                self._optimizer.state[parameter][name] = self._copies.fetched(copy)

    def _store(self, parameters: list[Tensor]) -> None:
        self._copies.expect(
            value
            for parameter, name, value in self._states(parameters)
            if name not in self._on_host.get(parameter, {})
        )
        with self._copies.to_host():
            for parameter, name, value in self._states(parameters):
                kept = self._on_host.setdefault(parameter, {})
                if name not in kept:
                    kept[name] = self._copies.like(value)
                self._copies.store(value, kept[name])
                self._optimizer.state[parameter][name] = kept[name]


def _version(value: Tensor) -> int:
    """Return a number that changes when a state is written."""
    return local_part(value)._version


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _parts(parameters: Iterable[Tensor], elements: int) -> Iterator[list[Tensor]]:
    """Divide parameters into parts by full (unsharded) size, so that parts agree on all ranks."""
    part: list[Tensor] = []
    held = 0
    for parameter in parameters:
        if part and held + parameter.numel() > elements:
            yield part
            part, held = [], 0
        part.append(parameter)
        held += parameter.numel()
    if part:
        yield part


class _Copies:
    """Copies of states between host and device, on one CUDA stream per direction."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._device = parameters[0].device
        self._cuda = self._device.type == "cuda"
        self._in: torch.cuda.Stream | None = None
        self._out: torch.cuda.Stream | None = None
        if self._cuda:
            self._in = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._out = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._memory = PinnedMemory()
        self._updates: torch.cuda.Stream | None = None
        """The stream on which the update uses the copied states."""

    def to_device(self) -> AbstractContextManager[Any]:
        """Return a context in which to copy states to the device."""
        if self._cuda:
            self._updates = torch.cuda.current_stream(self._device)
        return torch.cuda.stream(self._in)

    def to_host(self) -> AbstractContextManager[Any]:
        """Return a context in which to copy states to the host, after the preceding update."""
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._out)

    def begin(self) -> None:
        """Make copies to the device wait for the previous step's copies to the host."""
        if self._in is not None and self._out is not None:
            self._in.wait_stream(self._out)

    def arrive(self) -> None:
        """Make subsequent computation wait for the copies to the device."""
        if self._in is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._in)

    def finish(self) -> None:
        """Wait until all copies are complete, before states in host memory are read or written."""
        for stream in (self._in, self._out):
            if stream is not None:
                stream.synchronize()

    def expect(self, values: Iterable[Tensor]) -> None:
        """Announce that host memory for states like these will be allocated next."""
        if self._cuda:
            self._memory.expect(values)

    def like(self, value: Tensor) -> Tensor:
        """Allocate host memory for a state, or an empty tensor if it is on the ``meta`` device."""
        if self._cuda:
            return self._memory.like(value)
        return torch.empty_like(value, device="meta" if value.is_meta else "cpu")

    def copied(self, value: Tensor) -> Tensor:
        """Copy a state to the device."""
        return value.to(self._device, non_blocking=True, copy=True)

    def fetched(self, copy: Tensor) -> Tensor:
        """Return a copy on the device, for use by the update."""
        if self._updates is not None:  # that stream uses memory allocated on the copy stream
            local_part(copy).record_stream(self._updates)
        return copy

    def store(self, value: Tensor, kept: Tensor) -> None:
        """Copy a state back to host memory."""
        local_part(kept).copy_(local_part(value), non_blocking=True)
        if self._out is not None:
            local_part(value).record_stream(self._out)
