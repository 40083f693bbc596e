"""Limits of one rollout of an agent, and what it has used of them."""

import time

import attrs


class LimitReached(RuntimeError):
    """A rollout has used up one of its limits; ``reason`` is its ``Rollout.stop``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@attrs.frozen(kw_only=True)
class AgentLimits:
    """When a rollout of an agent ends, whatever the agent wants.

    Raises:
        ValueError: one is not positive.
    """

    max_turns: int = 100
    """Model calls."""
    max_tokens: int | None = None
    """Sampled tokens, over all turns; None for no limit but the turns'."""
    timeout_s: float = 1800.0
    """In seconds, tools included."""
    max_output: int = 16_384
    """Characters of one tool's result that the policy sees: its beginning and end."""

    def __attrs_post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "timeout_s", "max_output"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, expected a positive number")


@attrs.define(eq=False)
class Budget:
    """What a rollout has left of its limits."""

    limits: AgentLimits
    turns: int = 0
    tokens: int = 0
    deadline: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.deadline = time.monotonic() + self.limits.timeout_s

    @property
    def seconds_left(self) -> float:
        """Until the deadline."""
        return self.deadline - time.monotonic()

    def begin_turn(self) -> int | None:
        """Count a model call; returns how many tokens it may sample, None for any number.

        Raises:
            LimitReached: none is left.
        """
        limits = self.limits
        if self.seconds_left <= 0:
            raise LimitReached("timeout", f"the rollout's {limits.timeout_s} s are over")
        if self.turns >= limits.max_turns:
            raise LimitReached("max_turns", f"the rollout's {limits.max_turns} turns are used up")
        left = None if limits.max_tokens is None else limits.max_tokens - self.tokens
        if left is not None and left < 1:
            raise LimitReached(
                "max_tokens", f"the rollout's {limits.max_tokens} tokens are used up"
            )
        self.turns += 1
        return left
