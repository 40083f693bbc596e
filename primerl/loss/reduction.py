"""Reductions of token losses to a scalar, with explicit global denominators.

A denominator counts over the *whole step*: all micro-batches and ranks. Gradients then do not
depend on how the step is divided into micro-batches, and are summed over ranks, not averaged. Rows
outside the mask are dropped, so a NaN there does no harm. A batch without a trained row gives a
zero that is attached to the graph, so that every rank runs the same backward pass.
"""

from typing import SupportsFloat

from jaxtyping import Bool, Float, Int
from torch import Tensor

from primerl._common.ranks import identity
from primerl.loss.arguments import checked
from primerl.loss.ratio import AllSum, sequence_sums, upcast


@checked()
def token_mean(
    x: Float[Tensor, " t"],
    mask: Bool[Tensor, " t"],
    *,
    denom: SupportsFloat,
) -> Float[Tensor, ""]:
    """The sum over the mask divided by ``denom``: ``sum_i m_i x_i / denom``.

    ``denom`` is the number of trained tokens of the whole step. Every token has the same weight, so
    long sequences weigh more (the token-level loss of DAPO, arXiv:2503.14476, equation 12).

    Raises:
        ValueError: ``denom`` is not above zero while rows are selected, or a tensor has the wrong
            shape or dtype.
    """
    return _masked_sum(x, mask, denom, "tokens")


@checked()
def sequence_mean(
    x: Float[Tensor, " t"],
    mask: Bool[Tensor, " t"],
    sequence_ids: Int[Tensor, " t"],
    *,
    denom: SupportsFloat,
    all_sum: AllSum = identity,
) -> Float[Tensor, ""]:
    """The mean over sequences of each sequence's mean: ``sum_i (1/|y_i|) sum_t m_it x_it / denom``.

    ``denom`` is the number of trained sequences of the whole step. Every sequence has the same
    weight, so a token of a long sequence weighs less (GRPO, arXiv:2402.03300, equation 3; GSPO).
    ``all_sum`` sums over the ranks that share documents.

    Raises:
        ValueError: ``denom`` is not above zero while rows are selected, or a tensor has the wrong
            shape or dtype.
    """
    _, count = sequence_sums(x, mask, sequence_ids, all_sum=all_sum)
    lengths = count.clamp(min=1)[sequence_ids]
    x = upcast(x)
    return _masked_sum(x / lengths.to(x.dtype), mask, denom, "sequences")


@checked()
def fixed_length_mean(
    x: Float[Tensor, " t"],
    mask: Bool[Tensor, " t"],
    *,
    length: float,
    denom: SupportsFloat,
) -> Float[Tensor, ""]:
    """The sum over the mask divided by a constant length: ``sum_i m_i x_i / (length denom)``.

    ``denom`` is the number of trained sequences of the whole step and ``length`` a constant, such
    as the maximum number of tokens of a response. Neither depends on the length of responses, so
    the gradient has no bias towards short correct and long incorrect responses (Dr. GRPO,
    arXiv:2503.20783, section 3.2).

    Raises:
        ValueError: ``length`` is not above zero, ``denom`` is not above zero while rows are
            selected, or a tensor has the wrong shape or dtype.
    """
    if not length > 0:
        raise ValueError(f"length is {length}; expected a number of tokens, above 0")
    return _masked_sum(x, mask, denom, "sequences") / length


def _masked_sum(x: Tensor, mask: Tensor, denom: SupportsFloat, counted: str) -> Tensor:
    if not isinstance(denom, Tensor):
        denom = float(denom)
    elif denom.ndim > 0:
        raise ValueError(f"denom has shape {tuple(denom.shape)}; expected a single number")
    x = upcast(x)
    if denom == 0 and not mask.any():
        return x.where(mask, 0.0).sum()  # no rank trains anything: zero, but with a graph
    if not denom > 0:
        raise ValueError(f"denom is {denom}; expected the number of trained {counted}, above 0")
    return x.where(mask, 0.0).sum() / denom
