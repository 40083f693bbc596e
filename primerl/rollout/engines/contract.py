"""The contract of engines and environments, checked where their results are received.

Results of a server, a user's engine or an environment are checked before they are used. A violation
fails its own rollout and is counted as ``BadCompletion`` or ``BadSample`` in the worker's
``errors``. ``docs/engines.md`` has the rules for engines.
"""

import asyncio
import math
from typing import Any

import attrs
import msgspec
import numpy as np

from primerl.rollout.engines.protocol import Engine, is_instant
from primerl.types import (
    LOGPROB_ROUNDING,
    Completion,
    PolicyVersion,
    Rollout,
    Sample,
    SamplingParams,
)


class BadCompletion(RuntimeError):
    """A completion breaks the contract of engines."""


class BadSample(ValueError):
    """An environment returned a sample that can't be stored, or can't come from its engine."""


@attrs.frozen(kw_only=True)
class EngineLimits:
    """Limits of a valid completion.

    Args:
        context_length: the maximum number of tokens of prompt and completion together.
        vocab_size: the number of token ids, or None if unknown.
        oldest: the version served when the request was sent.
        newest: the newest version served when the completion arrived.
    """

    context_length: int
    vocab_size: int | None
    oldest: PolicyVersion
    newest: PolicyVersion

    @classmethod
    def of(cls, engine: Engine, *, oldest: PolicyVersion = 0) -> "EngineLimits":
        """Return the current limits of ``engine``."""
        return cls(
            context_length=engine.context_length,
            vocab_size=getattr(engine, "vocab_size", None),
            oldest=oldest,
            newest=newest_version(engine),
        )


def newest_version(engine: Engine) -> PolicyVersion:
    """Return the newest version that a server of the engine serves; else ``version``."""
    version = engine.version
    return max(version, getattr(engine, "newest_version", version))


def check_completion(
    completion: Any, prompt_length: int, params: SamplingParams, limits: EngineLimits
) -> None:
    """Check a completion against its request.

    Raises:
        BadCompletion: it breaks a rule; the message names the rule and what was expected.
    """
    if not isinstance(completion, Completion):
        raise BadCompletion(
            f"the engine returned a {type(completion).__name__}, expected a types.Completion"
        )
    fault = (
        _length_fault(completion, prompt_length, params, limits.context_length)
        or _ending_fault(completion, params)
        or _token_fault(completion.token_ids, limits.vocab_size)
        or _logprob_fault(completion.logprobs)
        or _version_fault(completion.versions, limits)
    )
    if fault:
        raise BadCompletion(f"the engine's completion {fault}")


def check_rollout(rollout: Rollout, params: SamplingParams, limits: EngineLimits) -> None:
    """Check the samples and the conversation that an environment returned.

    Raises:
        BadSample: they break a rule; the message names the rule and what was expected.
    """
    for sample in rollout.samples:
        if fault := _sample_fault(sample, params, limits):
            raise BadSample(f"the environment returned {fault}")
    if fault := _conversation_fault(rollout.conversation):
        raise BadSample(f"the environment returned {fault}")


async def check_routes(rollout: Rollout, engine: Engine) -> None:
    """Check the expert routes of samples to be trained, if the engine records any.

    Greedy samples have no routes, since they can't be trained.

    Raises:
        BadSample: the engine's route store refuses the routes.
    """
    store = getattr(engine, "routes", None)
    if store is None:
        return
    for sample in rollout.samples:
        if sample.temperature == 0 or not sample.loss_mask.any():
            continue
        try:
            if is_instant(store, len(sample.token_ids)):
                store.check(sample)
            else:
                await asyncio.to_thread(store.check, sample)
        except ValueError as error:
            raise BadSample(f"the expert routes of a sample are not usable: {error}") from error


