"""Estimates of a KL divergence, and cross-entropy, one value per token."""

from jaxtyping import Float
from torch import Tensor

from primerl.loss.arguments import checked
from primerl.loss.ratio import log_ratio, trainable


@checked(finite=["other"])
def k1(logprobs: Float[Tensor, " t"], other: Float[Tensor, " t"]) -> Float[Tensor, " t"]:
    """The estimate ``-d`` of ``KL(p || q)``, with ``d = other - logprobs``.

    For tokens drawn from p, whose logprobs are ``logprobs``; ``other`` are those of q. Unbiased,
    but of either sign. As a loss its gradient is zero in expectation: use it in the reward or
    advantage. d is clamped to +-20, here and in ``k2`` and ``k3``, with zero gradient beyond.

    Source: J. Schulman, "Approximating KL divergence" (2020).

    Raises:
        ValueError: shapes differ, or ``other`` is not finite.
    """
    return log_ratio(logprobs, other)


@checked(finite=["other"])
def k2(logprobs: Float[Tensor, " t"], other: Float[Tensor, " t"]) -> Float[Tensor, " t"]:
    """The estimate ``d^2 / 2`` of ``KL(p || q)``, with ``d = other - logprobs``.

    Biased, never negative. As a loss, its gradient is that of the KL divergence in expectation,
    on policy. The regularizer ``log(r)^2`` of prime-rl, after Kimi K2.5 (arXiv:2602.02276), is
    twice this.

    Source: J. Schulman, "Approximating KL divergence" (2020).

    Raises:
        ValueError: shapes differ, or ``other`` is not finite.
    """
    return log_ratio(logprobs, other).square() / 2


@checked(finite=["other"])
def k3(logprobs: Float[Tensor, " t"], other: Float[Tensor, " t"]) -> Float[Tensor, " t"]:
    """The estimate ``e^d - d - 1`` of ``KL(p || q)``, with ``d = other - logprobs``.

    Unbiased and never negative. As a loss, its gradient is that of ``KL(q || p)`` in expectation,
    on policy. This is the KL term of GRPO (arXiv:2402.03300, equation 4).

    Source: J. Schulman, "Approximating KL divergence" (2020).

    Raises:
        ValueError: shapes differ, or ``other`` is not finite.
    """
    d = -log_ratio(logprobs, other)
    return d.expm1() - d


@checked()
def cross_entropy(logprobs: Float[Tensor, " t"]) -> Float[Tensor, " t"]:
    """The negative log-likelihood of each token, in nats: ``-logprobs``.

    For supervised fine-tuning, distillation on a teacher's tokens, and predicting an environment's
    replies. Computed in at least float32.

    Raises:
        ValueError: ``logprobs`` is not a floating-point vector.
    """
    return -trainable(logprobs)
