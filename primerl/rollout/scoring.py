"""Scores of samples by a teacher, requested concurrently and attached to the samples.

    scores = rollout.score_samples(teacher, samples)
    samples, missing = rollout.with_scores(samples, scores)

A sample without scores is not trained, and is counted: zeros in place of its scores would pass for
logprobs.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np

from primerl.rollout.errors import summary
from primerl.rollout.processes.background_loop import BackgroundLoop
from primerl.types import TrainingSample

Scores: TypeAlias = Mapping[str, np.ndarray]
"""A sample's ``ref_logprobs``, and, if top tokens were requested, its ``ref_top_ids`` and
``ref_top_logprobs``."""


@attrs.frozen
class NoScores:
    """Why a sample has no scores: a ``reason`` to count by, and the ``error`` as text."""

    reason: str
    error: str


def score_samples(
    engine: Any,
    samples: Sequence[TrainingSample],
    *,
    top_k: int = 0,
    timeout_s: float = 600.0,
    max_concurrent: int = 64,
) -> list[Scores | NoScores]:
    """Return a teacher's logprobs of the samples' tokens; block until all requests are answered.

    Args:
        engine: has ``async score(token_ids)``, as ``VLLMEngine`` does, and the samples' tokenizer.
            None on ranks other than 0, where there are no samples to score.
        samples: sampled at temperature 1, at which engines score.
        top_k: also request this many of the teacher's most likely tokens at each position
            (``async score_top_k(token_ids, k=)``); 0 scores the sampled tokens only.
        timeout_s: for all samples together. A sample that is not answered by then gets
            ``NoScores("timeout")``.
        max_concurrent: the maximum number of requests in flight.

    Returns:
        For each sample its scores, or the reason why it has none: ``"refused"`` (the engine raised
        a ``ValueError``), ``"failed"`` (the engine raised another error) or ``"timeout"``.

    Raises:
        ValueError: a number is out of range, or a sample was sampled at another temperature.
    """
    if top_k < 0 or timeout_s <= 0 or max_concurrent < 1:
        raise ValueError(
            f"top_k={top_k}, timeout_s={timeout_s}, max_concurrent={max_concurrent}: expected "
            "top_k of at least 0, timeout_s above 0 and max_concurrent of at least 1"
        )
    for sample in samples:
        if sample.temperature != 1 and sample.loss_mask.any():
            raise ValueError(
                f"a sample has temperature {sample.temperature}, and teachers score at 1; sample "
                "with temperature=1"
            )
    if not samples:
        return []
    loop = BackgroundLoop("primerl-scoring")
    try:
        scored: list[Scores | NoScores] = loop.submit(
            _score_all(engine, samples, top_k, timeout_s, max_concurrent)
        ).result()
        return scored
    finally:
        loop.stop()


async def _score_all(
    engine: Any, samples: Sequence[TrainingSample], top_k: int, timeout_s: float, most: int
) -> list[Scores | NoScores]:
    free = asyncio.Semaphore(most)
    deadline = asyncio.get_running_loop().time() + timeout_s

    async def score(sample: TrainingSample) -> Scores | NoScores:
        token_ids = sample.token_ids.tolist()
        try:
            async with asyncio.timeout_at(deadline), free:
                if not top_k:
                    return {"ref_logprobs": await engine.score(token_ids)}
                logprobs, ids, top_logprobs = await engine.score_top_k(token_ids, k=top_k)
        except TimeoutError:
            return NoScores("timeout", f"no answer within {timeout_s:g} s")
        except ValueError as error:
            return NoScores("refused", summary(error))
        except Exception as error:  # a teacher's client may raise anything; it is counted
            return NoScores("failed", summary(error))
        return {"ref_logprobs": logprobs, "ref_top_ids": ids, "ref_top_logprobs": top_logprobs}

    return list(await asyncio.gather(*map(score, samples)))


def with_scores(
    samples: Sequence[TrainingSample], scores: Sequence[Scores | NoScores], *, top_k: int = 0
) -> tuple[list[TrainingSample], list[NoScores]]:
    """Return the samples with a teacher's scores, in the same order; those without are not trained.

    Args:
        samples: the samples to be trained.
        scores: one entry per sample: what ``score_samples`` returned, or ``packing.unpack`` of the
            scores that a teacher in this process computed.
        top_k: the number of top tokens expected at each position.

    Returns:
        The samples, where those without scores have an empty ``loss_mask``; and the reasons why
        they have none: the given ``NoScores``, ``"incomplete"`` (an array does not fit the sample)
        or ``"not finite"`` (a logprob of a token to be trained).

    Raises:
        ValueError: the number of scores is not the number of samples.
    """
    if len(samples) != len(scores):
        raise ValueError(f"there are {len(scores)} scores; expected {len(samples)}, one per sample")
    result: list[TrainingSample] = []
    missing: list[NoScores] = []
    for sample, one in zip(samples, scores, strict=True):
        length = len(sample.token_ids)
        shapes: dict[str, tuple[int, ...]] = {"ref_logprobs": (length,)}
        if top_k:
            shapes |= {"ref_top_ids": (length, top_k), "ref_top_logprobs": (length, top_k)}
        fault = _fault(one, shapes, sample.loss_mask) if isinstance(one, Mapping) else one
        fields: dict[str, Any]
        if isinstance(one, Mapping) and fault is None:
            fields = {name: one[name] for name in shapes}
        else:
            fields = {name: np.zeros(shape) for name, shape in shapes.items()}
            fields["loss_mask"] = np.zeros(length, np.bool_)
        if fault is not None and sample.loss_mask.any():
            missing.append(fault)
        result.append(attrs.evolve(sample, **fields))
    return result, missing


def _fault(
    scores: Scores, shapes: Mapping[str, tuple[int, ...]], loss_mask: np.ndarray
) -> NoScores | None:
    for name, shape in shapes.items():
        found = np.shape(scores[name]) if name in scores else "none"
        if found != shape:
            return NoScores("incomplete", f"{name} has shape {found}; expected {shape}")
        if not np.isfinite(scores[name][loss_mask]).all():
            return NoScores("not finite", f"{name} of a token to be trained is NaN or infinite")
    return None
