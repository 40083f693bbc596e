"""When the mismatch of trainer and sampler has risen for good, and when it was only noise."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import attrs

RECENT = 3  # steps whose median is judged
MAD_TO_SD = 1.4826  # of a normal distribution
RISE = 1.25  # halfway to 1.5, nearly, on a logarithmic scale
SPREADS = 2.7
CEILING = 1e6  # nats
BOUND = 0.1  # nats: a log-ratio of 0.45 at each token; bfloat16 makes about 0.005


def _floats(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


@attrs.frozen(kw_only=True)
class MismatchGate:
    """Watches ``mismatch_kl`` step by step: a value, and ``after`` gives the next one.

        gate = track.MismatchGate()
        ...
        gate = gate.after(metrics.get("mismatch_kl"))
        if gate.alarm:
            raise RuntimeError(gate.alarm)

    ``Run`` has one, logs its alarm with the step's metrics, and saves it with the run.

    The median of the last 3 steps is compared with the median of the ``window`` steps before them,
    on a logarithmic scale, so one wild step in three can neither raise nor hide an alarm. The
    alarm is on while their quotient exceeds ``max(1.25, exp(2.7 s))``; s is the spread of the
    baseline, ``1.4826 MAD`` of its logarithms. The baseline stands still while the alarm is on.

    What it promises depends on s (docs/verification.md has the table): up to s = 0.08, a sustained
    rise by 1.5 is flagged within 3 steps and at most 1 of 1,000 clean steps begins an alarm.
    Beyond, it takes a larger rise, and up to 3 of 1,000 where tails are heavy; more tokens
    a step help. A rise slower than 1.5 in 200 steps is drift, as training makes it, and is
    followed.

    What is wrong from the start is in the baseline too, and no rise. So the alarm is also on while
    the median exceeds ``bound``, whatever was before, from the first 3 steps on.

    Raises:
        ValueError: a number is out of range.
    """

    window: int = 32
    """Steps of the baseline."""
    warm_up: int = 16
    """Steps before the first judgement."""
    floor: float = 1e-10
    """What is smaller counts as this, in nats: the rounding of float32 logprobs, about 1e-5, makes
    half its square, and quotients of rounding errors mean nothing."""
    bound: float = BOUND
    """The most that is normal for any trainer and engine, in nats; the alarm is on above it."""
    baseline: tuple[float, ...] = attrs.field(default=(), converter=_floats)
    """Steps so far, oldest first; with ``recent`` and ``alarming``, what ``state`` gave."""
    recent: tuple[float, ...] = attrs.field(default=(), converter=_floats)
    """The last steps, not yet part of the baseline."""
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
        """The gate after one more step with this ``mismatch_kl``.

        None, a step without a token of the trainer's own version, changes nothing. NaN and infinity
        count as 1e6 nats: logprobs that are no numbers are a mismatch too.
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
        """The last steps over the baseline; None before there are enough of both."""
        if len(self.baseline) < self.warm_up or len(self.recent) < RECENT:
            return None
        return median(self.recent) / median(self.baseline)

    @property
    def spread(self) -> float | None:
        """s, the spread of the baseline's logarithms from step to step; None before there is one.

        It is about the coefficient of variation of ``mismatch_kl`` where that is small.
        """
        if len(self.baseline) < self.warm_up:
            return None
        logs = [math.log(value) for value in self.baseline]
        middle = median(logs)
        return MAD_TO_SD * median(abs(one - middle) for one in logs)

    @property
    def alarm(self) -> str | None:
        """What is wrong, in a sentence, while the alarm is on."""
        if not self.alarming:
            return None
        if self._beyond_bound():
            return (
                f"mismatch_kl is {median(self.recent):.3g}, above {self.bound:g}, the most that "
                "rounding explains: trainer and engine do not compute the same logprobs; look for "
                "another temperature or logprobs_mode, other weights, another precision (bound= "
                "if it is known)"
            )
        return (
            f"mismatch_kl has risen to {median(self.recent):.3g}, {self.ratio:.2f} times the "
            f"{median(self.baseline):.3g} of the steps before, and stays there: trainer and engine "
            "no longer compute the same logprobs; look for stale weights in an engine, a stale "
            "prefix cache, another precision or temperature"
        )

    def state(self) -> dict[str, Any]:
        """All of it as builtins; ``MismatchGate(**state)`` continues from there."""
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
