"""Limits of an agent's rollout, and the budget that tracks how much of them is used."""

import attrs

from primerl.rollout.processes.running_clock import running_time


class LimitReached(RuntimeError):
    """Raised when a rollout reaches one of its limits; ``reason`` becomes ``Rollout.stop``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@attrs.frozen(kw_only=True)
class AgentLimits:
    """Limits that end an agent's rollout, even if the agent would continue.

    Raises:
        ValueError: a limit is not positive.
    """

    max_turns: int = 100
    """The maximum number of model calls."""
    max_tokens: int | None = None
    """The maximum number of sampled tokens, over all turns; None for no limit."""
    timeout_s: float = 1800.0
    """The maximum duration of the rollout in seconds, including tool calls."""
    max_output: int = 16_384
    """The maximum characters of a tool result; of a longer one, the beginning and end are kept."""

    def __attrs_post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "timeout_s", "max_output"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, expected a positive number")


@attrs.define(eq=False)
class Budget:
    """The limits of one rollout, with the turns and tokens that it has used so far."""

    limits: AgentLimits
    turns: int = 0
    tokens: int = 0
    deadline: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.deadline = running_time() + self.limits.timeout_s

    @property
    def seconds_left(self) -> float:
        """The seconds left until the deadline; negative after it."""
        return self.deadline - running_time()

    def begin_turn(self) -> int | None:
        """Count a model call, and return how many tokens it may sample (None for no limit).

        Raises:
            LimitReached: a limit has been reached, so no further call is allowed.
        """
        limits = self.limits
        if self.seconds_left <= 0:
            raise LimitReached("timeout", f"the rollout reached its limit of {limits.timeout_s} s")
        if self.turns >= limits.max_turns:
            raise LimitReached(
                "max_turns", f"the rollout reached its limit of {limits.max_turns} turns"
            )
        left = None if limits.max_tokens is None else limits.max_tokens - self.tokens
        if left is not None and left < 1:
            raise LimitReached(
                "max_tokens", f"the rollout reached its limit of {limits.max_tokens} tokens"
            )
        self.turns += 1
        return left

    def count(self, tokens: int) -> None:
        """Count sampled tokens."""
        self.tokens += tokens

    def stop_after(self, finish_reason: str) -> str:
        """Return why a rollout stops that ends after a reply with this finish reason."""
        limit = self.limits.max_tokens
        used_up = limit is not None and self.tokens >= limit
        return "max_tokens" if finish_reason == "length" and used_up else finish_reason
