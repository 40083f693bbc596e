"""Policy-gradient surrogates, one loss per token."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from primerl.loss.ratio import LOG_RATIO_LIMIT, token_ratio, upcast

Ratio = Callable[[Tensor, Tensor], Tensor]
Aux = dict[str, Tensor]


def clipped(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    advantages: Float[Tensor, " t"],
    *,
    ratio: Ratio = token_ratio,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Float[Tensor, " t"], Aux]:
    """The clipped surrogate: ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``.

    Source: PPO, arXiv:1707.06347, equation 7; bounds of their own: DAPO, arXiv:2503.14476,
    equation 10. ``aux["clipped"]`` is 1 where the clip stops the gradient.

    Raises:
        ValueError: a clip is negative, or ``clip_low`` is above 1.
    """
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ValueError(
            f"clip_low={clip_low}, clip_high={clip_high}: expected 0 <= clip_low <= 1 "
            "and clip_high >= 0"
        )
    r = ratio(logprobs, behavior_logprobs)
    advantages = advantages.to(r.dtype)
    free = r * advantages
    bounded = r.clamp(1 - clip_low, 1 + clip_high) * advantages
    aux = _log_ratio_aux(logprobs, behavior_logprobs)
    aux["clipped"] = (bounded < free).to(r.dtype).detach()
    return -torch.minimum(free, bounded), aux


def dppo(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    advantages: Float[Tensor, " t"],
    *,
    ratio: Ratio = token_ratio,
    mask_low: float = 0.2,
    mask_high: float = 0.2,
) -> tuple[Float[Tensor, " t"], Aux]:
    """The policy gradient inside a total-variation trust region: ``-A r``, dropped outside.

    With p and mu the probabilities that the policy and the sampler give the token, a token is
    dropped (loss and gradient 0) where ``A > 0 and p - mu > mask_high``, or ``A <= 0 and
    p - mu < -mask_low``: where the step would move p further from mu. The gradient flows through
    ``r``. Unlike a ratio clip, the region does not shut out rare tokens, whose ratio is large
    while their probability hardly moved.

    Source: DPPO, arXiv:2602.04879 (binary total variation). ``aux["dropped"]`` is 1 for such a
    token.

    Raises:
        ValueError: a bound is negative.
    """
    if mask_low < 0 or mask_high < 0:
        raise ValueError(f"mask_low={mask_low}, mask_high={mask_high}: expected both >= 0")
    r = ratio(logprobs, behavior_logprobs)
    advantages = advantages.to(r.dtype)
    shift = (upcast(logprobs).exp() - upcast(behavior_logprobs).exp()).detach()
    dropped = torch.where(advantages > 0, shift > mask_high, shift < -mask_low)
    aux = _log_ratio_aux(logprobs, behavior_logprobs)
    aux["dropped"] = dropped.to(r.dtype)
    return torch.where(dropped, torch.zeros_like(r), -advantages * r), aux


def _log_ratio_aux(logprobs: Tensor, behavior_logprobs: Tensor) -> Aux:
    difference = (upcast(logprobs) - upcast(behavior_logprobs)).detach()
    return {"log_ratio_limited": (difference.abs() > LOG_RATIO_LIMIT).to(difference.dtype)}
