"""An engine and an environment that break one rule of their contract.

Use them to test that faults are detected: wrap a valid engine, and check that the affected rollouts
fail with the name of the rule, that none is trained, and that the run continues.
"""

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from primerl.rollout.engines.contract import EngineLimits
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.environments.environment import Environment, Task
from primerl.types import (
    LOGPROB_ROUNDING,
    Completion,
    Rollout,
    Sample,
    SamplingParams,
    TrainingSample,
)

NO_VOCABULARY = 1_000_000_000  # beyond the vocabulary of any model


@attrs.frozen(kw_only=True)
class Request:
    """A request, with the limits of a valid completion."""

    params: SamplingParams
    limits: EngineLimits

    @property
    def beyond_vocabulary(self) -> int:
        """The first token id beyond the model's vocabulary."""
        return self.limits.vocab_size or NO_VOCABULARY


Corrupt = Callable[[Completion, Request], Any]


class HostileEngine:
    """An engine that breaks one rule of its contract in every ``every``-th completion.

        engine = HostileEngine("positive_logprob", testing.ScriptedEngine(), every=10)

    Args:
        fault: one of ``engine_faults()``.
        engine: the wrapped engine, which gives valid completions.
        every: 1 breaks all completions.

    Raises:
        ValueError: ``fault`` is unknown.
    """

    def __init__(self, fault: str, engine: Any, *, every: int = 1) -> None:
        if fault not in COMPLETION_FAULTS:
            raise ValueError(f"there is no fault {fault!r}, only {', '.join(COMPLETION_FAULTS)}")
        self.broken = 0
        """Number of broken completions so far."""
        self._fault = fault
        self._engine = engine
        self._every = every
        self._numbers = itertools.count(1)

    @property
    def version(self) -> int:
        """The wrapped engine's version."""
        version: int = self._engine.version
        return version

    @property
    def context_length(self) -> int:
        """The wrapped engine's context length."""
        length: int = self._engine.context_length
        return length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while unpickling, the wrapped engine is not set yet
            raise AttributeError(name)
        return getattr(self._engine, name)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Any:
        """Return the wrapped engine's completion; every ``every``-th is broken."""
        answer = await self._engine.generate(prompt_ids, params, session=session)
        if next(self._numbers) % self._every:
            return answer
        self.broken += 1
        limits = EngineLimits.of(self._engine, oldest=self._engine.version)
        request = Request(params=params, limits=limits)
        return COMPLETION_FAULTS[self._fault](answer, request)


def engine_faults() -> tuple[str, ...]:
    """Return the names of the rules that ``HostileEngine`` can break."""
    return tuple(COMPLETION_FAULTS)


def _resized(completion: Completion, count: int) -> Completion:
    """Cut a completion to ``count`` tokens, or extend it by repeating its last token."""
    places = np.minimum(np.arange(count), max(0, len(completion.token_ids) - 1))
    return attrs.evolve(
        completion,
        token_ids=completion.token_ids[places],
        logprobs=completion.logprobs[places],
        versions=completion.versions[places],
    )


def _too_few_tokens(completion: Completion, request: Request) -> Completion:
    shorter = _resized(completion, request.params.max_tokens - 1)
    return attrs.evolve(shorter, finish_reason="length")


def _stop_without_stop_token(completion: Completion, request: Request) -> Completion:
    token = next(one for one in itertools.count() if one not in request.params.stop_token_ids)
    tokens = np.full_like(completion.token_ids, token)
    return attrs.evolve(completion, token_ids=tokens, finish_reason="stop")


def _tokens_after_stop(completion: Completion, request: Request) -> Completion:
    stops = request.params.stop_token_ids
    longer = _resized(completion, request.params.max_tokens)
    tokens = longer.token_ids.copy()
    if stops:
        tokens[0] = stops[0]
    return attrs.evolve(longer, token_ids=tokens, finish_reason="stop")


def _stop_called_length(completion: Completion, request: Request) -> Completion:
    stops = request.params.stop_token_ids
    tokens = completion.token_ids.copy()
    if stops:
        tokens[-1] = stops[0]
        return attrs.evolve(completion, token_ids=tokens, finish_reason="length")
    return attrs.evolve(completion, finish_reason="stop")


def _first(field: str, value: Callable[[Request], float]) -> Corrupt:
    """Make a fault that replaces ``field`` at the first token."""

    def corrupt(completion: Completion, request: Request) -> Completion:
        values = getattr(completion, field).copy()
        values[0] = value(request)
        return attrs.evolve(completion, **{field: values})

    return corrupt


def _versions_go_back(completion: Completion, request: Request) -> Completion:
    longer = _resized(completion, max(2, len(completion.versions)))
    versions = np.full_like(longer.versions, request.limits.newest)
    versions[-1] -= 1
    return attrs.evolve(longer, versions=versions)


def _version(value: Callable[[Request], int]) -> Corrupt:
    """Make a fault that replaces the version of every token."""

    def corrupt(completion: Completion, request: Request) -> Completion:
        versions = np.full_like(completion.versions, value(request))
        return attrs.evolve(completion, versions=versions)

    return corrupt


