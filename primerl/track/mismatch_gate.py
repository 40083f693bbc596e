"""The mismatch gate, which distinguishes lasting trainer-sampler mismatch from noise."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import attrs

RECENT = 3  # number of last steps whose median is judged
MAD_TO_SD = 1.4826  # ratio of standard deviation to MAD for a normal distribution
RISE = 1.25  # nearly halfway to 1.5 on a logarithmic scale
SPREADS = 2.7
CEILING = 1e6  # nats
BOUND = 0.1  # nats: a log-ratio of 0.45 at each token; bfloat16 causes about 0.005 nats


def _floats(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


@attrs.frozen(kw_only=True)
class MismatchGate:
    """An immutable detector of rises in ``mismatch_kl``; ``after`` returns its successor.

        gate = track.MismatchGate()
        ...
        gate = gate.after(metrics.get("mismatch_kl"))
        if gate.alarm:
            raise RuntimeError(gate.alarm)

    ``Run`` has a gate, logs its alarm with the step's metrics, and saves it with the run.

    The median of the last 3 steps is compared with the median of the ``window`` steps before them,
    on a logarithmic scale. So one outlier in three steps can neither raise nor hide an alarm. The
    alarm is on while the ratio of the medians exceeds ``max(1.25, exp(2.7 s))``, where s is the
    spread of the baseline, ``1.4826 MAD`` of its logarithms. The baseline does not change while the
    alarm is on.

    The guarantees depend on s (docs/verification.md has the table). Up to s = 0.08, a sustained
    rise by a factor of 1.5 is flagged within 3 steps, and at most 1 of 1,000 clean steps begins an
    alarm. For larger s, only a larger rise is flagged, and up to 3 of 1,000 clean steps begin an
    alarm if tails are heavy; more tokens per step help. A rise slower than a factor of 1.5 in 200
    steps is the drift that training causes, and the baseline follows it.

    A mismatch that exists from the start is part of the baseline and so is not a rise. Therefore
    the alarm is also on while the median exceeds ``bound``, whatever the baseline, from the first 3
    steps on.

    Raises:
        ValueError: a number is out of range.
    """

    window: int = 32
    """Maximum number of steps in the baseline."""
    warm_up: int = 16
    """Number of baseline steps before a rise can be flagged."""
    floor: float = 1e-10
    """Smaller values count as this, in nats. Rounding of float32 logprobs, about 1e-5, causes a
    mismatch of half its square, and ratios of rounding errors mean nothing."""
    bound: float = BOUND
    """The largest normal value for any trainer and engine, in nats; above it, the alarm is on."""
    baseline: tuple[float, ...] = attrs.field(default=(), converter=_floats)
    """Values of earlier steps, oldest first; ``recent`` and ``alarming`` complete the state."""
    recent: tuple[float, ...] = attrs.field(default=(), converter=_floats)
    """Values of the last steps, not yet part of the baseline."""
    alarming: bool = False
    """Whether the alarm is on."""

    def __attrs_post_init__(self) -> None:
        if not 3 <= self.warm_up <= self.window:
            raise ValueError(
                f"warm_up={self.warm_up} with window={self.window}: expected 3 <= warm_up <= window"
            )
        if not 0 < self.floor < math.inf:
            raise ValueError(f"floor is {self.floor}, expected a positive number of nats")
        if not self.floor < self.bound:
            raise ValueError(f"bound is {self.bound}, expected more than the floor, {self.floor}")

    def after(self, value: float | None) -> "MismatchGate":
        """Return the gate after one more step with this ``mismatch_kl``.

        None, for a step without a token of the trainer's own version, changes nothing. NaN and
        infinity count as 1e6 nats: logprobs that are not numbers are a mismatch, too.
        """
        if value is None:
            return self
        number = min(max(float(value), self.floor), CEILING) if value == value else CEILING
        recent, baseline = (*self.recent, number), self.baseline
        if len(recent) > RECENT:
            if not self.alarming:
                baseline = (*baseline, recent[0])[-self.window :]
            recent = recent[-RECENT:]
        after = attrs.evolve(self, baseline=baseline, recent=recent)
        return attrs.evolve(after, alarming=after._exceeds())

    @property
    def ratio(self) -> float | None:
        """The median of the last steps over that of the baseline; None while there are too few."""
        if len(self.baseline) < self.warm_up or len(self.recent) < RECENT:
            return None
        return median(self.recent) / median(self.baseline)

    @property
    def spread(self) -> float | None:
        """s, the spread of the baseline's logarithms; None while there are too few steps.

        For small s, it is about the coefficient of variation of ``mismatch_kl``.
        """
        if len(self.baseline) < self.warm_up:
            return None
        logs = [math.log(value) for value in self.baseline]
        middle = median(logs)
        return MAD_TO_SD * median(abs(one - middle) for one in logs)

    @property
    def alarm(self) -> str | None:
        """A description of the mismatch while the alarm is on; else None."""
        if not self.alarming:
            return None
        if self._beyond_bound():
            return (
                f"mismatch_kl is {median(self.recent):.3g}, above {self.bound:g}, the most that "
                "rounding explains: trainer and engine do not compute the same logprobs; look for "
                "a different temperature, logprobs_mode, precision or version of the weights (if "
                "the cause is known and accepted, raise bound=)"
            )
        return (
            f"mismatch_kl has risen to {median(self.recent):.3g}, {self.ratio:.2f} times the "
            f"{median(self.baseline):.3g} of the steps before, and stays there: trainer and engine "
            "no longer compute the same logprobs; look for stale weights in an engine, a stale "
            "prefix cache, a different precision or temperature"
        )

    def state(self) -> dict[str, Any]:
        """Return the gate's fields as a dict; ``MismatchGate(**state)`` continues from there."""
        return attrs.asdict(self)

    def _beyond_bound(self) -> bool:
        return len(self.recent) == RECENT and median(self.recent) > self.bound

    def _exceeds(self) -> bool:
        if self._beyond_bound():
            return True
        ratio = self.ratio
        if ratio is None or ratio <= RISE:
            return False
        return self.spread is not None and ratio > math.exp(SPREADS * self.spread)
