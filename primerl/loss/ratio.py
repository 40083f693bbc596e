"""Importance ratios between the policy and the sampler, per token and per sequence."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from primerl._common.host_memory import known_on_host
from primerl._common.ranks import identity
from primerl.loss.arguments import checked, require_finite

LOG_RATIO_LIMIT = 20.0
LEAST_RATIO, GREATEST_RATIO = math.exp(-LOG_RATIO_LIMIT), math.exp(LOG_RATIO_LIMIT)
# Tensors of sums per sequence are padded to one of a few sizes, so that all ranks choose the same.
FEWEST_SEQUENCES, MOST_SEQUENCES = 1024, 2**24

Ratio = Callable[[Tensor, Tensor], Tensor]
"""``(logprobs[t], behavior_logprobs[t]) -> ratio[t]``."""

AllSum = Callable[[Tensor], Tensor]
"""The sum of a tensor over the ranks that share documents, such as ``parallel.all_sum``."""


def require_reachable(name: str, value: float, *, bound: float, off: str | None) -> None:
    """Refuse an argument whose bound no ratio can cross, because log-ratios are clamped to +-20.

    ``bound`` is the ratio at which the argument takes effect. ``off``, if any, is the value of the
    argument that means no bound.
    """
    slack = 1e-5  # for the rounding of exp in float32
    none = "" if off is None else f", or {name}={off} for none"
    if not LEAST_RATIO * (1 + slack) < bound < GREATEST_RATIO * (1 - slack):
        raise ValueError(
            f"{name}={value}: all ratios are on the same side of the bound {bound:.3g}, because "
            f"they are clamped to e^-20 = {LEAST_RATIO:.3g} and e^20 = {GREATEST_RATIO:.3g}; "
            f"expected a bound between these{none}"
        )


def upcast(x: Tensor) -> Tensor:
    """Convert a tensor to float32, unless it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def trainable(logprobs: Tensor) -> Tensor:
    """The trainer's logprobs in at least float32; rows that are not finite are detached.

    Their values are kept, so that a NaN in a trained row shows in the loss. In a row that is masked
    out later, the gradient of zero would otherwise become NaN when it is multiplied by NaN.
    """
    x = upcast(logprobs)
    return x.where(x.isfinite(), x.detach())


def log_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """``logprobs - other``, clamped to +-20, with zero gradient beyond."""
    difference = trainable(logprobs) - upcast(other)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio_by(ratio: Ratio, logprobs: Tensor, other: Tensor) -> Tensor:
    """Call a user's ratio function, and check that it returns one entry per row."""
    r = ratio(logprobs, other)
    if r.shape != logprobs.shape:
        raise ValueError(
            f"ratio returned shape {tuple(r.shape)}, but logprobs has shape "
            f"{tuple(logprobs.shape)}: expected one entry per row"
        )
    return r


def limited(ratio: Tensor) -> Tensor:
    """A detached tensor that is 1 where the log-ratio is clamped at +-20, and 0 elsewhere."""
    held = ratio.detach().log().abs() > LOG_RATIO_LIMIT - 1e-5  # for the rounding of exp
    return held.to(ratio.dtype)


@checked(finite=["behavior_logprobs"])
def token_ratio(
    logprobs: Float[Tensor, " t"], behavior_logprobs: Float[Tensor, " t"]
) -> Float[Tensor, " t"]:
    """The importance ratio of each token: ``r = exp(logprobs - behavior_logprobs)``.

    The log-ratio is clamped to +-20, with zero gradient beyond. Computed in at least float32.
    Source: PPO, arXiv:1707.06347, section 3.

    Raises:
        ValueError: shapes differ, or ``behavior_logprobs`` is not finite.
    """
    return log_ratio(logprobs, behavior_logprobs.detach()).exp()


