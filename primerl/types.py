"""The values that packages exchange: frozen, in numpy, with lengths checked when they are made.

Axes: t tokens, s sequences, g rollouts of a group. On the host, entry i of every per-token array
describes token i; ``packing`` shifts once, and nothing else does. Stages are separate classes
(``Completion -> Sample -> TrainingSample -> PackedBatch``): no field is filled in later.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32

__all__ = [
    "LOGPROB_ROUNDING",
    "NOT_SAMPLED",
    "Completion",
    "Group",
    "Played",
    "PolicyVersion",
    "Rollout",
    "Sample",
    "SamplingParams",
    "TrainingSample",
]

PolicyVersion: TypeAlias = int
"""Number of policy steps taken by the weights that sampled a token."""

NOT_SAMPLED = -1
"""The version of a token that no policy sampled: a prompt, a tool's reply."""


LOGPROB_ROUNDING = 1e-5
"""By how much a logprob may exceed 0.

In float32, ``logit - logsumexp`` is rounded by half a unit in the last place of each, 4e-6 for
values between 64 and 128. A larger excess is no rounding error: the value is no logprob, or was
computed in bfloat16, which is too coarse for training.
"""

_INT32 = np.iinfo(np.int32)


def _read_only(values: Any, dtype: type) -> np.ndarray:
    array: np.ndarray = np.array(values, dtype=dtype)
    array.setflags(write=False)  # attrs.frozen does not protect an array's entries
    return array


def _int32(values: Any) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype != np.int32 and array.size and not _fits_int32(array):
        raise ValueError(f"{values!r:.80}: token ids and versions are whole numbers of 32 bits")
    return _read_only(array, np.int32)


def _fits_int32(array: np.ndarray) -> bool:
    """Whether every entry is an int32 number; numpy's own cast would wrap others."""
    if array.dtype.kind not in "biuf" or array.min() < _INT32.min or array.max() > _INT32.max:
        return False
    return array.dtype.kind != "f" or bool((array == np.floor(array)).all())


def _float32(values: Any) -> np.ndarray:
    return _read_only(values, np.float32)


def _bool(values: Any) -> np.ndarray:
    return _read_only(values, np.bool_)


