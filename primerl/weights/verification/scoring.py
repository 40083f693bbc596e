"""Logprobs of fixed sequences, by engines and by the trainer, and measures of their change."""

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

LENGTH = 288  # of a canary's sequences, unless the engine's cache has longer blocks
SHORT_LENGTH = 72  # the same if a few scores show what they have to
BATCH = 4  # rows in a forward pass, all of the same length
CHUNK = 256  # rows of logits that are normalized at once

log = logging.getLogger(__name__)


def default_length(engine: Any, *, few_show: bool, new_tokens: int) -> int:
    """Return the length of a canary's sequences: a little more than two cache blocks.

    A prompt is cached in whole blocks and without its last token, so the continuation of a sequence
    of this length reads two blocks. The length is at least 288, or 72 if a few scores show a fault,
    and at most the engine's context. It is 288 if the engine has no ``cache_block`` or can't read
    it.

    Raises:
        RuntimeError: the engine knows its blocks, but not its context.
    """
    try:
        block = getattr(engine, "cache_block", None)
    except RuntimeError as error:
        log.info("a canary of %d tokens, because the engine's cache is unknown: %s", LENGTH, error)
        block = None
    if block is None:
        return LENGTH
    wanted = max(2 * int(block) + 8, SHORT_LENGTH if few_show else LENGTH)
    return min(wanted, int(engine.context_length) - new_tokens)


def sequences_for(model: nn.Module, *, count: int, length: int) -> list[list[int]]:
    """Return fixed sequences of random tokens from the middle of the vocabulary.

    The ends of the vocabulary, which have special tokens and placeholders for images, are left out.
    Random tokens need no tokenizer, and their logprobs change with the weights as much as those of
    text (measured in docs/verification.md).
    """
    config: Mapping[str, Any] | Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int):
        raise ValueError(
            "the model has no integer config.vocab_size, which the canary needs to draw its token "
            "sequences"
        )
    edge = size // 16
    draw = np.random.default_rng(0).integers(edge, size - edge, (count, length))
    rows: list[list[int]] = draw.tolist()
    return rows


# ---- logprobs of engines ----


@runtime_checkable
class Prober(Protocol):
    """Protocol of engines that score and continue fixed sequences, on each of their servers."""

    def probe(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = ...,
        temperatures: Sequence[float] = ...,
        timeout_s: float = ...,
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Score and continue each sequence on each server.

        Returns:
            By server, one mapping per sequence: ``scores[t]``, the logprob of each token given
            those before it, at temperature 1 (the first is 0); the continuation's
            ``token_ids[n]``, sampled as in rollouts, at the sequence's temperature; and their
            ``logprobs[n]`` in the sampled distribution.
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
    """Probe an engine; return one row per server and sequence, of built-in types.

    ``token_ids`` of a row are the sequence and its continuation.

    Raises:
        RuntimeError: an answer is malformed, or the engine has no servers.
    """
    if temperatures is None:
        temperatures = [1.0] * len(sequences)
    answer = engine.probe(
        sequences, max_new_tokens=new_tokens, temperatures=temperatures, timeout_s=timeout_s
    )
    if not answer:
        raise RuntimeError("the engine's probe returned no results: it has no servers")
    rows = []
    for server, results in answer.items():
        for sequence, temperature, result in zip(sequences, temperatures, results, strict=True):
            more = [int(token) for token in result["token_ids"]]
            logprobs = [float(one) for one in result["logprobs"]]
            scores = [float(one) for one in result["scores"]]
            if len(scores) != len(sequence) or len(logprobs) != len(more):
                raise RuntimeError(
                    f"{server} returned {len(scores)} scores for {len(sequence)} tokens and "
                    f"{len(logprobs)} logprobs for {len(more)} sampled tokens"
                )
            rows.append(
                {
                    "server": server,
                    "token_ids": [*sequence, *more],
                    "scores": scores,
                    "logprobs": logprobs,
                    "temperature": temperature,
                }
            )
    return rows


# ---- logprobs of the trainer ----


@attrs.frozen
class _Row:
    """Tokens to score: the last ``sampled`` ones at ``temperature``, the others at 1."""

    token_ids: tuple[int, ...]
    sampled: int = 0
    temperature: float = 1.0

    @property
    def temperatures(self) -> list[float]:
        """The temperature of the distribution *after* each token."""
        plain = len(self.token_ids) - self.sampled - 1
        return [1.0] * plain + [self.temperature] * (self.sampled + 1)


def trainer_logprobs(
    model: nn.Module,
    rows: Sequence[Sequence[int]],
    *,
    sampled: Sequence[tuple[int, float]] | None = None,
    first_position: int = 0,
) -> list[Float[np.ndarray, " t"]]:
    """Compute the logprob of each token given those before it, by a forward pass in eval mode.

    All ranks of a sharded model call this. The model's mode, gradients and weights don't change.

    Args:
        model: a causal language model that returns ``logits``.
        rows: sequences of token ids.
        sampled: for each row, the number of sampled tokens at its end, and their temperature; the
            other tokens are scored at temperature 1.
        first_position: the position id of each row's first token.

    Returns:
        float64[t] for each row; its first entry is 0.
    """
    keys = [
        _Row(tuple(row), *tail)
        for row, tail in zip(rows, sampled or [(0, 1.0)] * len(rows), strict=True)
    ]
    by_length: dict[int, list[_Row]] = {}
    for key in dict.fromkeys(keys):  # servers often sample the same tokens
        by_length.setdefault(len(key.token_ids), []).append(key)
    scored: dict[_Row, np.ndarray] = {}
    with torch.no_grad(), evaluating(model):
        for same in by_length.values():
            for start in range(0, len(same), BATCH):
                batch = same[start : start + BATCH]
                scored |= zip(batch, _logprobs(model, batch, first_position), strict=True)
    return [scored[key] for key in keys]


def rounding_noise(model: nn.Module, row: Sequence[int]) -> float:
    """Measure the root mean square rounding error of the trainer's own logprobs, in nats.

    All positions are shifted by 1, which changes the results of rotary embeddings only by rounding.
    For models with other positional embeddings the result is large, which only delays conclusions.
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
    following = token_ids.roll(-1, 1).flatten()  # wraps at the last position, cut off below
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
    """Set eval mode for the body, and restore each module's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
        # Gathered weights that the forward pass left would hide later changes of the shards.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


# ---- changes of logprobs ----


def movement(
    predicted: Float[np.ndarray, " t"], observed: Float[np.ndarray, " t"]
) -> tuple[float, float]:
    """Estimate the share of the ``predicted`` change that was ``observed``.

    Returns:
        The share ``m = <e, d> / <d, d>`` with d predicted and e observed, which is 1 if all of the
        change was observed and 0 if none; and its standard error
        ``sqrt(sum(d^2 (e - m d)^2)) / <d, d>``, which allows for noise that differs by token
        (White, "A Heteroskedasticity-Consistent Covariance Matrix Estimator", 1980). If no change
        was predicted, the share is NaN and the error infinite.
    """
    power = float(predicted @ predicted)
    if not power > 0 or not math.isfinite(power):
        return math.nan, math.inf
    moved = float(predicted @ observed) / power
    rest = observed - moved * predicted
    return moved, float(np.sqrt(np.square(predicted * rest).sum())) / power


def rms(values: Float[np.ndarray, " t"]) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.square(values).mean()))


def mismatch_kl(log_ratios: Float[np.ndarray, " t"]) -> float:
    """Return the mean of ``r - 1 - log r``, as ``loss.mismatch_kl`` does for trained tokens."""
    return float(np.mean(np.expm1(log_ratios) - log_ratios))
