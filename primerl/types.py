"""Data types that packages exchange: frozen classes of numpy arrays, validated on construction.

Axes: t tokens, s sequences, g rollouts of a group. On the host, entry i of every per-token array
describes token i. Only ``packing`` shifts labels against tokens, and it does so once. Each stage
has its own class (``Completion -> Sample -> TrainingSample -> PackedBatch``), so no field is
filled in later.
"""

import numbers
import operator
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
    "Outcome",
    "PolicyVersion",
    "Rollout",
    "Sample",
    "SamplingParams",
    "TrainingSample",
]

PolicyVersion: TypeAlias = int
"""A policy version: the number of optimizer steps behind the weights that sampled a token."""

NOT_SAMPLED = -1
"""The version of a token that no policy sampled, such as one of a prompt or a tool's result."""


LOGPROB_ROUNDING = 1e-5
"""The largest positive value that is still accepted as a logprob, because of rounding.

In float32, ``logit - logsumexp`` is rounded by half a unit in the last place of each term, 4e-6 for
values between 64 and 128. A larger value is not a rounding error: either it is not a logprob, or it
was computed in bfloat16, which is too coarse for training.
"""

MAX_REWARD = 1e38
"""The largest absolute value of a reward: the difference of two is an advantage, a float32."""

_INT32 = np.iinfo(np.int32)


def _read_only(values: Any, dtype: type) -> np.ndarray:
    array: np.ndarray = np.array(values, dtype=dtype)
    array.setflags(write=False)  # attrs.frozen does not protect an array's entries
    return array


def _int32(values: Any) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype != np.int32 and array.size and not _fits_int32(array):
        raise ValueError(f"{values!r:.80}: expected token ids or versions, 32-bit integers")
    return _read_only(array, np.int32)


def _fits_int32(array: np.ndarray) -> bool:
    """Check that every entry is an int32 number. (numpy's cast would wrap larger numbers.)"""
    if array.dtype.kind not in "biuf" or array.min() < _INT32.min or array.max() > _INT32.max:
        return False
    return array.dtype.kind != "f" or bool((array == np.floor(array)).all())


def _float32(values: Any) -> np.ndarray:
    return _read_only(values, np.float32)


def _bool(values: Any) -> np.ndarray:
    return _read_only(values, np.bool_)


def _whole_number(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r:.80}, expected a whole number") from None


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} is {value!r:.80}, expected a number")
    return float(value)


def _token_ids(values: Any) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"stop_token_ids is {values!r:.80}, expected a sequence of token ids")
    return tuple(_whole_number("stop_token_ids", value) for value in values)


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
            raise ValueError(f"metric {name!r} is {value!r:.80}; expected a string and a number")
        if isinstance(number, int) and not -(2**63) <= number < 2**64:
            raise ValueError(f"metric {name!r} is {number}; expected at most 64 bits")
        plain[name] = number
    return plain


def _require_lengths(value: Any, length: int, **arrays: np.ndarray | None) -> None:
    for name, array in arrays.items():
        if array is not None and array.shape != (length,):
            raise ValueError(
                f"{type(value).__name__}.{name} has shape {array.shape}, expected ({length},): "
                "one entry per token"
            )


