"""Reductions, with an explicit global denominator."""

from jaxtyping import Bool, Float, Shaped
from torch import Tensor


def token_mean(
    x: Float[Tensor, " t"],
    mask: Bool[Tensor, " t"],
    *,
    denom: float | Shaped[Tensor, ""],
) -> Float[Tensor, ""]:
    """The sum over the mask divided by ``denom``: ``sum_i m_i x_i / denom``.

    ``denom`` is the number of trained tokens of the *whole step*, over all micro-batches and
    ranks. With it, gradients do not depend on how the step was cut up (token-level loss of DAPO,
    arXiv:2503.14476, equation 12). Masked rows are left out, so a NaN there does no harm.

    Raises:
        ValueError: ``denom`` is not above zero.
    """
    if not denom > 0:
        raise ValueError(f"denom is {denom}; expected the number of trained tokens, above 0")
    return x.where(mask, x.new_zeros(())).sum() / denom
