"""Numbers that say whether trainer and sampler agree."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from primerl.loss.ratio import upcast


def mismatch_kl(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    loss_mask: Bool[Tensor, " t"],
    versions: Int[Tensor, " t"],
    *,
    version: int,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """The numerical distance of trainer and sampler: the sum and the count of ``r - 1 - log r``.

    ``r`` is trainer over sampler, over the trained tokens *whose version is the trainer's*: the
    same weights gave both logprobs, so anything above rounding is a difference in numerics, not in
    policy. An unbiased, non-negative estimate of the KL divergence (k3 of Schulman's "Approximating
    KL divergence", 2020). Sum and count are returned apart, to be added over micro-batches and
    ranks; the mean is their quotient.

    Args:
        logprobs: by the trainer, now.
        behavior_logprobs: by the sampler.
        loss_mask: the trained tokens.
        versions: the version that sampled each token.
        version: the trainer's version: of the weights that gave ``logprobs``.
    """
    same = loss_mask & (versions == version)
    log_r = upcast(logprobs.detach()) - upcast(behavior_logprobs)
    log_r = log_r.where(same, log_r.new_zeros(()))
    return (log_r.expm1() - log_r).sum(), same.sum()
