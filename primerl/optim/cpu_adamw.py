"""AdamW with states and update on the CPU, for parameters on any device."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from primerl._common.ranks import local_part
from primerl.optim.pinned_memory import PinnedMemory


class CPUAdamW(Optimizer):
    """AdamW with float32 master weights and states in host memory, updated by the CPU.

        g, p from the device;  w <- p where p is not w rounded
        w, m, v <- AdamW(w, m, v, g) by torch's fused kernel;  p <- w

    The device holds only parameters p and gradients g, which may be bfloat16: small updates
    accumulate in w. If a parameter changed between two steps (loaded weights, an average, a bound),
    the next step starts from the new value. A step copies each parameter and its gradient to the
    host, and the parameter back. On a CUDA device, the copies go through pinned memory while other
    parameters are updated. With float32 parameters on a CPU, results are bitwise those of
    ``torch.optim.AdamW(fused=True)``.

    Args:
        params: parameters or parameter groups, sharded or not.
        lr: the learning rate.
        betas: decay rates of the first and second moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.

    Raises:
        ValueError: ``lr`` or ``weight_decay`` is negative, or ``betas`` are not within [0, 1).
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        if not lr >= 0 or not weight_decay >= 0:
            raise ValueError(f"lr is {lr}, weight_decay {weight_decay}; expected at least 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are {betas}; expected numbers from 0 to less than 1")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._memory = PinnedMemory()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; return the result of ``closure``, if given."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        trained = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        self._expect(parameter for parameter, _ in trained)
        copies = [_PendingCopy(parameter) for parameter, _ in trained[:1]]
        for n, (parameter, group) in enumerate(trained):
            value, gradient = copies.pop().wait()
            copies += [_PendingCopy(parameter) for parameter, _ in trained[n + 1 : n + 2]]
            state = self._state(parameter)
            weight = local_part(state["weight"])
            # Adopt values that were written into the parameter since its last step.
            torch.where(weight.to(value.dtype) == value, weight, value.float(), out=weight)
            update_adamw([weight], [gradient], [state], group, fused=True)
            local_part(parameter).copy_(weight, non_blocking=True)
        return loss

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("weight", "exp_avg", "exp_avg_sq"):
                state[name] = self._on_host(parameter).zero_()
            local_part(state["weight"]).copy_(local_part(parameter))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._memory = PinnedMemory()  # also before a state dict is loaded, which replaces states

    def _expect(self, parameters: Iterable[Tensor]) -> None:
        """Announce that states of parameters will be allocated next, unless they have any."""
        new = [one.detach() for one in parameters if not self.state.get(one)]
        if new and new[0].is_cuda:
            self._memory.expect(3 * new, dtype=torch.float32)

    def _on_host(self, parameter: Tensor) -> Tensor:
        """Allocate host memory for a state, or an empty tensor if it is on the ``meta`` device."""
        if parameter.is_cuda:
            return self._memory.like(parameter.detach(), dtype=torch.float32)
        host = "meta" if parameter.is_meta else "cpu"
        return torch.empty_like(parameter, dtype=torch.float32, device=host)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; unlike in other optimizers, states stay float32 and on the host."""
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        self._expect(
            parameter
            for index, parameter in zip(saved, parameters, strict=True)
            if state_dict["state"].get(index)
        )
        for index, parameter in zip(saved, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                self._state(parameter)[name].copy_(value)


def update_adamw(
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Any]],
    group: dict[str, Any],
    *,
    fused: bool | None = None,
) -> None:
    """Apply AdamW to this rank's shards of parameters, and update its shards of their states."""
    adamw(
        parameters,
        gradients,
        [local_part(state["exp_avg"]) for state in states],
        [local_part(state["exp_avg_sq"]) for state in states],
        [],
        [state["step"] for state in states],
        fused=fused,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class _PendingCopy:
    """An asynchronous copy of a parameter and its gradient to the host."""

    def __init__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._copies = [_copy_to_host(local_part(one)) for one in (parameter, parameter.grad)]
        self._copied = torch.cuda.Event() if parameter.is_cuda else None  # type: ignore[no-untyped-call]
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> tuple[Tensor, Tensor]:
        """Wait for the copies, and return the parameter and its gradient in float32."""
        if self._copied is not None:
            self._copied.synchronize()
        value, gradient = self._copies
        return value, gradient.float()


def _copy_to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
