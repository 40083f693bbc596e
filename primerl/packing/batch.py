"""``PackedBatch``: the seam between host and device."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from jaxtyping import Bool, Float32, Int32, Int64
from torch import Tensor

from primerl.packing.binning import bins
from primerl.types import NOT_SAMPLED, TrainingSample


@attrs.frozen(kw_only=True, eq=False)
class PackedBatch:
    """One micro-batch: documents laid end to end, one row per token.

    Row j holds token j and describes the prediction that it makes: ``labels[j]`` is token j+1, and
    the mask, logprob, advantage, version and temperature are those of token j+1. The last row of a
    document predicts nothing and is masked. So nothing downstream shifts, and slicing rows across
    devices is plain indexing.
    """

    token_ids: Int64[Tensor, " t"]
    position_ids: Int64[Tensor, " t"]
    cu_seqlens: Int32[Tensor, " bounds"]
    """Where documents begin, and the end: ``[s+1]``."""
    labels: Int64[Tensor, " t"]
    loss_mask: Bool[Tensor, " t"]
    behavior_logprobs: Float32[Tensor, " t"]
    advantages: Float32[Tensor, " t"]
    versions: Int32[Tensor, " t"]
    temperature: Float32[Tensor, " t"]
    sequence_ids: Int64[Tensor, " t"]
    """The document of each row, 0 to s-1."""
    ref_logprobs: Float32[Tensor, " t"] | None = None
    weights: Float32[Tensor, " t"] | None = None

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The same batch on another device."""
        moved = {
            field.name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for field in attrs.fields(PackedBatch)
            for value in [getattr(self, field.name)]
        }
        return PackedBatch(**moved)


def pack(
    samples: Sequence[TrainingSample],
    *,
    max_tokens: int,
    ranks: int,
    cost: Callable[[int], float] | None = None,
) -> list[list[PackedBatch]]:
    """Pack samples into micro-batches: for each rank, an equally long list.

    Every sample lands in exactly one batch, whole. Where there are fewer samples than ranks, a
    rank gets a batch of one masked token, so that all ranks make the same collective calls.

    Args:
        samples: what ``advantage.assign`` returns.
        max_tokens: the most tokens in a micro-batch.
        ranks: how many data-parallel ranks train.
        cost: of a sample of the given length, for balancing; its length by default.

    Raises:
        ValueError: a sample is longer than ``max_tokens``, or only some samples have
            ``ref_logprobs`` or ``weights``.
    """
    for name in ("ref_logprobs", "weights"):
        if len({getattr(sample, name) is None for sample in samples}) > 1:
            raise ValueError(f"some samples have {name} and some have not; pack them separately")
    lengths = [len(sample.token_ids) for sample in samples]
    plan = bins(lengths, max_tokens=max_tokens, ranks=ranks, cost=cost)
    filler = _masked_token(samples[0]) if samples else None
    return [
        [
            _concatenate([samples[index] for index in members] or [filler])  # type: ignore[list-item]
            for members in micro_steps
        ]
        for micro_steps in plan
    ]


def _masked_token(like: TrainingSample) -> TrainingSample:
    def zero(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else np.zeros(1, np.float32)

    return TrainingSample(
        token_ids=like.token_ids[:1],
        loss_mask=[False],
        behavior_logprobs=[0.0],
        versions=[NOT_SAMPLED],
        advantages=[0.0],
        ref_logprobs=zero(like.ref_logprobs),
        weights=zero(like.weights),
    )


def _concatenate(samples: Sequence[TrainingSample]) -> PackedBatch:
    lengths = np.array([len(sample.token_ids) for sample in samples])
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])

    def tokens(name: str) -> np.ndarray:
        return np.concatenate([getattr(sample, name) for sample in samples])

    def shifted(name: str, last: Any) -> Tensor:
        rows = np.roll(tokens(name), -1)
        rows[cu_seqlens[1:] - 1] = last
        return torch.from_numpy(rows)

    def optional(name: str) -> Tensor | None:
        return None if getattr(samples[0], name) is None else shifted(name, 0.0)

    token_ids = torch.from_numpy(tokens("token_ids").astype(np.int64))
    temperature = np.array([sample.temperature for sample in samples], np.float32)
    return PackedBatch(
        token_ids=token_ids,
        position_ids=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        labels=shifted("token_ids", 0).long(),
        loss_mask=shifted("loss_mask", False),
        behavior_logprobs=shifted("behavior_logprobs", 0.0),
        advantages=shifted("advantages", 0.0),
        versions=shifted("versions", NOT_SAMPLED),
        temperature=torch.from_numpy(np.repeat(temperature, lengths)),
        sequence_ids=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)),
        ref_logprobs=optional("ref_logprobs"),
        weights=optional("weights"),
    )
