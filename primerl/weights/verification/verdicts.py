"""The canary's verdict on each server, from its logprobs and tensor digests."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import attrs
import numpy as np
import torch

from primerl.weights.transports.receipts import a_few
from primerl.weights.verification.comparison import TensorComparison
from primerl.weights.verification.scoring import movement, rms

NOISE_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.3, torch.float16: 0.3}
NOISE_LEAST = {torch.float32: 3e-6, torch.bfloat16: 3e-3, torch.float16: 3e-3}
ABOVE_NOISE = 3.0  # tolerance over noise
# The same for sampled tokens. In 16 bits, near ties of a router are sometimes decided differently,
# which changes whole tokens.
ENDS_ABOVE_NOISE = {torch.float32: 3.0, torch.bfloat16: 6.0, torch.float16: 6.0}
# In 16 bits, if all tensors match bit for bit, the logprobs only need to show gross faults, which
# change most tokens. One in so many tokens may then be off by any amount.
ODD = 8
PEAK = 24.0  # the largest difference of a single token, over noise
SHIFT = 8.0  # the number of standard errors from which a mean change is not noise
CONCLUSIVE = 0.2  # the largest standard error of ``moved`` that allows a conclusion
MOVED = 0.5  # the least share of the predicted change that a server with the new weights shows
ABOVE_ROUNDING = 4.5  # the least predicted change that allows a conclusion, over rounding noise
HISTORY = 16  # the number of passed checks whose median is the noise
BLOCK = 32  # tokens whose noise may be correlated
LEAST_BLOCKS = 16  # fewer means estimate their own spread too badly for 8 standard errors


@attrs.frozen(kw_only=True)
class ServerVerdict:
    """The canary's verdict on one server.

    Differences are logprobs of the engine minus those of the trainer, in nats.
    """

    server: str
    passed: bool
    reason: str
    difference: float
    """The root mean square difference over the tokens of the sequences."""
    largest: float
    """The largest absolute difference of a token, continuations included."""
    continuation: float
    """The root mean square difference over the sampled tokens, each times its temperature."""
    shift: float
    """Mean change of the differences since the last check that passed; 0 at the first check."""
    visible_shift: float
    """The smallest absolute ``shift`` that would have failed."""
    tensors: int
    """The number of tensors that the trainer publishes."""
    compared_tensors: int
    """The number of tensors that were compared bit for bit with those that the engine uses."""
    wrong_tensors: tuple[str, ...]
    """The names of the compared tensors that differ."""
    moved: float | None
    """The share of the predicted change that was seen: 1 for the new weights, 0 for the old ones;
    None if noise allows no conclusion."""
    moved_error: float | None
    """The standard error of ``moved``; None if no change was predicted."""


@attrs.frozen(kw_only=True)
class Observation:
    """One server's logprobs, and the trainer's logprobs of the same tokens."""

    expected: np.ndarray
    """The trainer's logprobs of the sequences' tokens."""
    scores: np.ndarray
    """The server's logprobs of the sequences' tokens."""
    ends: np.ndarray
    """Differences of the sampled tokens' logprobs, each times its temperature."""

    @property
    def differences(self) -> np.ndarray:
        """The server's minus the trainer's logprobs of the sequences' tokens."""
        differences: np.ndarray = self.scores - self.expected
        return differences


def observations(
    rows: Sequence[Mapping[str, Any]], expected: Sequence[np.ndarray], prompts: Sequence[int]
) -> dict[str, Observation]:
    """Combine each server's results for all sequences with the trainer's logprobs.

    Differences of sampled tokens' logprobs are multiplied by the temperature, which makes them
    comparable between temperatures.

    Args:
        rows: the results of ``scoring.probed``.
        expected: the trainer's logprobs of each row's tokens.
        prompts: the length of each row's sequence, without its continuation.

    Returns:
        The observation of each server, by name.
    """
    parts: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for row, own, prompt in zip(rows, expected, prompts, strict=True):
        end = (np.asarray(row["logprobs"]) - own[prompt:]) * row["temperature"]
        one = (own[1:prompt], np.asarray(row["scores"][1:]), end)
        parts.setdefault(row["server"], []).append(one)
    return {
        server: Observation(
            expected=np.concatenate([one[0] for one in found]),
            scores=np.concatenate([one[1] for one in found]),
            ends=np.concatenate([one[2] for one in found]),
        )
        for server, found in parts.items()
    }