def _token_ids(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _references(values: "Iterable[str] | str | None") -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else tuple(values or ())


def _samples(values: "Iterable[Sample]") -> "tuple[Sample, ...]":
    return tuple(values)


def _rollouts(values: "Iterable[Rollout]") -> "tuple[Rollout, ...]":
    return tuple(values)


def _metrics(values: "Mapping[str, Any]") -> "Mapping[str, float]":
    plain: dict[str, float] = {}
    for name, value in values.items():
        is_scalar = hasattr(value, "item") and getattr(value, "ndim", 0) == 0
        number = value.item() if is_scalar else value
        if not isinstance(name, str) or not isinstance(number, bool | int | float):
            raise ValueError(f"the metric {name!r} is {value!r:.80}, expected a number with a name")
        if isinstance(number, int) and not -(2**63) <= number < 2**64:
            raise ValueError(f"the metric {name!r} is {number}, which has more than 64 bits")
        plain[name] = number
    return plain


def _require_lengths(value: Any, length: int, **arrays: np.ndarray | None) -> None:
    for name, array in arrays.items():
        if array is not None and array.shape != (length,):
            raise ValueError(
                f"{type(value).__name__}.{name} has shape {array.shape}, expected ({length},): "
                "one entry for each token"
            )


@attrs.frozen(kw_only=True, eq=False)
class SamplingParams:
    """How one completion is sampled. ``temperature=0`` is greedy.

    ``routes_start`` is for engines that record expert routes: those of tokens before it are known,
    from earlier turns.

    Raises:
        ValueError: a value is outside its range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_token_ids)
    seed: int | None = None
    routes_start: int = 0

    def __attrs_post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}, expected at least 1")
        if self.routes_start < 0:
            raise ValueError(f"routes_start is {self.routes_start}, expected at least 0")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}, expected a number >= 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, expected 0 < top_p <= 1")
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k is {self.top_k}, expected a positive number, or -1 for all")


@attrs.frozen(kw_only=True, eq=False)
class Completion:
    """One engine call: the sampled tokens, their logprobs and versions.

    ``logprobs`` are *processed*: of the distribution that was sampled, after temperature.
    ``finish_reason`` is ``"stop"`` or ``"length"``. ``routes`` refer to the expert routes of prompt
    and completion, where the engine records them (``primerl.replay``).
    """

    token_ids: Int32[np.ndarray, " t"] = attrs.field(converter=_int32)
    logprobs: Float32[np.ndarray, " t"] = attrs.field(converter=_float32)
    versions: Int32[np.ndarray, " t"] = attrs.field(converter=_int32)
    finish_reason: str
    routes: tuple[str, ...] = attrs.field(default=(), converter=_references)

    def __attrs_post_init__(self) -> None:
        _require_lengths(self, len(self.token_ids), logprobs=self.logprobs, versions=self.versions)


@attrs.frozen(kw_only=True, eq=False)
class Sample:
    """One flat sequence as it was sampled; prompt and completion differ only in ``loss_mask``.

    ``behavior_logprobs`` and ``versions`` are defined where ``loss_mask`` is set; elsewhere they
    are 0 and ``NOT_SAMPLED``. Token 0 has nothing before it and cannot be trained. ``routes`` refer
    to the expert routes of its tokens, in the order in which they were recorded.
    ``observation_mask`` marks what the environment answered to replies, such as results of tools;
    each such token is marked in one sample of its rollout. None: there is no such token, or it is
    not known.

    Raises:
        ValueError: lengths differ, a token id is negative, token 0 is in the mask, or a token to be
            trained has no version, or a logprob that is not finite or above 0 (by more than
            ``LOGPROB_ROUNDING``).
    """

    token_ids: Int32[np.ndarray, " t"] = attrs.field(converter=_int32)
    loss_mask: Bool[np.ndarray, " t"] = attrs.field(converter=_bool)
    behavior_logprobs: Float32[np.ndarray, " t"] = attrs.field(converter=_float32)
    versions: Int32[np.ndarray, " t"] = attrs.field(converter=_int32)
    temperature: float = 1.0
    routes: tuple[str, ...] = attrs.field(default=(), converter=_references)
    observation_mask: Bool[np.ndarray, " t"] | None = attrs.field(
        default=None, converter=attrs.converters.optional(_bool)
    )

    def __attrs_post_init__(self) -> None:
        name = type(self).__name__
        _require_lengths(
            self,
            len(self.token_ids),
            loss_mask=self.loss_mask,
            behavior_logprobs=self.behavior_logprobs,
            versions=self.versions,
            observation_mask=self.observation_mask,
        )
        if len(self.token_ids) == 0:
            raise ValueError(f"{name} has no tokens")
        if self.loss_mask[0]:
            raise ValueError(f"{name}.loss_mask[0] is set, but nothing precedes token 0")
        if self.token_ids.min() < 0:
            raise ValueError(f"{name}.token_ids holds {self.token_ids.min()}, expected ids >= 0")
        trained = self.behavior_logprobs[self.loss_mask]
        if not np.isfinite(trained).all():
            raise ValueError(f"{name}.behavior_logprobs is not finite at a token to be trained")
        if (trained > LOGPROB_ROUNDING).any():
            raise ValueError(
                f"{name}.behavior_logprobs is {trained.max()} at a token to be trained, expected "
                "logprobs of at most 0"
            )
        if (self.versions[self.loss_mask] < 0).any():
            raise ValueError(f"{name}.versions is negative at a token to be trained")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"{name}.temperature is {self.temperature}, expected a number >= 0")


@attrs.frozen(kw_only=True, eq=False)
class TrainingSample(Sample):
    """A ``Sample`` with its advantages: what ``advantage.assign`` makes and ``packing`` takes.

    ``weights`` are those of tokens in a further loss, sampled or not; 0 or NaN: in none. Of a
    reference, such as a teacher: its logprob of each token, and of the tokens that it finds
    likeliest in that place, in ``ref_top_ids`` and ``ref_top_logprobs``.
    """

    advantages: Float32[np.ndarray, " t"] = attrs.field(converter=_float32)
    ref_logprobs: Float32[np.ndarray, " t"] | None = attrs.field(
        default=None, converter=attrs.converters.optional(_float32)
    )
    weights: Float32[np.ndarray, " t"] | None = attrs.field(
        default=None, converter=attrs.converters.optional(_float32)
    )
    ref_top_ids: Int32[np.ndarray, "t k"] | None = attrs.field(
        default=None, converter=attrs.converters.optional(_int32)
    )
    ref_top_logprobs: Float32[np.ndarray, "t k"] | None = attrs.field(
        default=None, converter=attrs.converters.optional(_float32)
    )

    def __attrs_post_init__(self) -> None:
        Sample.__attrs_post_init__(self)  # super() does not find its class in slotted ones
        _require_lengths(
            self,
            len(self.token_ids),
            advantages=self.advantages,
            ref_logprobs=self.ref_logprobs,
            weights=self.weights,
        )
        ids, logprobs = self.ref_top_ids, self.ref_top_logprobs
        shapes = [None if x is None else x.shape for x in (ids, logprobs)]
        fits = ids is None or (ids.ndim == 2 and len(ids) == len(self.token_ids))
        if shapes[0] != shapes[1] or not fits:
            raise ValueError(
                f"{type(self).__name__}.ref_top_ids and ref_top_logprobs have shapes {shapes}; "
                f"expected ({len(self.token_ids)}, k) of both, or neither"
            )
        if self.temperature == 0 and self.loss_mask.any():
            raise ValueError("a greedy sample (temperature=0) can't be trained: it has no density")
        if not np.isfinite(self.advantages[self.loss_mask]).all():
            raise ValueError("TrainingSample.advantages is not finite at a token to be trained")


@attrs.frozen(kw_only=True, eq=False)
class Rollout:
    """One episode: the sequences that it produced, and its reward.

    ``stop`` says why it ended: ``"stop"``, ``"length"``, ``"context"`` or the environment's reason.
    ``conversation`` is ``{"messages": [...], "tools": [...]}``, as ``primerl.data`` reads it, where
    the environment was asked to keep it.

    Raises:
        ValueError: the reward is not finite, a metric is not a number of at most 64 bits, or
            ``stop``, ``agent`` or ``episode_id`` not a string.
    """

    samples: tuple[Sample, ...] = attrs.field(converter=_samples)
    reward: float = attrs.field(converter=float)
    metrics: Mapping[str, float] = attrs.field(factory=dict, converter=_metrics)
    stop: str = "stop"
    agent: str = "policy"
    episode_id: str = ""
    conversation: Mapping[str, Any] | None = None

    def __attrs_post_init__(self) -> None:
        if not np.isfinite(self.reward):
            raise ValueError(f"the reward is {self.reward}, expected a finite number")
        if not isinstance(self.stop, str):
            raise ValueError(f"stop is {self.stop!r}, expected a string that says how it ended")
        for name in ("agent", "episode_id"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r:.80}, expected a string")


@attrs.frozen(kw_only=True, eq=False)
class Group:
    """Rollouts of one task, compared with each other.

    ``environment`` names where the task came from when several environments are mixed.
    """

    task_id: str
    rollouts: tuple[Rollout, ...] = attrs.field(converter=_rollouts)
    environment: str = ""

    @property
    def rewards(self) -> Float64[np.ndarray, " g"]:
        """The reward of each rollout."""
        return np.array([rollout.reward for rollout in self.rollouts], dtype=np.float64)

    @property
    def samples(self) -> Sequence[Sample]:
        """All sequences of all rollouts, in order."""
        return [sample for rollout in self.rollouts for sample in rollout.samples]

    @property
    def versions(self) -> Int32[np.ndarray, " t"]:
        """The version of each token to be trained, over all sequences."""
        parts = [sample.versions[sample.loss_mask] for sample in self.samples]
        versions: np.ndarray = np.concatenate([np.zeros(0, np.int32), *parts])
        return versions


@attrs.frozen(kw_only=True, eq=False)
class Played:
    """How one play of a task ended: with a rollout, or with an error.

    ``index`` counts the plays of a task from 0, and ``seconds`` is how long this one took, with its
    retries. ``error`` is the name of the error and ``message`` what it says, with the line of the
    environment that raised; both are None where there is a ``rollout``.
    """

    task: Mapping[str, Any]
    index: int
    seconds: float
    rollout: Rollout | None = None
    error: str | None = None
    message: str | None = None