@attrs.frozen(kw_only=True, eq=False)
class SamplingParams:
    """Parameters for sampling one completion. ``temperature=0`` is greedy.

    ``routes_start`` is for engines that record expert routes: the first token whose routes are
    requested. The routes of the tokens before it are known from earlier turns.

    Raises:
        ValueError: a value is outside its range, or not a number of its kind. Numbers of numpy are
            accepted, and become Python's; a bool is not a number.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_token_ids)
    seed: int | None = None
    routes_start: int = 0

    def __attrs_post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "routes_start"):
            object.__setattr__(self, name, _whole_number(name, getattr(self, name)))
        if self.seed is not None:
            object.__setattr__(self, "seed", _whole_number("seed", self.seed))
        for name in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
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
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}, expected 0 <= min_p <= 1")


@attrs.frozen(kw_only=True, eq=False)
class Completion:
    """The result of one engine call: sampled tokens, their logprobs and their policy versions.

    ``logprobs`` are *processed*: they are of the distribution that was sampled from, after
    temperature. ``finish_reason`` is ``"stop"`` or ``"length"``. ``routes`` are references to the
    expert routes of prompt and completion, if the engine records routes (``primerl.replay``).
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
    """One flat token sequence as it was sampled, with prompt tokens outside ``loss_mask``.

    ``behavior_logprobs`` and ``versions`` are defined where ``loss_mask`` is set; elsewhere they
    are 0 and ``NOT_SAMPLED``. Token 0 has no context and cannot be trained. ``routes`` are
    references to the expert routes of its tokens, in the order in which they were recorded.
    ``observation_mask`` marks the tokens with which the environment answered the policy, such as
    tool results. Each such token is marked in only one sample of its rollout. The mask is None if
    there are no such tokens, or if they are unknown.

    Raises:
        ValueError: lengths differ, a token id is negative, token 0 is in the mask, or a token to be
            trained has no version, or its logprob is not finite or exceeds 0 by more than
            ``LOGPROB_ROUNDING``.
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
            raise ValueError(
                f"{name}.loss_mask[0] is set, but token 0 has no context: expected False"
            )
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
            raise ValueError(f"{name}.versions is negative at a token to be trained, expected >= 0")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"{name}.temperature is {self.temperature}, expected a number >= 0")


@attrs.frozen(kw_only=True, eq=False)
class TrainingSample(Sample):
    """A ``Sample`` with advantages: returned by ``advantage.assign``, packed by ``packing``.

    ``weights`` are per-token weights of an additional loss, which may include tokens that were not
    sampled; a token with weight 0 or NaN is not in that loss. ``ref_logprobs`` are the logprobs of
    the tokens under a reference model, such as a teacher. ``ref_top_ids`` and ``ref_top_logprobs``
    are the k most likely tokens under the reference model in each place, and their logprobs.
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
        Sample.__attrs_post_init__(self)  # super() does not work in slotted attrs classes
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
                f"expected ({len(self.token_ids)}, k) for both, or None for both"
            )
        if self.temperature == 0 and self.loss_mask.any():
            raise ValueError(
                "a greedy sample (temperature=0) can't be trained: greedy decoding has no "
                "probability density; sample with temperature > 0"
            )
        if not np.isfinite(self.advantages[self.loss_mask]).all():
            raise ValueError("TrainingSample.advantages is not finite at a token to be trained")


@attrs.frozen(kw_only=True, eq=False)
class Rollout:
    """One episode: its token sequences and its reward.

    ``stop`` is the reason why it ended: ``"stop"``, ``"length"``, ``"context"`` or a reason of the
    environment. ``conversation`` is ``{"messages": [...], "tools": [...]}``, as ``primerl.data``
    reads it, if the environment was asked to keep it.

    Raises:
        ValueError: the reward is not finite or exceeds ``MAX_REWARD``, a metric is not a number of
            at most 64 bits, or ``stop``, ``agent`` or ``episode_id`` is not a string.
    """

    samples: tuple[Sample, ...] = attrs.field(converter=_samples)
    reward: float = attrs.field(converter=float)
    metrics: Mapping[str, float] = attrs.field(factory=dict, converter=_metrics)
    stop: str = "stop"
    agent: str = "policy"
    episode_id: str = ""
    conversation: Mapping[str, Any] | None = None

    def __attrs_post_init__(self) -> None:
        if not abs(self.reward) <= MAX_REWARD:
            raise ValueError(
                f"the reward is {self.reward}, expected a finite number of at most {MAX_REWARD:g}"
            )
        if not isinstance(self.stop, str):
            raise ValueError(f"stop is {self.stop!r}, expected a string: why the rollout ended")
        for name in ("agent", "episode_id"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r:.80}, expected a string")


@attrs.frozen(kw_only=True, eq=False)
class Group:
    """Rollouts of one task, whose rewards are compared with each other.

    ``environment`` is the name of the task's environment, if several environments are mixed.
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
class Outcome:
    """The outcome of playing a task once: a rollout, or an error.

    ``index`` numbers the rollouts of a task from 0. ``seconds`` is the duration, retries included.
    ``error`` is the name of the error, and ``message`` its text with the line of the environment
    that raised it; both are None if there is a ``rollout``.
    """

    task: Mapping[str, Any]
    index: int
    seconds: float
    rollout: Rollout | None = None
    error: str | None = None
    message: str | None = None
