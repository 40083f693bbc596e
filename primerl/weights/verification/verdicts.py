"""What the canary concludes from the answers of a replica."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import attrs
import numpy as np
import torch

from primerl.weights.transports.receipts import a_few
from primerl.weights.verification.scoring import movement, rms
from primerl.weights.verification.served_tensors import Comparison

NOISE_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.3, torch.float16: 0.3}
NOISE_LEAST = {torch.float32: 3e-6, torch.bfloat16: 3e-3, torch.float16: 3e-3}
ABOVE_NOISE = 3.0  # times the noise: the tolerance
# In 16 bits, near ties of a router are sometimes decided differently, which changes whole tokens.
ENDS_ABOVE_NOISE = {torch.float32: 3.0, torch.bfloat16: 6.0, torch.float16: 6.0}
RELAXED = 2.0  # of the tolerance in 16 bits where all bytes match: for gross faults alone
PEAK = 24.0  # times the noise: the most that a single token may differ
SHIFT = 8.0  # standard errors of a mean that is not noise
CONCLUSIVE = 0.2  # the largest standard error of ``moved`` that allows a conclusion
MOVED = 0.5
ABOVE_ROUNDING = 4.5  # times the rounding: a predicted change that allows a conclusion
HISTORY = 16  # checks that passed, whose median is the noise
BLOCK = 32  # tokens whose noise may be correlated


@attrs.frozen(kw_only=True)
class ReplicaVerdict:
    """What the canary found on one replica; differences of logprobs in nats, engine - trainer."""

    replica: str
    passed: bool
    reason: str
    difference: float
    """Root mean square over the tokens of the sequences."""
    largest: float
    """Of all tokens, those of the continuation included."""
    continuation: float
    """Root mean square over the sampled tokens, each times its temperature."""
    shift: float
    """Mean change of the differences since the last check that passed; 0 at the first."""
    visible_shift: float
    """The smallest ``shift`` that would have failed."""
    tensors: int
    """That the trainer publishes."""
    compared_tensors: int
    """Of these, those whose bytes were compared with what the engine computes with."""
    wrong_tensors: tuple[str, ...]
    """Of these, those that differ."""
    moved: float | None
    """The share of the predicted change that was seen: 1 for the new weights, 0 for the old ones;
    None where noise allows no conclusion."""
    moved_error: float | None
    """Its standard error; None where no change was predicted."""


@attrs.frozen(kw_only=True)
class Observation:
    """One replica's logprobs, and those that the trainer expected."""

    expected: np.ndarray
    """The trainer's logprobs of the sequences' tokens."""
    scores: np.ndarray
    """The engine's."""
    ends: np.ndarray
    """Differences of the sampled tokens' logprobs, each times its temperature."""

    @property
    def differences(self) -> np.ndarray:
        """Engine - trainer, of the sequences' tokens."""
        differences: np.ndarray = self.scores - self.expected
        return differences


def observations(
    rows: Sequence[Mapping[str, Any]], expected: Sequence[np.ndarray], prompts: Sequence[int]
) -> dict[str, Observation]:
    """By replica, its answers to all sequences (``probing.probed``), and what was expected.

    ``prompts`` are the lengths of the sequences. Differences of logprobs are multiplied by the
    temperature, which makes them comparable at all temperatures.
    """
    parts: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for row, own, prompt in zip(rows, expected, prompts, strict=True):
        end = (np.asarray(row["logprobs"]) - own[prompt:]) * row["temperature"]
        one = (own[1:prompt], np.asarray(row["scores"][1:]), end)
        parts.setdefault(row["replica"], []).append(one)
    return {
        replica: Observation(
            expected=np.concatenate([one[0] for one in found]),
            scores=np.concatenate([one[1] for one in found]),
            ends=np.concatenate([one[2] for one in found]),
        )
        for replica, found in parts.items()
    }


