"""What to do when a loss or a gradient is not finite: the same on every rank."""

import logging

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from primerl.parallel.scattering import all_sum

logger = logging.getLogger(__name__)


class UpdateGuard:
    """Decides whether a step's gradients are applied; all ranks get the same answer.

        guard = parallel.UpdateGuard(on_nonfinite="skip")
        ...
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if guard.allows(step_loss, norm):
            optimizer.step()
        optimizer.zero_grad()

    One NaN on one rank would spread to all weights, and a rank that skipped alone would part from
    the others for good. So the ranks agree first. A skipped step is still a policy step: its batch
    is used up and the version goes on, with the same weights.

    Args:
        on_nonfinite: ``"skip"`` leaves the update out and counts it; ``"stop"`` raises.
        max_in_a_row: raise even so after this many skipped updates without one between them.

    Raises:
        ValueError: ``on_nonfinite`` is neither, or ``max_in_a_row`` is below 1.
    """

    def __init__(self, *, on_nonfinite: str = "stop", max_in_a_row: int = 10) -> None:
        if on_nonfinite not in ("skip", "stop"):
            raise ValueError(f'on_nonfinite is {on_nonfinite!r}; expected "skip" or "stop"')
        if max_in_a_row < 1:
            raise ValueError(f"max_in_a_row is {max_in_a_row}; expected at least 1")
        self.skipped = 0
        """Updates left out so far."""
        self._on_nonfinite = on_nonfinite
        self._max_in_a_row = max_in_a_row
        self._in_a_row = 0

    def allows(self, loss: Tensor | float, grad_norm: Tensor | float) -> bool:
        """Whether loss and gradients are finite on every rank; all ranks must ask together.

        Args:
            loss: of this rank, summed over its micro-batches.
            grad_norm: what ``clip_grad_norm_`` returned.

        Raises:
            RuntimeError: they are not, and the run is to stop; on every rank.
        """
        wrong = [not _is_finite(loss), not _is_finite(grad_norm)]
        losses, norms = all_sum(torch.tensor(wrong, dtype=torch.int64)).tolist()
        if losses == norms == 0:
            self._in_a_row = 0
            return True
        self.skipped += 1
        self._in_a_row += 1
        found = f"the loss is not finite on {losses} rank(s), the gradient norm on {norms}"
        if self._on_nonfinite == "stop":
            raise RuntimeError(f'{found}. To leave such updates out, use on_nonfinite="skip"')
        if self._in_a_row >= self._max_in_a_row:
            raise RuntimeError(f"{found}, as in the {self._in_a_row - 1} step(s) before")
        logger.warning("%s; the update is left out (%d so far)", found, self.skipped)
        return False


def _is_finite(x: Tensor | float) -> bool:
    value = x.full_tensor() if isinstance(x, DTensor) else torch.as_tensor(x)
    return bool(value.isfinite().all())