class ServerChecks:
    """Checker of servers, which calibrates the noise by the history of passed checks.

    Args:
        dtype: the dtype that the engine computes in.
        tolerance: in nats; None to calibrate the tolerance.
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
        compared: Mapping[str, TensorComparison],
        *,
        rounding: float,
    ) -> list[ServerVerdict]:
        """Return the verdict on each server.

        Raises:
            RuntimeError: at the first check, the difference is too large to be noise.
        """
        noise = max(rms(one.differences) for one in observed.values())
        if not self._given:
            self.tolerance = ABOVE_NOISE * self._noise(noise)
        found = [
            self._server(name, one, compared.get(name), rounding) for name, one in observed.items()
        ]
        if all(one.passed for one in found):
            self._noises = [*self._noises, noise][-HISTORY:]
            self._last = observed
            if self._anchor is None or all(one.moved is not None for one in found):
                self._anchor = observed
        return found

    def _noise(self, now: float) -> float:
        """Return the noise of earlier checks; at the first check, return this check's noise.

        Raises:
            RuntimeError: at the first check, the difference is too large to be noise.
        """
        bound = NOISE_BOUND[self._dtype]
        if not self._noises and not now <= bound:
            raise RuntimeError(
                f"at the canary's first check, engine and trainer differ by {now:.2g} nats (root "
                f"mean square), more than the {bound:g} that {self._dtype} explains: the engine "
                "does not hold the trainer's weights, or computes differently (pass the engine's "
                "dtype=, or tolerance= if the difference is known)"
            )
        usual = median(self._noises) if self._noises else now
        return min(max(usual, NOISE_LEAST[self._dtype]), bound)

    def _server(
        self, name: str, one: Observation, compared: TensorComparison | None, rounding: float
    ) -> ServerVerdict:
        assert self.tolerance is not None
        noise = self.tolerance / ABOVE_NOISE
        largest = float(np.abs(np.concatenate([one.differences, one.ends])).max())
        shift, visible = self._shift(name, one)
        moved, error = self._moved(name, one, rounding)
        tensors = (
            TensorComparison(published=0, compared=0, wrong=()) if compared is None else compared
        )
        relaxed = self._rough and 0 < tensors.published == tensors.compared and not tensors.wrong
        differences, ends = one.differences, one.ends
        if relaxed:
            differences, ends = _without_odd_ones(differences), _without_odd_ones(ends)
        difference = rms(differences)
        reasons = []
        if tensors.wrong:
            reasons.append(f"tensors differ from the trainer's: {a_few(tensors.wrong)}")
        if not difference <= self.tolerance:
            reasons.append(
                f"scores differ by {difference:.2g} nats (tolerance {self.tolerance:.2g})"
            )
        if not len(ends):
            reasons.append("no token was sampled")
        elif not rms(ends) <= ENDS_ABOVE_NOISE.get(self._dtype, 6.0) * noise:
            cause = ": a prefix cache of other weights, or logprobs that are not processed"
            reasons.append(
                f"the continuation differs by {rms(ends):.2g} nats{'' if reasons else cause}"
            )
        is_odd = not math.isfinite(largest) if relaxed else not largest <= PEAK * noise
        if is_odd and not reasons:
            reasons.append(f"the logprob of a token differs by {largest:.2g} nats")
        if not abs(shift) <= visible:
            reasons.append(f"scores shifted by {shift:.2g} nats since the last check")
        if moved is not None and not moved > MOVED and not relaxed:
            reasons.append(
                f"{moved:.0%} of the change since an earlier check was seen: old weights"
            )
        passed = not reasons
        if passed:
            reasons.append(_reach(difference, moved, tensors, self.tolerance, visible))
        return ServerVerdict(
            server=name,
            passed=passed,
            reason=", ".join(reasons),
            difference=rms(one.differences),
            largest=largest,
            continuation=rms(one.ends) if len(one.ends) else math.nan,
            shift=shift,
            visible_shift=visible,
            tensors=tensors.published,
            compared_tensors=tensors.compared,
            wrong_tensors=tensors.wrong,
            moved=moved,
            moved_error=None if math.isinf(error) else error,
        )

    def _shift(self, name: str, one: Observation) -> tuple[float, float]:
        """Return the mean change of the differences since the last check, and the visible change.

        The visible change is the smallest absolute change that would fail.
        """
        before = None if self._last is None else self._last.get(name)
        if before is None or self._given:
            return 0.0, math.inf
        change = one.differences - before.differences
        count = min(max(-(-len(change) // BLOCK), LEAST_BLOCKS), len(change))
        blocks = np.array([part.mean() for part in np.array_split(change, count)])
        error = float(blocks.std(ddof=1)) / math.sqrt(len(blocks)) if len(blocks) > 1 else math.inf
        return float(change.mean()), max(SHIFT * error, NOISE_LEAST[self._dtype])

    def _moved(self, name: str, one: Observation, rounding: float) -> tuple[float | None, float]:
        """Return the share of the predicted change that was seen, and its standard error.

        The change is measured since the last passed check or, if this is not conclusive, since the
        last conclusive check. The share is None if noise allows no conclusion.
        """
        error = math.inf
        for reference in (self._last, self._anchor):
            if reference is None:
                continue
            # A server's own earlier scores cancel systematic rounding errors. A server that joined
            # later has none.
            earlier = next(iter(reference.values()))
            before = reference[name].scores if name in reference else earlier.expected
            predicted = one.expected - earlier.expected
            moved, error = movement(predicted, one.scores - before)
            if error < CONCLUSIVE and rms(predicted) > ABOVE_ROUNDING * rounding:
                return moved, error
        return None, error


def _without_odd_ones(differences: np.ndarray) -> np.ndarray:
    """Drop the largest eighth of the differences."""
    kept = len(differences) - len(differences) // ODD
    return np.sort(np.abs(differences))[:kept]


def _reach(
    difference: float,
    moved: float | None,
    tensors: TensorComparison,
    tolerance: float,
    visible_shift: float,
) -> str:
    """Describe a passed check: what was seen, and the smallest faults that would have failed."""
    change = "too little changed to tell" if moved is None else f"{moved:.0%} of the change seen"
    bytes_of = (
        f"{tensors.compared} of {tensors.published} tensors are the trainer's bit for bit"
        if tensors.compared
        else "no tensor was compared"
    )
    shift = "" if math.isinf(visible_shift) else f" or a shift of {visible_shift:.2g}"
    return (
        f"{bytes_of}; scores differ by {difference:.2g} nats, {change}; by scores alone, a fault "
        f"of {tolerance:.2g} nats{shift} would have been seen"
    )
