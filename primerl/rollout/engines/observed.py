"""An engine wrapper for one attempt of a rollout: records completions, and waits during outages."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs

from primerl.rollout.engines.contract import BadCompletion, EngineLimits, check_completion
from primerl.rollout.engines.health import (
    EngineFailed,
    EngineHealth,
    Retry,
    is_outage,
    is_timeout,
)
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.processes.running_clock import running_time
from primerl.types import Completion, PolicyVersion, SamplingParams


@attrs.define(eq=False)
class _PendingRequest:
    """A request that has not been answered yet."""

    began: float = attrs.Factory(running_time)
    failed: bool = False


@attrs.frozen(eq=False)
class CallRecord:
    """The record of a completed call, in whichever process it was sampled."""

    tokens: int
    routes: tuple[str, ...]
    """References to the routes of the completion."""
    bad: BadCompletion | None
    """How the completion breaks the contract."""
    completion: Any
    """The completion; None in a record that was sent by another process."""

    @classmethod
    def of(
        cls, completion: Any, prompt_length: int, params: SamplingParams, limits: EngineLimits
    ) -> "CallRecord":
        """Check a completion; return its record."""
        routes = tuple(getattr(completion, "routes", ()))
        try:
            check_completion(completion, prompt_length, params, limits)
        except BadCompletion as error:
            return cls(0, routes, error, completion)
        return cls(len(completion.token_ids), routes, None, completion)


@attrs.define(eq=False, repr=False, slots=False)
class ObservedEngine:
    """An engine for one attempt at a rollout, which records the attempt's calls."""

    _engine: Engine
    _begin: Callable[[PolicyVersion | None], None]
    """Called with the version before each request, and with None if the request failed."""
    _sampled: Callable[[int], None]
    """Called with the number of tokens of each completion."""
    _health: EngineHealth | None
    """The engine's health, shared by its users; without it, the engine's failures are raised."""
    _name: str = ""
    """What sessions are named after, instead of the environment's random names, so that a repeated
    run names them alike; empty if that does not matter."""
    given_up: EngineFailed | None = attrs.field(default=None, init=False)
    """The error of a request that was given up."""
    bad: BadCompletion | None = attrs.field(default=None, init=False)
    """A completion that broke the contract, whether or not the environment caught the error."""
    outage: Exception | None = attrs.field(default=None, init=False)
    """The engine's last error, if it has answered no request of the attempt since."""
    routes_of_calls: set[str] = attrs.field(factory=set, init=False)
    """References to the routes of all completions."""
    _open: list[_PendingRequest] = attrs.field(factory=list, init=False)
    _answered: bool = attrs.field(default=False, init=False)
    _sessions: dict[str, str] = attrs.field(factory=dict, init=False)

    @property
    def observed(self) -> Engine:
        """The engine whose calls are recorded."""
        return self._engine

    @property
    def version(self) -> PolicyVersion:
        """The version that the engine serves."""
        return self._engine.version

    @property
    def context_length(self) -> int:
        """The engine's context length, in tokens."""
        try:
            return self._engine.context_length
        except Exception as error:
            if self._health is not None and is_outage(error):
                self._open.append(_PendingRequest(failed=True))
            raise

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """Sample one completion with the engine; wait during outages.

        Raises:
            EngineFailed: the engine was given up.
            ValueError: the engine refused the request. Other refusals are raised as well.
            BadCompletion: the completion breaks the contract.
        """
        served = self._engine.version

        async def request(name: str | None) -> CallRecord:
            completion = await self._engine.generate(prompt_ids, params, session=name)
            limits = EngineLimits.of(self._engine, oldest=served)
            return CallRecord.of(completion, len(prompt_ids), params, limits)

        completion: Completion = (await self.record(request, session=session)).completion
        return completion

    async def record(
        self, request: Callable[[str | None], Awaitable["CallRecord"]], *, session: str | None
    ) -> "CallRecord":
        """Record a call that ``request`` makes, under the session's name; wait during outages.

        Raises:
            Exception: as ``generate`` does.
        """
        if session is not None and self._name:
            session = self._sessions.setdefault(session, f"{self._name}.{len(self._sessions)}")
        try:
            call: CallRecord = await self._ask(lambda: request(session))
            self.routes_of_calls.update(call.routes)
            if call.bad is not None:
                raise call.bad
        except BadCompletion as error:
            self.bad = error
            raise
        self._answered = True
        self._sampled(call.tokens)
        return call

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._engine, name)  # for members beyond the protocol
        if name not in ("score", "chat"):
            return value

        async def request(*args: Any, **options: Any) -> Any:
            return await self._ask(lambda: value(*args, **options))

        return request

    @property
    def ignored(self) -> bool:
        """Whether the engine answered nothing during the last half of an open request's time."""
        if self._health is None:
            return False
        now, last = running_time(), self._health.answered_at
        return any(now - last >= (now - call.began) / 2 for call in self._open)

    def failed_by_engine(self, error: BaseException) -> bool:
        """Return whether the attempt failed because of the engine, whatever the environment raised.

        This holds if the engine failed a request and never answered it, or if the attempt timed out
        while the engine answered no request at all.
        """
        if self._health is None:
            return False
        return any(call.failed for call in self._open) or (is_timeout(error) and self.ignored)

    async def _ask(self, request: Callable[[], Awaitable[Any]]) -> Any:
        health = self._health
        if health is None:
            self._begin(self._engine.version)
            return await request()
        call, retry = _PendingRequest(), Retry(health)
        self._open.append(call)  # stays open if the environment cancels it
        while True:
            self._begin(self._engine.version)
            try:
                answer = await request()
            except Exception as error:
                if not is_outage(error):
                    self._open.remove(call)
                    raise
                call.failed = True
                self.outage = error
                if not self._answered and len(self._open) == 1:
                    self._begin(None)
                try:
                    await retry.failed(error)
                except EngineFailed as failure:
                    self.given_up = failure
                    raise
            else:
                self._open.remove(call)
                self.outage = None
                health.answered()
                return answer
