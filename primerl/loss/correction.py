"""Corrections of the mismatch between trainer and sampler, as one detached weight per token.

    weight = loss.token_tis(proximal_logprobs, b.behavior_logprobs, cap=2.0)
    per_token, aux = loss.clipped(logprobs, proximal_logprobs, b.advantages)
    loss.token_mean(weight * per_token, b.loss_mask, denom=trained)

Multiply a token loss by the weight. The first argument is the trainer's logprobs, either at the
start of the step (``proximal_logprobs``) or current. Weights are in at least float32 and carry no
gradient. Where the trainer's logprob is NaN, the weight is NaN too. Sequence weights have the same
value in all rows of a document. ``all_sum`` sums over the ranks that share documents; all of these
ranks must call it.
"""

import functools
import math

from jaxtyping import Bool, Float, Int
from torch import Tensor

from primerl._common.ranks import identity
from primerl.loss.arguments import checked
from primerl.loss.ratio import (
    AllSum,
    require_reachable,
    sequence_ratio,
    sequence_sums,
    token_ratio,
)

_product = functools.partial(sequence_ratio, length_normalized=False)


@checked(finite=["behavior_logprobs"])
def token_tis(
    logprobs: Float[Tensor, " t"], behavior_logprobs: Float[Tensor, " t"], *, cap: float = 2.0
) -> Float[Tensor, " t"]:
    """Truncated importance sampling per token: ``min(r, cap)``.

    Source: for LLMs, Yao et al., "Your efficient RL framework secretly brings you off-policy RL
    training" (2025); truncation: Ionides, "Truncated importance sampling" (2008).

    Raises:
        ValueError: ``cap`` is not between e^-20 and e^20 or infinite, or a tensor has the wrong
            shape or dtype.
    """
    _require_cap(cap)
    return token_ratio(logprobs, behavior_logprobs).detach().clamp(max=cap)


@checked()
def sequence_tis(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    loss_mask: Bool[Tensor, " t"],
    sequence_ids: Int[Tensor, " t"],
    *,
    cap: float = 2.0,
    all_sum: AllSum = identity,
) -> Float[Tensor, " t"]:
    """Truncated importance sampling per sequence: ``min(prod_t r_t, cap)`` in all its rows.

    The product is over the trained tokens. It has less bias than ``token_tis``, but more variance.

    Source: Liu et al., "When speed kills stability" (2025).

    Raises:
        ValueError: ``cap`` is not between e^-20 and e^20 or infinite, or a tensor has the wrong
            shape or dtype.
    """
    _require_cap(cap)
    r = _product(logprobs, behavior_logprobs, loss_mask, sequence_ids, all_sum=all_sum)
    return r.detach().clamp(max=cap)


@checked(finite=["behavior_logprobs"])
def token_mis(
    logprobs: Float[Tensor, " t"], behavior_logprobs: Float[Tensor, " t"], *, cap: float = 2.0
) -> Float[Tensor, " t"]:
    """Masked importance sampling per token: ``r`` up to ``cap``, and 0 above it.

    Tokens that truncation would keep at the cap get weight 0. Source: that of ``sequence_mis``.

    Raises:
        ValueError: ``cap`` is not between e^-20 and e^20 or infinite, or a tensor has the wrong
            shape or dtype.
    """
    _require_cap(cap)
    r = token_ratio(logprobs, behavior_logprobs).detach()
    return r.masked_fill(r > cap, 0.0)


@checked()
def sequence_mis(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    loss_mask: Bool[Tensor, " t"],
    sequence_ids: Int[Tensor, " t"],
    *,
    cap: float = 2.0,
    all_sum: AllSum = identity,
) -> Float[Tensor, " t"]:
    """Masked importance sampling per sequence: ``prod_t r_t`` up to ``cap``, and 0 above it.

    Source: Liu et al., "When speed kills stability" (2025).

    Raises:
        ValueError: ``cap`` is not between e^-20 and e^20 or infinite, or a tensor has the wrong
            shape or dtype.
    """
    _require_cap(cap)
    r = _product(logprobs, behavior_logprobs, loss_mask, sequence_ids, all_sum=all_sum).detach()
    return r.masked_fill(r > cap, 0.0)


@checked(finite=["behavior_logprobs"])
def icepop(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> Float[Tensor, " t"]:
    """Two-sided masking per token: ``r`` where ``low <= r <= high``, and 0 elsewhere.

    Source: IcePop, in the Ring-1T report, arXiv:2510.18855, which also uses bounds of 0.5 and 5.

    Raises:
        ValueError: ``low`` is above ``high``, a bound is not between e^-20 and e^20 (0 and infinity
            mean no bound), or a tensor has the wrong shape or dtype.
    """
    _require_interval(low, high)
    r = token_ratio(logprobs, behavior_logprobs).detach()
    return r.masked_fill((r < low) | (r > high), 0.0)


@checked()
def geometric_rejection(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    loss_mask: Bool[Tensor, " t"],
    sequence_ids: Int[Tensor, " t"],
    *,
    low: float = 0.999,
    high: float = 1.001,
    all_sum: AllSum = identity,
) -> Float[Tensor, " t"]:
    """Reject whole sequences: 1 where ``low <= (prod_t r_t)^(1/|y|) <= high``, and 0 elsewhere.

    Unlike the product, the geometric mean does not explode with the length |y|: it approaches
    ``exp(-KL)``, with a spread of ``1/sqrt(|y|)``. So the bounds must be wider than the KL
    divergence of trainer and sampler, and short sequences need wider bounds than long ones.

    Source: Liu et al., "When speed kills stability" (2025), part 3. The default bounds are the
    example in the documentation of verl's rollout correction.

    Raises:
        ValueError: ``low`` is above ``high``, a bound is not between e^-20 and e^20 (0 and infinity
            mean no bound), or a tensor has the wrong shape or dtype.
    """
    _require_interval(low, high)
    mean = sequence_ratio(
        logprobs, behavior_logprobs, loss_mask, sequence_ids, all_sum=all_sum
    ).detach()
    kept = ((mean >= low) & (mean <= high)).to(mean.dtype)
    return kept.where(mean.isfinite(), mean)


@checked()
def veto(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    loss_mask: Bool[Tensor, " t"],
    sequence_ids: Int[Tensor, " t"],
    *,
    threshold: float = 1e-4,
    all_sum: AllSum = identity,
) -> Float[Tensor, " t"]:
    """Reject a sequence that has a catastrophic token: 0 if any ``r_t < threshold``, else 1.

    Source: ``rollout_token_veto_threshold`` in the first versions of verl's rollout correction
    (github.com/volcengine/verl).

    Raises:
        ValueError: ``threshold`` is not between e^-20 and e^20, or a tensor has the wrong shape or
            dtype.
    """
    require_reachable("threshold", threshold, bound=threshold, off=None)
    r = token_ratio(logprobs, behavior_logprobs.where(loss_mask, 0.0)).detach()
    vetoes, _ = sequence_sums((r < threshold).double(), loss_mask, sequence_ids, all_sum=all_sum)
    kept = (vetoes == 0).to(r.dtype)[sequence_ids]
    return kept.where(r.isfinite() | ~loss_mask, r)


def _require_cap(cap: float) -> None:
    if cap != math.inf:
        require_reachable("cap", cap, bound=cap, off="math.inf")


def _require_interval(low: float, high: float) -> None:
    if not low <= high:
        raise ValueError(f"low={low}, high={high}: expected low <= high")
    if low != 0:
        require_reachable("low", low, bound=low, off="0")
    if high != math.inf:
        require_reachable("high", high, bound=high, off="math.inf")
