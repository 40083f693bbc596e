"""Micro-batches of packed documents: ``PackedBatch``, ``pack`` and ``unpack``."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import attrs
import numpy as np
import torch
from jaxtyping import Bool, Float32, Int32, Int64
from torch import Tensor

from primerl._common.host_memory import to_device
from primerl.packing.binning import bins
from primerl.packing.prefixes import family_bins
from primerl.types import NOT_SAMPLED, TrainingSample

OPTIONAL = ("ref_logprobs", "weights", "ref_top_ids", "ref_top_logprobs")
FILLING = -1
"""The ``sample_ids`` entry of padding rows, which belong to no sample."""


@attrs.frozen(kw_only=True, eq=False)
class PackedBatch:
    """One micro-batch of documents laid end to end, with one row per token.

    Row j holds token j and describes its prediction: ``labels[j]`` is token j+1, and the mask,
    logprob, advantage, version and temperature are those of token j+1. The last row of a document
    predicts nothing and is masked. Because of this layout, later code never shifts tensors, and
    splits rows over devices by plain slicing. Logprobs and advantages are 0 in every masked row.
    ``weights`` are the weights of tokens in another loss, whether they were sampled or not.
    """

    token_ids: Int64[Tensor, " t"]
    position_ids: Int64[Tensor, " t"]
    """Each token's position in its document. A document begins wherever a position does not follow
    the position before it. If it begins at n > 0, it shares the first n tokens of the document
    before it."""
    cu_seqlens: Int32[Tensor, " bounds"]
    """Cumulative lengths of the s documents: ``[s+1]``."""
    labels: Int64[Tensor, " t"]
    loss_mask: Bool[Tensor, " t"]
    behavior_logprobs: Float32[Tensor, " t"]
    advantages: Float32[Tensor, " t"]
    versions: Int32[Tensor, " t"]
    temperature: Float32[Tensor, " t"]
    sequence_ids: Int64[Tensor, " t"]
    """The document of each row, 0 to s-1."""
    sample_ids: Int64[Tensor, " t"] | None = None
    """The sample of each row, as its index among the samples given to ``pack``; -1 in padding rows.
    ``sequence_ids`` start at 0 in each batch, ``sample_ids`` are unique over all batches."""
    ref_logprobs: Float32[Tensor, " t"] | None = None
    weights: Float32[Tensor, " t"] | None = None
    ref_top_ids: Int64[Tensor, "t k"] | None = None
    """The k most likely tokens in place of the label, according to the reference model."""
    ref_top_logprobs: Float32[Tensor, "t k"] | None = None
    routes: str | None = None
    """References to the recorded expert routes, if any, as JSON ``{"n": [references]}`` for sample
    n of ``sample_ids``. ``replay.fetch`` reads the routes of this batch's rows."""

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Copy the batch to another device; the host does not wait for a GPU."""
        moved: dict[str, Any] = {name: to_device(x, device) for name, x in self._tensors().items()}
        return attrs.evolve(self, **moved)

    def split(self, parts: int) -> list["PackedBatch"]:
        """Split the rows into equal, contiguous parts, for ranks that share documents.

        If the number of rows is not a multiple of ``parts``, a document of masked rows is added at
        the end. A document may begin in one part and end in another, so every part has the
        ``cu_seqlens`` of the whole pack and keeps the ``sequence_ids`` of its rows.

        Raises:
            ValueError: ``parts`` is below 1.
        """
        if parts < 1:
            raise ValueError(f"parts is {parts}; expected at least 1")
        padded = self._padded(-len(self.token_ids) % parts)
        rows = len(padded.token_ids) // parts
        by_part: list[dict[str, Any]] = [
            {name: x[part * rows : (part + 1) * rows] for name, x in padded._rows().items()}
            for part in range(parts)
        ]
        return [attrs.evolve(padded, **own) for own in by_part]

    def _padded(self, rows: int) -> "PackedBatch":
        if rows == 0:
            return self
        values: dict[str, Any] = {
            "token_ids": int(self.token_ids[0]),  # any valid token
            "versions": NOT_SAMPLED,
            "temperature": 1.0,
            "sequence_ids": len(self.cu_seqlens) - 1,
            "sample_ids": FILLING,
        }
        joined: dict[str, Any] = {
            name: torch.cat([x, x.new_full((rows, *x.shape[1:]), values.get(name, 0))])
            for name, x in self._rows().items()
        }
        joined["position_ids"][-rows:] = torch.arange(rows)
        end = self.cu_seqlens[-1:] + rows
        return attrs.evolve(self, **joined, cu_seqlens=torch.cat([self.cu_seqlens, end]))

    def _tensors(self) -> dict[str, Tensor]:
        fields = attrs.asdict(self, recurse=False)
        return {name: value for name, value in fields.items() if isinstance(value, Tensor)}

    def _rows(self) -> dict[str, Tensor]:
        """Return the tensors that have one entry per row."""
        return {name: x for name, x in self._tensors().items() if name != "cu_seqlens"}


def minibatches(samples: Sequence[TrainingSample], count: int) -> list[list[TrainingSample]]:
    """Split the samples of a step, in order, into ``count`` minibatches of one optimizer step each.

    Their numbers of samples differ by at most one. If there are fewer samples than ``count``, some
    minibatches are empty. On ranks other than 0, which have no samples, all are empty.

    Raises:
        ValueError: ``count`` is below 1.
    """
    if count < 1:
        raise ValueError(f"count is {count}; expected at least 1 minibatch")
    bounds = [len(samples) * part // count for part in range(count + 1)]
    return [list(samples[start:end]) for start, end in pairwise(bounds)]


def pack(
    samples: Sequence[TrainingSample],
    *,
    max_tokens: int,
    ranks: int,
    cost: Callable[..., Any] | None = None,
    too_long: Literal["raise", "alone"] = "raise",
    share_prefixes: bool = False,
) -> list[list[PackedBatch]]:
    """Pack samples into micro-batches: one list per rank, all of the same length.

    ``bins`` assigns each sample, undivided, to exactly one micro-batch. If there are too few
    samples, a rank gets a micro-batch of one masked token, so that all ranks make the same
    collective calls.

    Args:
        samples: the samples that ``advantage.assign`` returns.
        max_tokens: the maximum number of tokens in a micro-batch.
        ranks: number of data-parallel ranks.
        cost: maps an array of sample lengths to their costs, such as
            ``packing.document_cost(model.config)``. By default the cost is the length.
        too_long: what to do with a sample longer than ``max_tokens``: ``"raise"`` an error, or pack
            it ``"alone"`` in a micro-batch. To skip such samples, leave them out of ``samples``.
        share_prefixes: if samples of a micro-batch begin with the same untrained tokens, such as a
            group's prompt, pack these only once. This saves computation and does not change
            logprobs and gradients. ``loss.model_logprobs`` supports it; flash attention does not.

    Raises:
        ValueError: a sample is longer than ``max_tokens`` (unless ``too_long="alone"``), only some
            samples have ``ref_logprobs`` or another optional field, samples have different numbers
            of top tokens, or ``bins`` refuses an argument.
    """
    for name in OPTIONAL:
        if len({getattr(sample, name) is None for sample in samples}) > 1:
            raise ValueError(f"some samples have {name} and others do not; pack them separately")
        if len({np.shape(getattr(sample, name))[1:] for sample in samples}) > 1:
            raise ValueError(f"samples have {name} of different widths; pack each width separately")
    how: dict[str, Any] = {
        "max_tokens": max_tokens,
        "ranks": ranks,
        "cost": cost,
        "too_long": too_long,
    }
    if share_prefixes:
        plan = family_bins(samples, **how)
    else:
        whole = bins([len(sample.token_ids) for sample in samples], **how)
        plan = [[[(index, 0) for index in members] for members in steps] for steps in whole]
    filler = _masked_token(samples[0]) if samples else None
    return [
        [
            _concatenate(
                [(samples[index], shared) for index, shared in members] or [(filler, 0)],  # type: ignore[list-item]
                [index for index, _ in members] or [FILLING],
            )
            for members in micro_steps
        ]
        for micro_steps in plan
    ]


def unpack(
    packed: Sequence[Sequence[PackedBatch]],
    rows: Sequence[Sequence[Mapping[str, Tensor]]],
    samples: Sequence[TrainingSample],
) -> list[dict[str, np.ndarray]]:
    """Convert values per row back to arrays per sample, the inverse of ``pack``.

        packed = packing.pack(samples, ...)
        ...
        rows = parallel.gather(statistics.end_minibatch(), mesh)
        per_token = packing.unpack(packed, rows, samples)  # [{"logprobs": [t], ...}, ...]

    Args:
        packed: the result of ``pack``.
        rows: for each batch of ``packed``, tensors ``[t]`` by name. Padding rows at the end, which
            ``split`` adds, are ignored. Empty on ranks other than 0.
        samples: the samples that were packed, in the same order.

    Returns:
        For each sample, float32 arrays ``[t]`` by name. Entry i belongs to token i, which row i-1
        predicts. It is 0 where token i is not trained. Tensors ``[t, k]`` become arrays ``[t, k]``.

    Raises:
        ValueError: ``rows`` does not fit ``packed``, or ``packed`` does not fit ``samples``.
    """
    batches = [batch for mine in packed for batch in mine]
    found = [values for mine in rows for values in mine]
    if len(batches) != len(found):
        raise ValueError(f"rows has values for {len(found)} batches; expected {len(batches)}")
    result: list[dict[str, np.ndarray]] = [{} for _ in samples]
    for batch, values in zip(batches, found, strict=True):
        if batch.sample_ids is None:
            raise ValueError("a batch has no sample_ids; expected a batch that pack returned")
        sample_ids = batch.sample_ids.numpy(force=True)
        if sample_ids.max() >= len(samples):
            raise ValueError(
                f"packed has sample index {sample_ids.max()}, but samples has {len(samples)} items"
            )
        trained = batch.loss_mask.numpy(force=True)
        tokens = batch.position_ids.numpy(force=True) + 1
        bounds = np.flatnonzero(np.diff(sample_ids)) + 1  # the rows of a sample are adjacent
        rows_of = [
            (int(sample_ids[start]), slice(start, end))
            for start, end in pairwise([0, *bounds.tolist(), len(sample_ids)])
            if sample_ids[start] != FILLING
        ]
        for name, value in values.items():
            if len(value) < len(trained):
                raise ValueError(f"{name} has {len(value)} rows; expected {len(trained)}")
            of_rows = value.float().numpy(force=True)
            for index, own in rows_of:
                shape = len(samples[index].token_ids), *of_rows.shape[1:]
                array = np.zeros(shape, np.float32)
                array[tokens[own][trained[own]]] = of_rows[own][trained[own]]
                result[index][name] = array
    return result


def _masked_token(like: TrainingSample) -> TrainingSample:
    def zero(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else np.zeros_like(values[:1])

    return TrainingSample(
        token_ids=like.token_ids[:1],
        loss_mask=[False],
        behavior_logprobs=[0.0],
        versions=[NOT_SAMPLED],
        advantages=[0.0],
        ref_logprobs=zero(like.ref_logprobs),
        weights=zero(like.weights),
        ref_top_ids=zero(like.ref_top_ids),
        ref_top_logprobs=zero(like.ref_top_logprobs),
    )


def _concatenate(
    members: Sequence[tuple[TrainingSample, int]], numbers: Sequence[int]
) -> PackedBatch:
    """Lay samples end to end, each without the tokens that it shares with the sample before it.

    ``members`` are samples with their number of shared tokens, ``numbers`` their ``sample_ids``.
    """
    samples = [sample for sample, _ in members]
    starts = np.array([shared for _, shared in members])
    lengths = np.array([len(sample.token_ids) for sample in samples]) - starts
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    temperature = np.array([sample.temperature for sample in samples], np.float32)

    def tokens(name: str) -> np.ndarray:
        return np.concatenate([getattr(sample, name)[shared:] for sample, shared in members])

    def shifted(name: str, last: Any) -> np.ndarray:
        rows = np.roll(tokens(name), -1, axis=0)
        rows[cu_seqlens[1:] - 1] = last
        return rows

    loss_mask = shifted("loss_mask", False)

    def masked(name: str) -> Tensor:
        # A prompt's logprobs may be NaN, which must not leave the host.
        rows = shifted(name, 0)
        rows[~loss_mask] = 0
        return torch.from_numpy(rows)

    def optional(name: str) -> Tensor | None:
        return None if getattr(samples[0], name) is None else masked(name)

    weights = None
    if samples[0].weights is not None:
        weights = torch.from_numpy(np.nan_to_num(shifted("weights", 0), nan=0.0))
    top_ids = optional("ref_top_ids")
    routes = {
        str(number): sample.routes
        for number, sample in zip(numbers, samples, strict=True)
        if sample.routes
    }
    return PackedBatch(
        token_ids=torch.from_numpy(tokens("token_ids").astype(np.int64)),
        position_ids=torch.from_numpy(
            np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1] - starts, lengths)
        ),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        labels=torch.from_numpy(shifted("token_ids", 0).astype(np.int64)),
        loss_mask=torch.from_numpy(loss_mask),
        behavior_logprobs=masked("behavior_logprobs"),
        advantages=masked("advantages"),
        versions=torch.from_numpy(shifted("versions", NOT_SAMPLED)),
        temperature=torch.from_numpy(np.repeat(temperature, lengths)),
        sequence_ids=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)),
        sample_ids=torch.from_numpy(np.repeat(np.array(numbers, np.int64), lengths)),
        ref_logprobs=optional("ref_logprobs"),
        weights=weights,
        ref_top_ids=None if top_ids is None else top_ids.long(),
        ref_top_logprobs=optional("ref_top_logprobs"),
        routes=json.dumps(routes) if routes else None,
    )
