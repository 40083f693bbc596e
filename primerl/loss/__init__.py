"""RL losses per token, as pure elementwise functions of tensors, and their reductions.

    logprobs = loss.model_logprobs(model, batch.token_ids, batch.position_ids, batch.labels,
                                   temperature=batch.temperature)
    per_token, aux = loss.dppo(logprobs, batch.behavior_logprobs, batch.advantages)
    loss.token_mean(per_token, batch.loss_mask, denom=tokens_in_step).backward()

An algorithm is a choice of advantage, ratio, correction, surrogate and reduction, each a function;
the documentation has a table of algorithms. Tensors are positional, hyperparameters keyword-only. A
token loss returns ``(loss[t], aux)``, where ``aux`` maps a name to a detached ``[t]`` tensor.
Masking and averaging are left to a reduction. Everything is computed in at least float32.
Log-ratios are clamped to +-20, with zero gradient beyond; ``aux["log_ratio_limited"]`` marks the
tokens that are clamped.
"""

from primerl.loss.correction import (
    geometric_rejection,
    icepop,
    sequence_mis,
    sequence_tis,
    token_mis,
    token_tis,
    veto,
)
from primerl.loss.diagnostics import Statistics, mismatch_kl
from primerl.loss.kl import cross_entropy, k1, k2, k3, top_k_forward_kl
from primerl.loss.linear_head import linear_logprobs
from primerl.loss.logprobs import (
    model_candidate_logprobs,
    model_logprobs,
    model_logprobs_and_entropy,
    model_top_k_logprobs,
    token_logprobs,
)
from primerl.loss.ratio import sequence_ratio, token_ratio
from primerl.loss.reduction import fixed_length_mean, sequence_mean, token_mean
from primerl.loss.surrogate import cispo, clipped, decoupled, gspo, reinforce, sapo, topr
from primerl.loss.trust_region import distill, dppo, ipo

__all__ = [
    "Statistics",
    "cispo",
    "clipped",
    "cross_entropy",
    "decoupled",
    "distill",
    "dppo",
    "fixed_length_mean",
    "geometric_rejection",
    "gspo",
    "icepop",
    "ipo",
    "k1",
    "k2",
    "k3",
    "linear_logprobs",
    "mismatch_kl",
    "model_candidate_logprobs",
    "model_logprobs",
    "model_logprobs_and_entropy",
    "model_top_k_logprobs",
    "reinforce",
    "sapo",
    "sequence_mean",
    "sequence_mis",
    "sequence_ratio",
    "sequence_tis",
    "token_logprobs",
    "token_mean",
    "token_mis",
    "token_ratio",
    "token_tis",
    "top_k_forward_kl",
    "topr",
    "veto",
]
