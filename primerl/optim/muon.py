"""Muon, over any number of ranks."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from primerl.optim.layouts import Matrices, join_outputs, split_outputs
from primerl.optim.newton_schulz import orthogonalize
from primerl.optim.whole_matrices import division, map_whole

ALGORITHMS = ("muon", "adamw")
ADJUSTMENTS = ("match_rms_adamw", "original")


class Muon(Optimizer):
    """Momentum whose matrices are made orthogonal; AdamW for parameters that are no matrices.

        B <- m B + (1 - m) G,   U = orthogonalize((1 - m) G + m B),
        W <- W - lr (weight_decay W + scale U)

    as in Keller Jordan's https://kellerjordan.github.io/posts/muon, with the ``scale`` of Moonlight
    (arXiv 2502.16982): 0.2 sqrt(max(rows, columns)), so that an update has the size of one of
    AdamW, whose learning rate and weight decay can be kept. Parameters are matrices or stacks of
    them, ``[n, rows, columns]``, such as the experts of a layer: each is made orthogonal by itself.

        optimizer = optim.Muon(optim.muon_parameters(model), lr=1e-6)

    Parameters may be divided among ranks (``parallel.shard``). Each matrix is then made whole on
    one rank, which orthogonalizes it, and ranks get about equal work; experts that lie whole on
    their rank stay there. The result is that of one process: in float32 on a CPU, to the bit. All
    ranks call ``step``, with gradients for the same parameters.

    Args:
        params: matrices; or groups with, besides the hyperparameters below,

            - ``algorithm``: ``"muon"`` (the default) or ``"adamw"``, for what is no matrix;
            - ``split``: None where each matrix is one; or sizes ``(a, b, ..)``, where the first a
              of its outputs belong to one matrix, the next b to another, and so on again until
              they end. These are then made orthogonal one by one: gate and up projections in one
              parameter are updated as they are in two (``Matrices``);
            - ``transposed``: whether matrices are ``[inputs, outputs]``.
        lr: the learning rate.
        momentum: m.
        nesterov: U as above, of the next step's momentum; otherwise U = orthogonalize(B).
        weight_decay: decoupled.
        adjust_lr: ``"match_rms_adamw"``, as above, or ``"original"``, where ``scale`` is
            sqrt(max(1, outputs / inputs)).
        betas: of AdamW, as is ``eps``.
        steps: of Newton-Schulz, as is ``dtype``, in which matrices also travel between ranks.

    Raises:
        ValueError: a hyperparameter is out of range, a group is no such group, or a parameter of
            ``"muon"`` has no 2 or 3 dimensions or is divided in a way that it cannot be gathered.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adjust_lr: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        steps: int = 5,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if not lr >= 0 or not weight_decay >= 0:
            raise ValueError(f"lr is {lr}, weight_decay {weight_decay}; expected at least 0")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}, expected 0 or more, and less than 1")
        if steps < 1:
            raise ValueError(f"steps is {steps}, expected at least 1")
        if adjust_lr not in ADJUSTMENTS:
            raise ValueError(f"adjust_lr is {adjust_lr!r}; expected one of {ADJUSTMENTS}")
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
        """Add parameters, with hyperparameters of their own; errors are those of the class."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["algorithm"] not in ALGORITHMS:
            raise ValueError(f"a group has algorithm {group['algorithm']!r}; expected {ALGORITHMS}")
        matrices = _matrices(group)
        for parameter in group["params"] if group["algorithm"] == "muon" else ():
            if parameter.ndim not in (2, 3):
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is no matrix and no stack of "
                    'matrices; put it into a group with algorithm "adamw", as muon_parameters does'
                )
            if not matrices.fits(parameter):
                raise ValueError(
                    f"split {group['split']!r} is not of a parameter with "
                    f"{matrices.outputs(parameter)} outputs; expected sizes above 0, whose sum "
                    "divides the outputs"
                )
            division(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; returns what ``closure`` returns, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
            return  # checkpoints make states this way; orthogonalizing would be for nothing

        def orthogonal(stack: Tensor, index: int) -> Tensor:
            parameter, group = matrices[index]
            largest = _scale(parameter, group)
            parts = []
            for part in split_outputs(stack, _matrices(group)):
                done = orthogonalize(part.flatten(1, 2), steps=self._steps, dtype=self._dtype)
                scale = _scale_of_shape(part.shape[1] * part.shape[2], part.shape[3], group)
                parts.append((done if scale == largest else done * (scale / largest)).view_as(part))
            return join_outputs(parts, _matrices(group)).reshape(stack.shape)

        divisions = [division(parameter) for parameter, _ in matrices]
        updates = map_whole(momenta, divisions, orthogonal)
        for (parameter, group), update in zip(matrices, updates, strict=True):
            local = _local(parameter)
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(update.view_as(local), alpha=-group["lr"] * _scale(parameter, group))

    def _momentum(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """What is to be made orthogonal, ``[n, rows, columns]``."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = _local(state["momentum_buffer"])
        local = _local(gradient).to(buffer.dtype)
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
        adamw(  # of elements, so that it makes no difference where they lie
            [_local(parameter) for parameter in parameters],
            [_local(parameter.grad) for parameter in parameters if parameter.grad is not None],
            [_local(state["exp_avg"]) for state in states],
            [_local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _matrices(group: dict[str, Any]) -> Matrices:
    split = group["split"]
    return Matrices(split=None if split is None else tuple(split), transposed=group["transposed"])


def _scale(parameter: Tensor, group: dict[str, Any]) -> float:
    """The largest of a parameter's matrices."""
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


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
