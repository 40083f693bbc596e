"""Logprobs of fixed sequences, by engines and by the trainer, and how far they have moved."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

BATCH = 4  # rows in a forward pass, all of one length
CHUNK = 256  # rows of logits that are normalized at once


def sequences_for(model: nn.Module, *, count: int, length: int) -> list[list[int]]:
    """Fixed sequences of random tokens, from the middle of the vocabulary.

    Special tokens and placeholders for images lie at its ends. Random tokens need no tokenizer and
    move with the weights as much as text does (measured in docs/verification.md).
    """
    config: Mapping[str, Any] | Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int):
        raise ValueError("the model has no config.vocab_size to draw the canary's sequences from")
    edge = size // 16
    draw = np.random.default_rng(0).integers(edge, size - edge, (count, length))
    rows: list[list[int]] = draw.tolist()
    return rows


# ---- engines' ----


@runtime_checkable
class Prober(Protocol):
    """An engine that scores fixed sequences, on each of its replicas."""

    def probe(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = ...,
        temperatures: Sequence[float] = ...,
        timeout_s: float = ...,
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """For each replica by name, for each sequence: ``scores[t]``, the logprob of each token
        given those before it (the first is 0), at temperature 1; and the ``token_ids[n]`` with
        which it is continued, and their ``logprobs[n]``, sampled at the temperature of the sequence
        as rollouts are, and of the distribution that was sampled.
        """
        ...


def probed(
    engine: Prober,
    sequences: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    temperatures: Sequence[float] | None = None,
    timeout_s: float,
) -> list[dict[str, Any]]:
    """One row for each replica and sequence, as builtins; the tokens are those of both parts.

    Raises:
        RuntimeError: an answer is malformed, or the engine has no replica.
    """
    if temperatures is None:
        temperatures = [1.0] * len(sequences)
    answer = engine.probe(
        sequences, max_new_tokens=new_tokens, temperatures=temperatures, timeout_s=timeout_s
    )
    if not answer:
        raise RuntimeError("the engine has no replica to probe")
    rows = []
    for replica, results in answer.items():
        for sequence, temperature, result in zip(sequences, temperatures, results, strict=True):
            more = [int(token) for token in result["token_ids"]]
            logprobs = [float(one) for one in result["logprobs"]]
            scores = [float(one) for one in result["scores"]]
            if len(scores) != len(sequence) or len(logprobs) != len(more):
                raise RuntimeError(
                    f"{replica} gave {len(scores)} scores for {len(sequence)} tokens and "
                    f"{len(logprobs)} logprobs for {len(more)} new ones"
                )
            rows.append(
                {
                    "replica": replica,
                    "token_ids": [*sequence, *more],
                    "scores": scores,
                    "logprobs": logprobs,
                    "temperature": temperature,
                }
            )
    return rows


# ---- the trainer's ----


@attrs.frozen
class _Row:
    """Tokens, the last ``sampled`` of which are scored at ``temperature``, the others at 1."""

    token_ids: tuple[int, ...]
    sampled: int = 0
    temperature: float = 1.0

    @property
    def temperatures(self) -> list[float]:
        """Of the distribution *after* each token."""
        plain = len(self.token_ids) - self.sampled - 1
        return [1.0] * plain + [self.temperature] * (self.sampled + 1)


def trainer_logprobs(
    model: nn.Module,
    rows: Sequence[Sequence[int]],
    *,
    sampled: Sequence[tuple[int, float]] | None = None,
    first_position: int = 0,
) -> list[Float[np.ndarray, " t"]]:
    """The logprob of each token given those before it, by a plain forward pass in eval mode.

    One array of float64 for each row; its first entry is 0. All ranks of a sharded model call this.
    The model's mode, gradients and weights are left as they were.

    Args:
        model: a causal language model that returns ``logits``.
        rows: token ids.
        sampled: for each row, how many of its last tokens were sampled, and at which temperature;
            the others are scored at 1.
        first_position: of each row.
    """
    keys = [
        _Row(tuple(row), *tail)
        for row, tail in zip(rows, sampled or [(0, 1.0)] * len(rows), strict=True)
    ]
    by_length: dict[int, list[_Row]] = {}
    for key in dict.fromkeys(keys):  # replicas often agree
        by_length.setdefault(len(key.token_ids), []).append(key)
    scored: dict[_Row, np.ndarray] = {}
    with torch.no_grad(), evaluating(model):
        for same in by_length.values():
            for start in range(0, len(same), BATCH):
                batch = same[start : start + BATCH]
                scored |= zip(batch, _logprobs(model, batch, first_position), strict=True)
    return [scored[key] for key in keys]


def rounding_noise(model: nn.Module, row: Sequence[int]) -> float:
    """The root mean square, in nats, of what rounding adds to the trainer's own logprobs.

    Measured by a shift of all positions, under which rotary embeddings are the same but for
    rounding. A model with other positional embeddings gives a large number, which only delays
    conclusions.
    """
    here, shifted = (trainer_logprobs(model, [row], first_position=first)[0] for first in (0, 1))
    return rms(shifted[1:] - here[1:])


def _logprobs(
    model: nn.Module, rows: Sequence[_Row], first_position: int
) -> Float[np.ndarray, "b t"]:
    device = next(model.parameters()).device
    token_ids = torch.tensor([row.token_ids for row in rows], dtype=torch.long, device=device)
    temperatures = torch.tensor([row.temperatures for row in rows], device=device).flatten()
    count, length = token_ids.shape
    position_ids = (torch.arange(length, device=device) + first_position).expand(count, -1)
    logits: Tensor = model(
        input_ids=token_ids, position_ids=position_ids, use_cache=False
    ).logits.flatten(0, 1)
    following = token_ids.roll(-1, 1).flatten()  # the last position's is no token of the row
    parts = [
        (part.float() / warmth[:, None]).log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        for part, warmth, chosen in zip(
            torch.split(logits, CHUNK),
            torch.split(temperatures, CHUNK),
            torch.split(following, CHUNK),
            strict=True,
        )
    ]
    own = torch.cat(parts).reshape(count, length)[:, :-1].double().cpu().numpy()
    return np.pad(own, ((0, 0), (1, 0)))


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for the body; afterwards every module is in its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
        # Weights that a forward pass gathered would hide a change of the sharded ones.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


# ---- how far they have moved ----


def movement(
    predicted: Float[np.ndarray, " t"], observed: Float[np.ndarray, " t"]
) -> tuple[float, float]:
    """How much of the ``predicted`` change was ``observed``, and the standard error of that.

    ``m = <e, d> / <d, d>`` with d predicted and e observed: 1 where all of it was, 0 where none.
    ``sqrt(sum(d^2 (e - m d)^2)) / <d, d>`` is its error, whatever the noise of each token (White,
    "A Heteroskedasticity-Consistent Covariance Matrix Estimator", 1980). Infinite where nothing was
    predicted.
    """
    power = float(predicted @ predicted)
    if not power > 0 or not math.isfinite(power):
        return math.nan, math.inf
    moved = float(predicted @ observed) / power
    rest = observed - moved * predicted
    return moved, float(np.sqrt(np.square(predicted * rest).sum())) / power


def rms(values: Float[np.ndarray, " t"]) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.square(values).mean()))


def mismatch_kl(log_ratios: Float[np.ndarray, " t"]) -> float:
    """The mean of ``r - 1 - log r``: what ``loss.mismatch_kl`` is to trained tokens."""
    return float(np.mean(np.expm1(log_ratios) - log_ratios))
