"""A guard against nonfinite losses and gradients that makes all ranks skip or stop together."""

import logging
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from primerl.parallel.host_values import all_sum

logger = logging.getLogger(__name__)


class UpdateGuard:
    """Guard that decides, equally on all ranks, whether to apply a step's gradients.

        guard = parallel.UpdateGuard(on_nonfinite="skip")
        ...
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if guard.allows(step_loss, norm):
            optimizer.step()
        optimizer.zero_grad()

    A NaN on one rank would spread to all weights, and a rank that skipped alone would diverge from
    the others, so the ranks agree first. A skipped step is still a policy step: its batch is
    consumed and the version increases, but the weights stay the same.

    Args:
        on_nonfinite: ``"skip"`` skips the update and counts it; ``"stop"`` raises an error.
        max_in_a_row: raise an error after this many consecutive skipped updates.

    Raises:
        ValueError: ``on_nonfinite`` is not ``"skip"`` or ``"stop"``, or ``max_in_a_row`` is below
            1.
    """

    def __init__(
        self, *, on_nonfinite: Literal["skip", "stop"] = "stop", max_in_a_row: int = 10
    ) -> None:
        if on_nonfinite not in ("skip", "stop"):
            raise ValueError(f'on_nonfinite is {on_nonfinite!r}; expected "skip" or "stop"')
        if max_in_a_row < 1:
            raise ValueError(f"max_in_a_row is {max_in_a_row}; expected at least 1")
        self.skipped = 0
        """Number of updates skipped so far."""
        self._on_nonfinite = on_nonfinite
        self._max_in_a_row = max_in_a_row
        self._in_a_row = 0

    def allows(self, loss: Tensor | float, grad_norm: Tensor | float) -> bool:
        """Check that loss and gradients are finite on every rank; all ranks must call it.

        Args:
            loss: the loss of this rank, summed over its micro-batches.
            grad_norm: the norm that ``clip_grad_norm_`` returned.

        Returns:
            Whether to apply the update.

        Raises:
            RuntimeError: on every rank, if a value is not finite and the run must stop.
        """
        finite = [_is_finite(loss), _is_finite(grad_norm)]
        if finite[0].device == finite[1].device:
            finite = list(torch.stack(finite).cpu())  # so the host waits for the device only once
        wrong = [not one for one in finite]
        losses, norms = all_sum(torch.tensor(wrong, dtype=torch.int64)).tolist()
        if losses == norms == 0:
            self._in_a_row = 0
            return True
        self.skipped += 1
        self._in_a_row += 1
        found = f"the loss is not finite on {losses} rank(s), the gradient norm on {norms}"
        if self._on_nonfinite == "stop":
            raise RuntimeError(f'{found}. To skip such updates, use on_nonfinite="skip"')
        if self._in_a_row >= self._max_in_a_row:
            raise RuntimeError(f"{found}, after {self._in_a_row - 1} skipped step(s) in a row")
        logger.warning("%s; skipping this update (%d skipped so far)", found, self.skipped)
        return False


def _is_finite(x: Tensor | float) -> Tensor:
    value = x.full_tensor() if isinstance(x, DTensor) else torch.as_tensor(x)
    return value.isfinite().all()