COMPLETION_FAULTS: Mapping[str, Corrupt] = {
    "too_many_tokens": lambda answer, request: _resized(answer, request.params.max_tokens + 1),
    "beyond_context": lambda answer, request: _resized(answer, request.limits.context_length),
    "too_few_tokens": _too_few_tokens,
    "stop_without_stop_token": _stop_without_stop_token,
    "tokens_after_stop": _tokens_after_stop,
    "stop_called_length": _stop_called_length,
    "unknown_finish_reason": lambda answer, _: attrs.evolve(answer, finish_reason="eos"),
    "empty": lambda answer, _: _resized(answer, 0),
    "negative_token_id": _first("token_ids", lambda _: -1),
    "token_id_beyond_vocabulary": _first("token_ids", lambda request: request.beyond_vocabulary),
    "positive_logprob": _first("logprobs", lambda _: 50.0),
    "slightly_positive_logprob": _first("logprobs", lambda _: 100 * LOGPROB_ROUNDING),
    "nan_logprob": _first("logprobs", lambda _: float("nan")),
    "infinite_logprob": _first("logprobs", lambda _: float("inf")),
    "minus_infinite_logprob": _first("logprobs", lambda _: float("-inf")),
    "versions_go_back": _versions_go_back,
    "older_version": _version(lambda request: request.limits.oldest - 1),
    "unpublished_version": _version(lambda request: request.limits.newest + 1000),
    "not_a_completion": lambda answer, _: {"token_ids": answer.token_ids.tolist()},
}


class HostileEnvironment:
    """An environment that breaks one rule for samples in every ``every``-th rollout.

        environment = testing.HostileEnvironment("nan_logprob", environment, every=10)

    Args:
        fault: one of ``environment_faults()``.
        environment: the wrapped environment, which plays valid rollouts.
        every: 1 breaks all rollouts.

    Raises:
        ValueError: ``fault`` is unknown.
    """

    def __init__(self, fault: str, environment: Environment, *, every: int = 1) -> None:
        if fault not in SAMPLE_FAULTS:
            raise ValueError(f"there is no fault {fault!r}, only {', '.join(SAMPLE_FAULTS)}")
        self._fault = fault
        self._environment = environment
        self._every = every
        self._numbers = itertools.count(1)

    async def __call__(self, task: Task, engine: Engine, params: SamplingParams) -> Rollout:
        """Return the wrapped environment's rollout; every ``every``-th is broken."""
        played: Awaitable[Rollout] = self._environment(task, engine, params)
        rollout = await played
        if next(self._numbers) % self._every:
            return rollout
        corrupt = SAMPLE_FAULTS[self._fault]
        request = Request(params=params, limits=EngineLimits.of(engine))
        return attrs.evolve(rollout, samples=[corrupt(one, request) for one in rollout.samples])


def environment_faults() -> tuple[str, ...]:
    """Return the names of the rules that ``HostileEnvironment`` can break."""
    return tuple(SAMPLE_FAULTS)


def _trained(field: str, value: Callable[[Request], Any]) -> Callable[[Sample, Request], Sample]:
    """Make a fault that replaces ``field`` at the last trained token."""

    def corrupt(sample: Sample, request: Request) -> Sample:
        new = value(request)
        values = getattr(sample, field).astype(np.float64 if isinstance(new, float) else np.int64)
        values[sample.loss_mask.nonzero()[0][-1]] = new
        return attrs.evolve(sample, **{field: values})

    return corrupt


def _long_sample(sample: Sample, request: Request) -> Sample:
    places = np.minimum(np.arange(request.limits.context_length + 1), len(sample.token_ids) - 1)
    names = ("token_ids", "loss_mask", "behavior_logprobs", "versions")
    return attrs.evolve(sample, **{name: getattr(sample, name)[places] for name in names})


def _with_advantages(sample: Sample, _: Request) -> Sample:
    fields = attrs.asdict(sample, recurse=False)
    return TrainingSample(**fields, advantages=np.ones(len(sample.token_ids)))


SAMPLE_FAULTS: Mapping[str, Callable[[Sample, Request], Any]] = {
    "beyond_context": _long_sample,
    "negative_token_id": _trained("token_ids", lambda _: -1),
    "token_id_beyond_vocabulary": _trained("token_ids", lambda one: one.beyond_vocabulary),
    "token_id_beyond_int32": _trained("token_ids", lambda _: 2**32 + 3),
    "positive_logprob": _trained("behavior_logprobs", lambda _: 50.0),
    "slightly_positive_logprob": _trained("behavior_logprobs", lambda _: 100 * LOGPROB_ROUNDING),
    "nan_logprob": _trained("behavior_logprobs", lambda _: float("nan")),
    "infinite_logprob": _trained("behavior_logprobs", lambda _: float("inf")),
    "minus_infinite_logprob": _trained("behavior_logprobs", lambda _: float("-inf")),
    "unpublished_version": _trained("versions", lambda one: one.limits.newest + 1000),
    "negative_version": _trained("versions", lambda _: -7),
    "greedy_sample": lambda sample, _: attrs.evolve(sample, temperature=0.0),
    "another_class": _with_advantages,
    "no_sample": lambda sample, _: {"token_ids": sample.token_ids.tolist()},
}