def _length_fault(
    completion: Completion, prompt_length: int, params: SamplingParams, context_length: int
) -> str | None:
    count = len(completion.token_ids)
    if count == 0:
        return "is empty, expected at least one token"
    if count > params.max_tokens:
        return f"has {count} tokens, expected at most max_tokens={params.max_tokens}"
    if prompt_length + count > context_length:
        return (
            f"has {count} tokens after a prompt of {prompt_length}, beyond the context of "
            f"{context_length}"
        )
    return None


def _ending_fault(completion: Completion, params: SamplingParams) -> str | None:
    tokens, reason = completion.token_ids, completion.finish_reason
    places = [(tokens == stop).nonzero()[0] for stop in params.stop_token_ids]
    ends = [int(found[0]) for found in places if len(found)]
    stopped = bool(ends)
    first = min(ends, default=len(tokens) - 1)
    after = len(tokens) - 1 - first
    if reason not in ("stop", "length"):
        return f"has the finish_reason {reason!r}, expected 'stop' or 'length'"
    if stopped and after:
        return f"continues for {after} tokens after the stop token {tokens[first]}"
    if reason == "stop" and not stopped:
        return f"has finish_reason 'stop' without one of the stop tokens {params.stop_token_ids}"
    if reason == "length" and stopped:
        return f"ends with the stop token {tokens[-1]} and finish_reason 'length', expected 'stop'"
    if reason == "length" and len(tokens) < params.max_tokens:
        return f"has {len(tokens)} tokens and finish_reason 'length', expected {params.max_tokens}"
    return None


def _token_fault(tokens: np.ndarray, vocab_size: int | None) -> str | None:
    if (lowest := int(tokens.min())) < 0:
        return f"has the token id {lowest}, expected ids of at least 0"
    if vocab_size is not None and (highest := int(tokens.max())) >= vocab_size:
        return f"has the token id {highest}, outside the vocabulary of {vocab_size}"
    return None


def _logprob_fault(logprobs: np.ndarray) -> str | None:
    highest, lowest = float(logprobs.max()), float(logprobs.min())  # both are NaN where one is
    if math.isfinite(lowest) and highest <= LOGPROB_ROUNDING:
        return None
    worst = highest if math.isfinite(lowest) else lowest
    return f"has the logprob {worst}, expected finite logprobs of at most 0"


def _version_fault(versions: np.ndarray, limits: EngineLimits) -> str | None:
    if (versions[1:] < versions[:-1]).any():
        return f"has versions that decrease: {np.unique(versions).tolist()}"
    if (first := int(versions[0])) < limits.oldest:
        return f"has version {first}, older than {limits.oldest}, which was already served"
    if (last := int(versions[-1])) > limits.newest:
        return f"has version {last}, which was never published: {limits.newest} is served"
    return None


def _conversation_fault(conversation: Any) -> str | None:
    """Return why a conversation could not be stored with its group, which would fail only later."""
    try:
        content = msgspec.msgpack.encode(conversation)
        msgspec.msgpack.decode(content, type=dict[str, Any] | None)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return f"a conversation that can't be stored ({error}); expected text, numbers and lists"
    return None


def _sample_fault(sample: Any, params: SamplingParams, limits: EngineLimits) -> str | None:
    if type(sample) is not Sample:
        return f"a {type(sample).__name__} among the samples of its rollout, expected types.Sample"
    if sample.temperature == 0 and params.temperature > 0:
        return (
            "a greedy sample (temperature=0), which can't be trained; sample with the given params "
            f"(temperature={params.temperature})"
        )
    if fault := _token_fault(sample.token_ids, limits.vocab_size):
        return f"a sample that {fault}"
    trained = sample.loss_mask.nonzero()[0]
    if len(trained) == 0:
        return None
    if trained[-1] >= limits.context_length:
        return (
            f"a sample that trains token {trained[-1]}, beyond the engine's context of "
            f"{limits.context_length}"
        )
    if fault := _logprob_fault(sample.behavior_logprobs[trained]):
        return f"a sample that {fault}"
    if (newest := int(sample.versions[trained].max())) > limits.newest:
        return (
            f"a sample of version {newest}, which was never published: the engine serves "
            f"{limits.newest}"
        )
    return None
