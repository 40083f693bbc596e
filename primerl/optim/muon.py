"""The Muon optimizer, for sharded and unsharded models."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from primerl._common.ranks import local_part
from primerl.optim.cpu_adamw import update_adamw
from primerl.optim.fused_matrices import Matrices, join_outputs, split_outputs
from primerl.optim.matrix_exchange import map_matrices, matrix_sharding
from primerl.optim.newton_schulz import orthogonalize

ALGORITHMS = ("muon", "adamw")
ADJUSTMENTS = ("match_rms_adamw", "original")


class Muon(Optimizer):
    """Muon optimizer: orthogonalized momentum for matrices, and AdamW for other parameters.

        B <- m B + (1 - m) G,   U = orthogonalize((1 - m) G + m B),
        W <- W - lr (weight_decay W + scale U)

    The algorithm is Keller Jordan's (https://kellerjordan.github.io/posts/muon), with the ``scale``
    of Moonlight (arXiv:2502.16982): 0.2 sqrt(max(rows, columns)). With it, updates have the RMS of
    AdamW's, so AdamW's learning rate and weight decay carry over. Parameters are matrices or stacks
    of matrices, ``[n, rows, columns]``, such as the experts of a layer; each matrix is
    orthogonalized separately.

        optimizer = optim.Muon(optim.muon_parameters(model), lr=1e-6)

    Parameters may be sharded (``parallel.shard``). Each matrix is then gathered and orthogonalized
    on one rank, and work is divided about equally over ranks; experts that are whole on their rank
    are not moved. The result equals that of a single process, bitwise in float32 on a CPU. Call
    ``step`` on all ranks, with gradients for the same parameters.

    Args:
        params: matrices, or parameter groups. Besides the hyperparameters below, a group may have

            - ``algorithm``: ``"muon"`` (the default) or ``"adamw"``;
            - ``split``: None, or sizes ``(a, b, ..)`` if each parameter holds several matrices: the
              first a of its outputs belong to one, the next b to another, and so on, repeated until
              the outputs end (see ``Matrices``). The matrices are orthogonalized separately, so
              gate and up projections get the same update whether or not they are fused;
            - ``transposed``: whether matrices are ``[inputs, outputs]``.
        lr: the learning rate.
        momentum: the decay rate m.
        nesterov: use U as above; if False, U = orthogonalize(B).
        weight_decay: decoupled weight decay.
        adjust_lr: ``"match_rms_adamw"`` for the scale above, or ``"original"`` for
            sqrt(max(1, outputs / inputs)).
        betas: decay rates of AdamW's moments.
        eps: added to AdamW's denominator.
        steps: number of Newton-Schulz iterations.
        dtype: dtype of the Newton-Schulz iteration and of the matrices sent between ranks.

    Raises:
        ValueError: a hyperparameter is out of range, a group's ``algorithm`` or ``split`` is
            invalid, or a parameter for ``"muon"`` does not have 2 or 3 dimensions or is sharded in
            a way that Muon can't gather.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        steps: int = 5,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if not lr >= 0 or not weight_decay >= 0:
            raise ValueError(f"lr is {lr}, weight_decay {weight_decay}; expected at least 0")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}, expected at least 0 and less than 1")
        if steps < 1:
            raise ValueError(f"steps is {steps}, expected at least 1")
        if adjust_lr not in ADJUSTMENTS:
            expected = ", ".join(ADJUSTMENTS)
            raise ValueError(f"adjust_lr is {adjust_lr!r}; expected one of {expected}")
        self._steps, self._dtype = steps, dtype
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "adjust_lr": adjust_lr,
            "betas": betas,
            "eps": eps,
            "algorithm": "muon",
            "split": None,
            "transposed": False,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group with its own hyperparameters; the errors are those of ``Muon``."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["algorithm"] not in ALGORITHMS:
            raise ValueError(
                f"a group has algorithm {group['algorithm']!r}; expected one of {ALGORITHMS}"
            )
        matrices = _matrices(group)
        for parameter in group["params"] if group["algorithm"] == "muon" else ():
            if parameter.ndim not in (2, 3):
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is not a matrix or a stack of "
                    'matrices; put it into a group with algorithm "adamw", as muon_parameters does'
                )
            if not matrices.fits(parameter):
                raise ValueError(
                    f"split {group['split']!r} does not fit a parameter with "
                    f"{matrices.outputs(parameter)} outputs; expected sizes above 0, whose sum "
                    "divides the outputs"
                )
            matrix_sharding(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; return the result of ``closure``, if given."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        matrices: list[tuple[Tensor, dict[str, Any]]] = []
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["algorithm"] == "muon":
                matrices += [(parameter, group) for parameter in trained]
            elif trained:
                self._step_adamw(trained, group)
        if matrices:
            self._step_muon(matrices)
        return loss

    def _step_muon(self, matrices: list[tuple[Tensor, dict[str, Any]]]) -> None:
        momenta = [self._momentum(parameter, group) for parameter, group in matrices]
        if not any(group["lr"] for _, group in matrices):
            return  # loading a checkpoint runs a step with lr 0, only to create the states

        def orthogonal(stack: Tensor, index: int) -> Tensor:
            parameter, group = matrices[index]
            largest = _scale(parameter, group)
            parts = []
            for part in split_outputs(stack, _matrices(group)):
                done = orthogonalize(part.flatten(1, 2), steps=self._steps, dtype=self._dtype)
                scale = _scale_of_shape(part.shape[1] * part.shape[2], part.shape[3], group)
                parts.append((done if scale == largest else done * (scale / largest)).view_as(part))
            return join_outputs(parts, _matrices(group)).reshape(stack.shape)

        shardings = [matrix_sharding(parameter) for parameter, _ in matrices]
        updates = map_matrices(momenta, shardings, orthogonal)
        for (parameter, group), update in zip(matrices, updates, strict=True):
            local = local_part(parameter)
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(update.view_as(local), alpha=-group["lr"] * _scale(parameter, group))

    def _momentum(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Update a parameter's momentum, and return the ``[n, rows, columns]`` to orthogonalize."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = local_part(state["momentum_buffer"])
        local = local_part(gradient).to(buffer.dtype)
        buffer.lerp_(local, 1 - group["momentum"])
        update = local.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        update = update.to(self._dtype)
        return update if update.ndim == 3 else update.unsqueeze(0)

    def _step_adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        local = [local_part(parameter) for parameter in parameters]
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        update_adamw(local, gradients, states, group)


def _matrices(group: dict[str, Any]) -> Matrices:
    split = group["split"]
    return Matrices(split=None if split is None else tuple(split), transposed=group["transposed"])


def _scale(parameter: Tensor, group: dict[str, Any]) -> float:
    """Return the largest scale of a parameter's matrices."""
    matrices = _matrices(group)
    outputs = matrices.outputs(parameter)
    inputs = parameter.shape[-2 if matrices.transposed else -1]
    split = matrices.split or (outputs,)
    repeats = outputs // sum(split)
    return max(_scale_of_shape(size * repeats, inputs, group) for size in split)


def _scale_of_shape(outputs: int, inputs: int, group: dict[str, Any]) -> float:
    if group["adjust_lr"] == "original":
        return math.sqrt(max(1.0, outputs / inputs))
    return 0.2 * math.sqrt(max(outputs, inputs))
