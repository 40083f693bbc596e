"""Policy-gradient losses with a trust region of probabilities, not of ratios.

A ratio clip lets a token's probability move in proportion to itself. So it excludes rare tokens,
whose ratio becomes large while their probability hardly moves. These losses bound the change of the
probability itself, ``p - mu``, where p is that of the policy now and mu that of the sampler.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from primerl.loss.arguments import checked
from primerl.loss.ratio import Ratio, limited, ratio_by, token_ratio, upcast
from primerl.loss.surrogate import DATA, Aux


@checked(finite=DATA)
def dppo(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    advantages: Float[Tensor, " t"],
    *,
    ratio: Ratio = token_ratio,
    mask_low: float = 0.2,
    mask_high: float = 0.2,
) -> tuple[Float[Tensor, " t"], Aux]:
    """The policy-gradient loss inside a total-variation trust region: ``-A r``, dropped outside.

    Let p and mu be the probabilities that the policy and the sampler give the token. A token is
    dropped (loss and gradient 0) where ``A > 0 and p - mu > mask_high``, or ``A <= 0 and
    p - mu < -mask_low``: there, the step would move p further from mu. The gradient flows through
    ``r``.

    Source: DPPO, arXiv:2602.04879 (binary total variation); the bounds of 0.2 are those of
    prime-rl. ``aux["dropped"]`` is 1 for a dropped token.

    Raises:
        ValueError: a bound is neither within [0, 1) nor infinite, or a tensor has the wrong shape
            or dtype.
    """
    _require_shift("mask_low", mask_low)
    _require_shift("mask_high", mask_high)
    shift = _shift(logprobs, behavior_logprobs)
    dropped = torch.where(advantages > 0, shift > mask_high, shift < -mask_low)
    return _inside(logprobs, behavior_logprobs, advantages, dropped, ratio)


@checked(finite=DATA)
def ipo(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    advantages: Float[Tensor, " t"],
    *,
    ratio: Ratio = token_ratio,
    threshold: float = 0.1,
) -> tuple[Float[Tensor, " t"], Aux]:
    """The ``dppo`` loss with a symmetric region: ``-A r``, dropped where ``|p - mu| > threshold``.

    A token outside the region is dropped whatever the sign of its advantage, so its own gradient
    can't bring it back either.

    Source: the loss named ``ipo`` in prime-rl (github.com/PrimeIntellect-ai/prime-rl), after the
    trust region of arXiv:2602.04879. ``aux["dropped"]`` is 1 for a dropped token.

    Raises:
        ValueError: ``threshold`` is neither within [0, 1) nor infinite, or a tensor has the wrong
            shape or dtype.
    """
    _require_shift("threshold", threshold)
    dropped = _shift(logprobs, behavior_logprobs).abs() > threshold
    return _inside(logprobs, behavior_logprobs, advantages, dropped, ratio)


@checked(finite=("behavior_logprobs", "ref_logprobs"))
def distill(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    ref_logprobs: Float[Tensor, " t"],
    *,
    ratio: Ratio = token_ratio,
    mask_low: float = 0.2,
) -> tuple[Float[Tensor, " t"], Aux]:
    """The loss of on-policy distillation, with ``ref_logprobs - logprobs`` as the advantage.

        -sg(ref_logprobs - logprobs) r,   dropped where p - mu < -mask_low

    In expectation over the policy's own tokens, this is the gradient of the reverse KL divergence
    to the teacher at each token, given its prefix: a token isn't credited with the divergence of
    later tokens. A token whose probability fell too far is dropped, even where the teacher would
    raise it. The teacher is another model (OPD), or the policy itself under a prompt with a
    demonstration (SDFT).

    Source: Thinking Machines Lab, "On-policy distillation" (2025), which is MiniLLM
    (arXiv:2306.08543) without the rewards of later tokens; on-policy data for distillation:
    arXiv:2306.13649; self-distillation: arXiv:2601.19897; the trust region: prime-rl.
    ``aux["dropped"]`` is 1 for a dropped token, ``aux["ref_kl"]`` is ``logprobs - ref_logprobs``.

    Raises:
        ValueError: ``mask_low`` is neither within [0, 1) nor infinite, or a tensor has the wrong
            shape or dtype.
    """
    _require_shift("mask_low", mask_low)
    lead = (upcast(ref_logprobs) - upcast(logprobs)).detach()
    dropped = _shift(logprobs, behavior_logprobs) < -mask_low
    per_token, aux = _inside(logprobs, behavior_logprobs, lead, dropped, ratio)
    return per_token, aux | {"ref_kl": -lead}


def _require_shift(name: str, value: float) -> None:
    """Refuse a bound of 1 or more: a probability can't move that far, so no token is dropped."""
    if not (0 <= value < 1 or value == math.inf):
        raise ValueError(
            f"{name}={value}: expected the largest allowed change of a probability, at least 0 and "
            "less than 1 (math.inf for no bound)"
        )


def _shift(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """The change of the token's probability since it was sampled: ``p - mu``."""
    return (upcast(logprobs).exp() - upcast(behavior_logprobs).exp()).detach()


def _inside(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, dropped: Tensor, ratio: Ratio
) -> tuple[Tensor, Aux]:
    r = ratio_by(ratio, logprobs, behavior_logprobs)
    per_token = torch.where(dropped, torch.zeros_like(r), -advantages.to(r.dtype) * r)
    return per_token, {"log_ratio_limited": limited(r), "dropped": dropped.to(r.dtype)}
