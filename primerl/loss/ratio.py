"""Importance ratios between the policy and the weights that sampled."""

import torch
from jaxtyping import Float
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def upcast(x: Tensor) -> Tensor:
    """The tensor in at least float32; float64 stays float64."""
    return x if x.dtype == torch.float64 else x.float()


def log_ratio(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """``logprobs - behavior_logprobs`` within +-20: held beyond, with zero gradient."""
    difference = upcast(logprobs) - upcast(behavior_logprobs)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_ratio(
    logprobs: Float[Tensor, " t"], behavior_logprobs: Float[Tensor, " t"]
) -> Float[Tensor, " t"]:
    """The importance ratio of each token: ``r = exp(logprobs - behavior_logprobs)``.

    The log-ratio is held within +-20, with zero gradient beyond. Computed in at least float32.
    Source: PPO, arXiv:1707.06347, equation 6.
    """
    return log_ratio(logprobs, behavior_logprobs).exp()