@checked()
def sequence_ratio(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    loss_mask: Bool[Tensor, " t"],
    sequence_ids: Int[Tensor, " t"],
    *,
    all_sum: AllSum = identity,
    length_normalized: bool = True,
) -> Float[Tensor, " t"]:
    """The importance ratio of each token's whole sequence, in the stop-gradient form of GSPO.

        s_i = exp( 1/|y_i| sum_t log r_t ),    returned: sg(s_i) * p_t / sg(p_t)

    The sum is over the trained tokens of sequence i, sg stops the gradient, and p_t is the
    probability of token t. The value is ``s_i`` in every row. Its gradient with respect to
    ``logprobs[t]`` is ``s_i`` in the trained rows, so under ``sequence_mean`` the gradient is that
    of ``s_i`` itself (for the product, of ``s_i / |y_i|``). Ranks exchange only a sum without
    gradient.

    Source: GSPO, arXiv:2507.18071, equations 7 (``s_i``) and 14 (GSPO-token). With
    ``length_normalized=False`` it is the product of the token ratios: the exact importance weight.

    Args:
        logprobs: current logprobs of the trainer.
        behavior_logprobs: the sampler's logprobs; any values where the mask is false.
        loss_mask: true at the trained tokens.
        sequence_ids: the document of each row, from 0 to s-1. Ranks that share a document must
            number it alike.
        all_sum: sums a tensor over the ranks that share these documents; all of them must call it.
        length_normalized: return the geometric mean of the token ratios instead of their product.

    The log of the result is clamped to +-20, with zero gradient beyond. A sequence without a
    trained token has the ratio 1.

    Raises:
        ValueError: shapes or dtypes are wrong, a sequence id is negative or at least 2^24, or
            ``behavior_logprobs`` is not finite at a trained token.
    """
    require_finite("behavior_logprobs", behavior_logprobs, loss_mask)
    difference = logprobs.detach().double() - behavior_logprobs.double()
    total, count = sequence_sums(difference, loss_mask, sequence_ids, all_sum=all_sum)
    log_s = total / count.clamp(min=1) if length_normalized else total
    held = log_s.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    own = trainable(logprobs)
    # exp(x - sg(x)) is 1 with the gradient of x.
    attached = loss_mask & (held == log_s)[sequence_ids] & own.isfinite()
    step = torch.where(attached, own - own.detach(), own.new_zeros(()))
    return held.exp().to(own.dtype)[sequence_ids] * step.exp()


def sequence_sums(
    x: Tensor, loss_mask: Tensor, sequence_ids: Tensor, *, all_sum: AllSum
) -> tuple[Tensor, Tensor]:
    """Return the sum of ``x[t]`` over each sequence's trained tokens, and their number.

    Both results are detached. They are float64, so that the order of summation hardly matters.
    """
    known = known_on_host(sequence_ids)
    ids = sequence_ids if known is None else known
    lowest, highest = ids.aminmax() if ids.numel() else (torch.tensor(0),) * 2
    if lowest < 0 or highest >= MOST_SEQUENCES:
        wrong = int(lowest if lowest < 0 else highest)
        raise ValueError(
            f"sequence_ids contains {wrong}; expected document numbers from 0 to "
            f"{MOST_SEQUENCES - 1}"
        )
    # Ranks may have different ids; the sum of the sizes that they need is enough for every rank.
    device = highest.device if all_sum is identity else x.device  # of the collective
    needed = all_sum(torch.as_tensor(highest, device=device).long() + 1)
    if not isinstance(needed, Tensor):
        raise ValueError(f"all_sum returned {needed!r}; expected a tensor, like parallel.all_sum")
    size = max(FEWEST_SEQUENCES, 2 ** int(needed - 1).bit_length())
    sums = torch.zeros(2, size, dtype=torch.float64, device=x.device)
    sums[0].index_add_(0, sequence_ids.long(), x.detach().double().where(loss_mask, 0.0))
    sums[1].index_add_(0, sequence_ids.long(), loss_mask.double())
    total, count = all_sum(sums)
    return total, count
