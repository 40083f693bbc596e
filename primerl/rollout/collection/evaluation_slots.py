"""The share of the rollouts in flight that evaluations beside training may have."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

ALWAYS = 64  # rollouts of evaluations that may be in flight however small a training step is
POLL_S = 0.05


class EvaluationSlots:
    """Admits the rollouts of evaluations in turn, so that neither they nor training starve.

    At most ``ALWAYS`` of them are in flight, or as many as a training step has rollouts, if these
    are more. Where the rollouts in flight are capped, evaluations have at most half of the cap. Up
    to that share they come first: groups are not started in their place.

    Args:
        rollouts_per_step: the number of rollouts in a training step.
        cap: returns the maximum number of rollouts in flight; one of evaluations may always run.
        training: returns the number of training rollouts in flight.
        wait_for_change: waits until a rollout may have ended, or for the given seconds.
    """

    def __init__(
        self,
        *,
        rollouts_per_step: int,
        cap: Callable[[], float],
        training: Callable[[], int],
        wait_for_change: Callable[[float], Awaitable[None]],
    ) -> None:
        self.in_flight = 0
        """The number of rollouts of evaluations in flight."""
        self.most = max(ALWAYS, rollouts_per_step)
        """The maximum number of rollouts of evaluations in flight."""
        self._waiting = 0
        self._cap = cap
        self._training = training
        self._wait_for_change = wait_for_change
        self._turn = asyncio.Lock()  # serves in the order of requests

    @property
    def reserved(self) -> float:
        """The number of places that training must leave free, or that are taken."""
        return max(self.in_flight, min(self.in_flight + self._waiting, self._share))

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Hold a place for one rollout; wait for it first."""
        self._waiting += 1
        try:
            async with self._turn:
                while not self._is_free:
                    await self._wait_for_change(POLL_S)
                self.in_flight += 1
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self.in_flight -= 1

    @property
    def _share(self) -> float:
        return max(1, min(self.most, self._cap() // 2))

    @property
    def _is_free(self) -> bool:
        if self.in_flight == 0:
            return True
        free = self._training() + self.in_flight < self._cap()
        return free and self.in_flight < self._share
