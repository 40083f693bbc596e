"""KL divergences, their estimators, and cross-entropy, with one value per token."""

from jaxtyping import Float
from torch import Tensor

from primerl.loss.arguments import checked
from primerl.loss.ratio import log_ratio, trainable, upcast
from primerl.loss.surrogate import Aux

LEAST_TAIL = 1e-5
"""Lower bound of the tail's probability, which is 1 minus a sum: less is mostly rounding error."""


@checked(finite=["other"])
def k1(logprobs: Float[Tensor, " t"], other: Float[Tensor, " t"]) -> Float[Tensor, " t"]:
    """The estimate ``-d`` of ``KL(p || q)``, with ``d = other - logprobs``.

    Tokens are drawn from p; ``logprobs`` are theirs under p, ``other`` under q. The estimate is
    unbiased, but of either sign. As a loss, its gradient is zero in expectation, so use it in the
    reward or advantage. d is clamped to +-20, here and in ``k2`` and ``k3``, with zero gradient
    beyond.

    Source: J. Schulman, "Approximating KL divergence" (2020).

    Raises:
        ValueError: shapes differ, or ``other`` is not finite.
    """
    return log_ratio(logprobs, other)


@checked(finite=["other"])
def k2(logprobs: Float[Tensor, " t"], other: Float[Tensor, " t"]) -> Float[Tensor, " t"]:
    """The estimate ``d^2 / 2`` of ``KL(p || q)``, with ``d = other - logprobs``.

    The estimate is biased, but never negative. As a loss on policy, its gradient is that of the KL
    divergence in expectation. The regularizer ``log(r)^2`` of prime-rl, after Kimi K2.5
    (arXiv:2602.02276), is twice this.

    Source: J. Schulman, "Approximating KL divergence" (2020).

    Raises:
        ValueError: shapes differ, or ``other`` is not finite.
    """
    return log_ratio(logprobs, other).square() / 2


@checked(finite=["other"])
def k3(logprobs: Float[Tensor, " t"], other: Float[Tensor, " t"]) -> Float[Tensor, " t"]:
    """The estimate ``e^d - d - 1`` of ``KL(p || q)``, with ``d = other - logprobs``.

    The estimate is unbiased and never negative. As a loss on policy, its gradient is that of
    ``KL(q || p)`` in expectation. This is the KL term of GRPO (arXiv:2402.03300, equation 4).

    Source: J. Schulman, "Approximating KL divergence" (2020).

    Raises:
        ValueError: shapes differ, or ``other`` is not finite.
    """
    d = -log_ratio(logprobs, other)
    return d.expm1() - d


@checked(finite=["ref_logprobs"])
def top_k_forward_kl(
    logprobs: Float[Tensor, "t k"], ref_logprobs: Float[Tensor, "t k"]
) -> tuple[Float[Tensor, " t"], Aux]:
    """``KL(q || p)`` of a teacher q and the policy p, over the teacher's top k tokens and a tail.

        sum_i q_i (log q_i - log p_i),   i: each of the k tokens, and the tail of all others

    Both arguments give logprobs of the same tokens in each row: the k tokens that the teacher finds
    likeliest, each once. The value is at most the KL divergence over the whole vocabulary, which it
    approaches as k grows. It is 0 only where policy and teacher agree on these tokens. Its gradient
    with respect to the logits of the k tokens is that of the whole divergence, ``p - q``. The tail
    counts as one token, so the policy does not learn how the teacher ranks the tail's tokens. In
    logarithms, the tail's probability is clamped to at least 1e-5: if the policy gives it less, the
    tail's term has no gradient.

    In contrast to ``distill``, this is not estimated from the sampled token: it has less variance
    and needs no ratio. The prefixes are still those of the sampler.

    The loss is wrong where a token is repeated in a row, because its probability counts twice. It
    is weak where k is small for a flat teacher (``aux["ref_tail"]`` is large), and on prefixes that
    the teacher would never have written.

    Source: the forward KL of GKD on the student's own samples, arXiv:2306.13649. Merging the other
    tokens gives a lower bound by the data-processing inequality. ``aux["ref_tail"]`` is the
    teacher's probability of the tail.

    Raises:
        ValueError: shapes differ, or ``ref_logprobs`` is not finite.
    """
    p, q = trainable(logprobs), upcast(ref_logprobs)
    p_tail, q_tail = _tail(p), _tail(q)
    of_tail = q_tail * (q_tail.clamp(min=LEAST_TAIL).log() - p_tail.clamp(min=LEAST_TAIL).log())
    per_token = (q.exp() * (q - p)).sum(1) + of_tail
    return per_token, {"ref_tail": q_tail.detach()}


def _tail(logprobs: Tensor) -> Tensor:
    """The probability of all other tokens, clamped because rounding could make it negative."""
    return (1 - logprobs.exp().sum(1)).clamp(min=0.0)


@checked()
def cross_entropy(logprobs: Float[Tensor, " t"]) -> Float[Tensor, " t"]:
    """The negative log-likelihood of each token, in nats: ``-logprobs``.

    Use it for supervised fine-tuning, for distillation on a teacher's tokens, and for predicting an
    environment's replies. It is computed in at least float32.

    Raises:
        ValueError: ``logprobs`` is not a floating-point vector.
    """
    return -trainable(logprobs)
