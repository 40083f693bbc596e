"""The engine as one rollout sees it: what it samples is noted, and an outage is waited out."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs

from primerl.rollout.engines.contract import BadCompletion, Limits, check_completion
from primerl.rollout.engines.health import (
    EngineFailed,
    EngineHealth,
    Repetition,
    is_outage,
    is_timeout,
)
from primerl.rollout.engines.protocol import Engine
from primerl.types import Completion, PolicyVersion, SamplingParams


@attrs.define(eq=False)
class _Call:
    """A request that was not answered so far."""

    began: float = attrs.Factory(time.monotonic)
    failed: bool = False


class ObservedEngine:
    """An engine for one attempt at a rollout.

    Args:
        engine: samples.
        begin: called with the version before a request, and with None where it came to nothing.
        sampled: called with the number of tokens of each completion.
        health: of the engine, and whoever else asks it; without, its failures are raised.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        begin: Callable[[PolicyVersion | None], None],
        sampled: Callable[[int], None],
        health: EngineHealth | None,
    ) -> None:
        self._engine = engine
        self._begin = begin
        self._sampled = sampled
        self._health = health
        self._open: list[_Call] = []
        self._answered = False
        self.given_up: EngineFailed | None = None
        """Why a request of this attempt was given up."""
        self.bad: BadCompletion | None = None
        """An answer that broke the contract, whatever the environment made of it."""

    @property
    def version(self) -> PolicyVersion:
        """The engine's."""
        return self._engine.version

    @property
    def context_length(self) -> int:
        """The engine's."""
        try:
            return self._engine.context_length
        except Exception as error:
            if self._health is not None and is_outage(error):
                self._open.append(_Call(failed=True))
            raise

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """The engine's completion, as soon as it answers.

        Raises:
            EngineFailed: it was given up. What it refuses (a ``ValueError``, say) is raised.
            BadCompletion: the answer breaks the contract.
        """
        served = self._engine.version
        try:
            completion: Completion = await self._ask(
                lambda: self._engine.generate(prompt_ids, params, session=session)
            )
            limits = Limits.of(self._engine, oldest=served)
            check_completion(completion, len(prompt_ids), params, limits)
        except BadCompletion as error:
            self.bad = error
            raise
        self._answered = True
        self._sampled(len(completion.token_ids))
        return completion

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._engine, name)  # what this engine has beyond the protocol
        if name != "score":
            return value

        async def score(*args: Any, **options: Any) -> Any:
            return await self._ask(lambda: value(*args, **options))

        return score

    @property
    def ignored(self) -> bool:
        """Whether a request is open, and for half of its time the engine has answered nobody."""
        if self._health is None:
            return False
        now, last = time.monotonic(), self._health.answered_at
        return any(now - last >= (now - call.began) / 2 for call in self._open)

    def failed_by_engine(self, error: BaseException) -> bool:
        """Whether the attempt failed because of the engine, whatever the environment made of it.

        It did where the engine failed a request of it that was not answered in the end, or where
        time was up while the engine answered nobody.
        """
        if self._health is None:
            return False
        return any(call.failed for call in self._open) or (is_timeout(error) and self.ignored)

    async def _ask(self, request: Callable[[], Awaitable[Any]]) -> Any:
        health = self._health
        if health is None:
            self._begin(self._engine.version)
            return await request()
        call, repetition = _Call(), Repetition(health)
        self._open.append(call)  # and it stays where the environment cuts it off
        while True:
            self._begin(self._engine.version)
            try:
                answer = await request()
            except Exception as error:
                if not is_outage(error):
                    self._open.remove(call)
                    raise
                call.failed = True
                if not self._answered and len(self._open) == 1:
                    self._begin(None)
                try:
                    await repetition.failed(error)
                except EngineFailed as failure:
                    self.given_up = failure
                    raise
            else:
                self._open.remove(call)
                health.answered()
                return answer
