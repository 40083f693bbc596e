"""Losses as algebra on tensors: pure, elementwise, unreduced.

    logprobs = loss.model_logprobs(model, batch.token_ids, batch.position_ids, batch.labels,
                                   temperature=batch.temperature)
    per_token, aux = loss.dppo(logprobs, batch.behavior_logprobs, batch.advantages)
    loss.token_mean(per_token, batch.loss_mask, denom=tokens_in_step).backward()

Tensors are positional, hyperparameters keyword-only. A token loss returns ``(loss[t], aux)``, where
``aux`` maps a name to a detached ``[t]`` tensor that reduces with the same mask. Masking and
averaging are the caller's choice, by ``token_mean``.
"""

from primerl.loss.diagnostics import mismatch_kl
from primerl.loss.linear_head import linear_logprobs
from primerl.loss.logprobs import model_logprobs, model_logprobs_and_entropy, token_logprobs
from primerl.loss.ratio import token_ratio
from primerl.loss.reduction import token_mean
from primerl.loss.surrogate import clipped, dppo

__all__ = [
    "clipped",
    "dppo",
    "linear_logprobs",
    "mismatch_kl",
    "model_logprobs",
    "model_logprobs_and_entropy",
    "token_logprobs",
    "token_mean",
    "token_ratio",
]