class ReplicaChecks:
    """Verdicts on replicas, check by check, with the history of those that passed.

    Args:
        dtype: that the engine computes in.
        tolerance: in nats; None to calibrate it.
    """

    def __init__(self, *, dtype: torch.dtype, tolerance: float | None) -> None:
        self.tolerance = tolerance
        """The largest root mean square difference that passes; None before the first check."""
        self._given = tolerance is not None
        self._dtype = dtype
        self._rough = dtype.itemsize < 4
        self._noises: list[float] = []
        self._last: Mapping[str, Observation] | None = None
        self._anchor: Mapping[str, Observation] | None = None

    def verdicts(
        self,
        observed: Mapping[str, Observation],
        compared: Mapping[str, Comparison],
        *,
        rounding: float,
    ) -> list[ReplicaVerdict]:
        """The verdict on each replica.

        Raises:
            RuntimeError: at the first check, the difference is too large to be noise.
        """
        noise = max(rms(one.differences) for one in observed.values())
        if not self._given:
            self.tolerance = ABOVE_NOISE * self._noise(noise)
        found = [
            self._replica(name, one, compared.get(name), rounding) for name, one in observed.items()
        ]
        if all(one.passed for one in found):
            self._noises = [*self._noises, noise][-HISTORY:]
            self._last = observed
            if self._anchor is None or all(one.moved is not None for one in found):
                self._anchor = observed
        return found

    def _noise(self, now: float) -> float:
        """From the checks before; at the first check from this one, if it can be noise."""
        bound = NOISE_BOUND[self._dtype]
        if not self._noises and not now <= bound:
            raise RuntimeError(
                f"at the first check, engine and trainer differ by {now:.2g} nats (root mean "
                f"square), more than {bound:g}, the most that {self._dtype} explains: the engine "
                "does not hold the trainer's weights, or computes differently (pass dtype= of the "
                "engine, or tolerance= if the difference is known)"
            )
        usual = median(self._noises) if self._noises else now
        return min(max(usual, NOISE_LEAST[self._dtype]), bound)

    def _replica(
        self, name: str, one: Observation, compared: Comparison | None, rounding: float
    ) -> ReplicaVerdict:
        assert self.tolerance is not None
        noise = self.tolerance / ABOVE_NOISE
        difference = rms(one.differences)
        continuation = rms(one.ends) if len(one.ends) else math.nan
        largest = float(np.abs(np.concatenate([one.differences, one.ends])).max())
        shift, visible = self._shift(name, one)
        moved, error = self._moved(name, one, rounding)
        tensors = Comparison(published=0, compared=0, wrong=()) if compared is None else compared
        relaxed = self._rough and 0 < tensors.published == tensors.compared and not tensors.wrong
        factor = RELAXED if relaxed else 1.0
        tolerance = self.tolerance * factor
        reasons = []
        if tensors.wrong:
            reasons.append(f"tensors differ from the trainer's: {a_few(tensors.wrong)}")
        if not difference <= tolerance:
            reasons.append(f"scores differ by {difference:.2g} nats (tolerance {tolerance:.2g})")
        if not len(one.ends):
            reasons.append("no token was sampled")
        elif not continuation <= ENDS_ABOVE_NOISE.get(self._dtype, 6.0) * noise:
            cause = ": a prefix cache of other weights, or logprobs that are not processed"
            reasons.append(
                f"the continuation differs by {continuation:.2g} nats{'' if reasons else cause}"
            )
        if not largest <= PEAK * noise * factor and not reasons:
            reasons.append(f"a token differs by {largest:.2g} nats")
        if not abs(shift) <= visible:
            reasons.append(f"scores shifted by {shift:.2g} nats since the last check")
        if moved is not None and not moved > MOVED and not relaxed:
            reasons.append(f"{moved:.0%} of the change since an earlier check arrived: old weights")
        passed = not reasons
        if passed:
            reasons.append(_reach(difference, moved, tensors, tolerance, visible))
        return ReplicaVerdict(
            replica=name,
            passed=passed,
            reason=", ".join(reasons),
            difference=difference,
            largest=largest,
            continuation=continuation,
            shift=shift,
            visible_shift=visible,
            tensors=tensors.published,
            compared_tensors=tensors.compared,
            wrong_tensors=tensors.wrong,
            moved=moved,
            moved_error=None if math.isinf(error) else error,
        )

    def _shift(self, name: str, one: Observation) -> tuple[float, float]:
        """The mean change of the differences since the last check, and the least visible one."""
        before = None if self._last is None else self._last.get(name)
        if before is None or self._given:
            return 0.0, math.inf
        change = one.differences - before.differences
        blocks = np.array(
            [part.mean() for part in np.array_split(change, -(-len(change) // BLOCK))]
        )
        error = float(blocks.std(ddof=1)) / math.sqrt(len(blocks)) if len(blocks) > 1 else math.inf
        return float(change.mean()), max(SHIFT * error, NOISE_LEAST[self._dtype])

    def _moved(self, name: str, one: Observation, rounding: float) -> tuple[float | None, float]:
        """The share of the change seen since the last check, or since the last conclusive one."""
        error = math.inf
        for reference in (self._last, self._anchor):
            if reference is None:
                continue
            # Its own scores cancel what rounding adds to both; a replica that joined has none.
            earlier = next(iter(reference.values()))
            before = reference[name].scores if name in reference else earlier.expected
            predicted = one.expected - earlier.expected
            moved, error = movement(predicted, one.scores - before)
            if error < CONCLUSIVE and rms(predicted) > ABOVE_ROUNDING * rounding:
                return moved, error
        return None, error


def _reach(
    difference: float,
    moved: float | None,
    tensors: Comparison,
    tolerance: float,
    visible_shift: float,
) -> str:
    """What was seen, and which faults would have been."""
    change = "too little changed to tell" if moved is None else f"{moved:.0%} of the change seen"
    bytes_of = (
        f"{tensors.compared} of {tensors.published} tensors are the trainer's bit for bit"
        if tensors.compared
        else "no tensor was compared"
    )
    shift = "" if math.isinf(visible_shift) else f" or a shift of {visible_shift:.2g}"
    return (
        f"{bytes_of}; differs by {difference:.2g} nats, {change}; by scores alone, a fault of "
        f"{tolerance:.2g} nats{shift} would have been seen"
    )
