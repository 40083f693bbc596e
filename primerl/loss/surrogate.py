"""Policy-gradient surrogate losses per token, with or without a bound on the ratio.

Each surrogate takes ``(logprobs[t], behavior_logprobs[t], advantages[t])`` and returns
``(loss[t], aux)``. ``ratio=`` replaces the token's importance ratio by another function of both
logprobs, such as ``sequence_ratio``. Where trainer and sampler agree, every surrogate has the
gradient of REINFORCE, ``-A d logprobs``. Surrogates that bound probabilities instead of ratios are
in ``trust_region``.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from primerl._common.ranks import identity
from primerl.loss.arguments import checked, require_finite
from primerl.loss.ratio import (
    AllSum,
    Ratio,
    limited,
    ratio_by,
    require_reachable,
    sequence_ratio,
    token_ratio,
    trainable,
)

Aux = dict[str, Tensor]
DATA = ("behavior_logprobs", "advantages")


@checked(finite=DATA)
def reinforce(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    advantages: Float[Tensor, " t"],
    *,
    ratio: Ratio = token_ratio,
) -> tuple[Float[Tensor, " t"], Aux]:
    """The importance-weighted policy-gradient loss: ``-A r``.

    Its gradient is ``-A r d logprobs``, which is unbiased for each token's own distribution but has
    unbounded variance. For plain REINFORCE, without a correction, pass ``logprobs.detach()`` as
    ``behavior_logprobs``.

    Source: REINFORCE (Williams, 1992); with the weight: PPO, arXiv:1707.06347, equation 6.
    ``aux["log_ratio_limited"]`` is 1 where the log-ratio is clamped at +-20, as in every surrogate.

    Raises:
        ValueError: shapes or dtypes differ, or an input from the sampler is not finite.
    """
    r = ratio_by(ratio, logprobs, behavior_logprobs)
    return -advantages.to(r.dtype) * r, _aux(r)


@checked(finite=DATA)
def clipped(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    advantages: Float[Tensor, " t"],
    *,
    ratio: Ratio = token_ratio,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Float[Tensor, " t"], Aux]:
    """The clipped surrogate of PPO: ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``.

    Where the advantage is negative, the minimum leaves large r unbounded. With ``dual_clip=c``, the
    loss of such tokens is at most ``-c A``: it is ``-max(min(r A, clip(r) A), c A)``. A bad token
    that became much likelier then has no gradient.

    Source: PPO, arXiv:1707.06347, equation 7; separate bounds: DAPO, arXiv:2503.14476,
    equation 10; dual clip: arXiv:1912.09729, equation 5. ``aux["clipped"]`` is 1 where a clip
    stops the gradient.

    Raises:
        ValueError: a clip is negative, ``clip_low`` is above 1, ``dual_clip`` is not above 1, one
            of these is out of reach of clamped ratios (1.0, infinity and None, respectively, mean
            no bound), or a tensor has the wrong shape or dtype.
    """
    _require_clips(clip_low, clip_high)
    if dual_clip is not None:
        if not dual_clip > 1:
            raise ValueError(f"dual_clip={dual_clip}: expected a number above 1, or None")
        require_reachable("dual_clip", dual_clip, bound=dual_clip, off="None")
    r = ratio_by(ratio, logprobs, behavior_logprobs)
    return _clipped(r, advantages.to(r.dtype), clip_low, clip_high, dual_clip)


@checked()
def gspo(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    advantages: Float[Tensor, " t"],
    loss_mask: Bool[Tensor, " t"],
    sequence_ids: Int[Tensor, " t"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    all_sum: AllSum = identity,
) -> tuple[Float[Tensor, " t"], Aux]:
    """The clipped surrogate with the ratio of the whole sequence, as in GSPO.

    This is ``clipped`` with ``sequence_ratio``, so a sequence is clipped as a whole. The ratio is a
    geometric mean over tokens, hence the small clips. Reduce with ``sequence_mean``. On long
    sequences, the mismatch between trainer and sampler alone exceeds these clips, always on the
    same side. So pass the trainer's logprobs at the start of the step as ``behavior_logprobs``, and
    correct for the sampler separately.

    Source: GSPO, arXiv:2507.18071, equation 5; the clips are those of its section 5.1.

    Raises:
        ValueError: ``clipped`` or ``sequence_ratio`` raises it.
    """
    for name, x in (("behavior_logprobs", behavior_logprobs), ("advantages", advantages)):
        require_finite(name, x, loss_mask)

    def ratio(p: Tensor, q: Tensor) -> Tensor:
        return sequence_ratio(p, q, loss_mask, sequence_ids, all_sum=all_sum)

    return clipped(
        logprobs,
        behavior_logprobs.where(loss_mask, 0.0),
        advantages.where(loss_mask, 0.0),
        ratio=ratio,
        clip_low=clip_low,
        clip_high=clip_high,
    )


@checked(finite=DATA)
def cispo(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    advantages: Float[Tensor, " t"],
    *,
    ratio: Ratio = token_ratio,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> tuple[Float[Tensor, " t"], Aux]:
    """REINFORCE with a clipped importance weight: ``-sg(clip(r, 1 - low, 1 + high)) A logprobs``.

    The weight carries no gradient, so a token keeps its gradient however far its probability moved.
    By default the weight is bounded from above only, at 5.

    Source: CISPO, MiniMax-M1, arXiv:2506.13585, equations 4 and 5. The paper has no lower bound and
    gives no number for the upper one; a bound of 5 is used with ScaleRL, arXiv:2510.13786.
    ``aux["clipped"]`` is 1 where the weight was clipped.

    Raises:
        ValueError: a clip is negative, ``clip_low`` is above 1, a clip is out of reach of clamped
            ratios (1.0 and infinity, respectively, mean no bound), or a tensor has the wrong shape
            or dtype.
    """
    _require_clips(clip_low, clip_high)
    r = ratio_by(ratio, logprobs, behavior_logprobs).detach()
    weight = r.clamp(1 - clip_low, 1 + clip_high)
    aux = _aux(r, clipped=weight != r)
    return -_constant(weight * advantages.to(r.dtype)) * trainable(logprobs).to(r.dtype), aux


@checked(finite=DATA)
def topr(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    advantages: Float[Tensor, " t"],
    *,
    ratio: Ratio = token_ratio,
) -> tuple[Float[Tensor, " t"], Aux]:
    """Tapered off-policy REINFORCE: ``-sg(w) A logprobs`` with w = 1 if A > 0, else min(r, 1).

    Rollouts with a positive advantage keep their full weight, even where the policy would hardly
    sample them now. The others are weighted only as far as the policy would still sample them.

    Source: TOPR, arXiv:2503.14286, section 3. The paper uses the ratio of the trajectory:
    ``ratio=functools.partial(sequence_ratio, loss_mask=..., sequence_ids=...,
    length_normalized=False)``. ``aux["clipped"]`` is 1 where r is clipped to 1.

    Raises:
        ValueError: a tensor has the wrong shape or dtype.
    """
    r = ratio_by(ratio, logprobs, behavior_logprobs).detach()
    good = advantages > 0
    weight = torch.where(good, torch.ones_like(r), r.clamp(max=1.0))
    aux = _aux(r, clipped=~good & (r > 1))
    return -_constant(weight * advantages.to(r.dtype)) * trainable(logprobs).to(r.dtype), aux


@checked(finite=DATA)
def sapo(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    advantages: Float[Tensor, " t"],
    *,
    ratio: Ratio = token_ratio,
    gate_positive: float = 1.0,
    gate_negative: float = 1.05,
) -> tuple[Float[Tensor, " t"], Aux]:
    """The policy gradient with a soft gate instead of a clip: ``-(4/tau) sigmoid(tau (r - 1)) A``.

    tau is ``gate_positive`` where A > 0 and ``gate_negative`` elsewhere. The gradient is that of
    REINFORCE times ``r sech^2(tau (r - 1) / 2)``, which is 1 on policy and fades as r leaves 1.

    Source: SAPO, arXiv:2511.20347; the default temperatures are those of the paper.

    Raises:
        ValueError: a gate is not above 0, or a tensor has the wrong shape or dtype.
    """
    if not (gate_positive > 0 and gate_negative > 0):
        raise ValueError(
            f"gate_positive={gate_positive}, gate_negative={gate_negative}: expected both above 0"
        )
    r = ratio_by(ratio, logprobs, behavior_logprobs)
    advantages = advantages.to(r.dtype)
    tau = torch.where(advantages > 0, r.new_tensor(gate_positive), r.new_tensor(gate_negative))
    gate = (4 / tau) * torch.sigmoid(tau * (r - 1))
    return -gate * advantages, _aux(r)


@checked(finite=(*DATA, "proximal_logprobs"))
def decoupled(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    advantages: Float[Tensor, " t"],
    proximal_logprobs: Float[Tensor, " t"],
    *,
    ratio: Ratio = token_ratio,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Float[Tensor, " t"], Aux]:
    """Decoupled PPO: a trust region around recent weights, with a correction for stale samplers.

        -w min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)
        w = exp(proximal_logprobs - behavior_logprobs),  u = exp(logprobs - proximal_logprobs)

    ``proximal_logprobs`` are the trainer's own logprobs at the start of the step. w is detached and
    not truncated. To truncate it, multiply ``clipped(logprobs, proximal_logprobs, advantages)`` by
    a correction such as ``token_tis(proximal_logprobs, behavior_logprobs)``.

    Source: the decoupled clipped objective of arXiv:2110.00641; for asynchronous RL: AReaL,
    arXiv:2505.24298.
    ``aux["clipped"]`` is 1 where the clip stops the gradient.

    Raises:
        ValueError: a clip is negative, ``clip_low`` is above 1, a clip is out of reach of clamped
            ratios (1.0 and infinity, respectively, mean no bound), or a tensor has the wrong shape
            or dtype.
    """
    _require_clips(clip_low, clip_high)
    u = ratio_by(ratio, logprobs, proximal_logprobs)
    w = ratio_by(ratio, proximal_logprobs, behavior_logprobs).detach()
    per_token, aux = _clipped(u, advantages.to(u.dtype), clip_low, clip_high, None)
    aux["log_ratio_limited"] = torch.maximum(aux["log_ratio_limited"], limited(w))
    return w * per_token, aux


def _clipped(
    r: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Aux]:
    free = r * advantages
    bounded = r.clamp(1 - clip_low, 1 + clip_high) * advantages
    # Not torch.minimum: where both are equal, its gradient differs between versions of torch.
    stopped = bounded < free
    objective = torch.where(stopped, bounded, free)
    if dual_clip is not None:
        floor = dual_clip * advantages
        beyond = (advantages < 0) & (objective < floor)
        objective, stopped = torch.where(beyond, floor, objective), stopped | beyond
    return -objective, _aux(r, clipped=stopped)


def _constant(x: Tensor) -> Tensor:
    """A detached factor, with 0 where it is not finite.

    The logprob that it multiplies is not finite there either, so the row still shows in the loss.
    """
    return x.where(x.isfinite(), x.new_zeros(()))


def _require_clips(clip_low: float, clip_high: float) -> None:
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(
            f"clip_low={clip_low}, clip_high={clip_high}: expected 0 <= clip_low <= 1 "
            "and clip_high >= 0"
        )
    if clip_low < 1:
        require_reachable("clip_low", clip_low, bound=1 - clip_low, off="1.0")
    if clip_high != math.inf:
        require_reachable("clip_high", clip_high, bound=1 + clip_high, off="math.inf")


def _aux(r: Tensor, **flags: Tensor) -> Aux:
    counted = {name: flag.detach().to(r.dtype) for name, flag in flags.items()}
    return {"log_ratio_limited": limited(r)} | counted
