"""Checks of the contract of engines: one function per rule, which raises if it is violated."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs
import numpy as np

from primerl.rollout.engines.contract import BadCompletion, EngineLimits, check_completion
from primerl.rollout.engines.protocol import Engine
from primerl.types import LOGPROB_ROUNDING, Completion, SamplingParams

BEGIN_S = 0.05  # time for requests to start
CANCEL_S = 10.0  # time within which a cancelled request must end
LONGEST_FILLED = 4096  # longest context, in tokens, that is filled with a prompt


class Skipped(Exception):
    """Raised when a check does not apply; the message says why."""


@attrs.frozen(kw_only=True)
class EngineCase:
    """An engine, and the requests with which it is checked."""

    engine: Any
    prompt_ids: list[int]
    max_tokens: int
    concurrency: int
    update: Callable[[int], Any] | None
    broken: list[str] = attrs.Factory(list)
    """Violations of the contract in the completions of all checks so far."""

    def generate(
        self,
        *,
        prompt_ids: list[int] | None = None,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        **keywords: Any,
    ) -> Any:
        """Make a request, by default with the case's prompt and ``max_tokens``."""
        params = SamplingParams(
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            temperature=temperature,
            stop_token_ids=stop_token_ids,
        )
        prompt = self.prompt_ids if prompt_ids is None else prompt_ids
        request = self.engine.generate(prompt, params, **keywords)
        return self._checked(request, prompt, params) if inspect.isawaitable(request) else request

    async def _checked(self, request: Any, prompt: list[int], params: SamplingParams) -> Any:
        served = self.engine.version
        answer = await request
        try:
            check_completion(
                answer, len(prompt), params, EngineLimits.of(self.engine, oldest=served)
            )
        except BadCompletion as error:
            self.broken.append(str(error))
        return answer

    async def publish(self, version: int) -> None:
        """Publish weights as ``version``; skip the check if the case has no ``update``."""
        if self.update is None:
            raise Skipped("no update= was given")
        await asyncio.to_thread(self.update, version)


def _expect(condition: Any, message: str) -> None:
    if not condition:
        raise AssertionError(message)


async def protocol(case: EngineCase) -> None:
    """Check that the engine has ``generate``, and integers ``version`` and ``context_length``.

    ``vocab_size``, if the engine has it, must be an integer or None.
    """
    _expect(isinstance(case.engine, Engine), "expected version, context_length and generate")
    for name, least in (("version", 0), ("context_length", 2)):
        value = getattr(case.engine, name)
        _expect(
            isinstance(value, int) and value >= least,
            f"{name} is {value!r}, expected an integer of at least {least}",
        )
    vocab_size = getattr(case.engine, "vocab_size", None)
    _expect(
        vocab_size is None or (isinstance(vocab_size, int) and vocab_size >= 1),
        f"vocab_size is {vocab_size!r}, expected the number of token ids, or None",
    )


async def completion(case: EngineCase) -> None:
    """Check that a request returns a ``types.Completion`` of at least one token.

    The class itself checks that each token has a logprob and a version.
    """
    request = case.generate()
    _expect(
        inspect.isawaitable(request),
        f"generate returned {type(request).__name__}, which can't be awaited; use `async def`",
    )
    answer = await request
    _expect(
        isinstance(answer, Completion),
        f"generate returned {type(answer).__name__}, expected primerl.types.Completion",
    )
    _expect(len(answer.token_ids) > 0, "the completion is empty, expected at least one token")
    _expect((answer.token_ids >= 0).all(), f"negative token ids: {answer.token_ids.tolist()}")
    vocab_size = getattr(case.engine, "vocab_size", None)
    _expect(
        vocab_size is None or (answer.token_ids < vocab_size).all(),
        f"token ids outside the vocabulary of {vocab_size}: {answer.token_ids.tolist()}",
    )
    _expect(
        answer.finish_reason in ("stop", "length"),
        f"finish_reason is {answer.finish_reason!r}, expected 'stop' or 'length'",
    )


async def logprobs(case: EngineCase) -> None:
    """Check that each token has a finite logprob of at most 0."""
    values = (await case.generate()).logprobs
    _expect(np.isfinite(values).all(), f"logprobs are not finite: {values.tolist()}")
    _expect((values <= LOGPROB_ROUNDING).all(), f"logprobs above 0: {values.tolist()}")


async def versions(case: EngineCase) -> None:
    """Check that, without updates, each token has the version that the engine serves."""
    served = case.engine.version
    seen = (await case.generate()).versions.tolist()
    _expect(set(seen) == {served}, f"tokens have versions {seen}, but {served} was served")


async def max_tokens(case: EngineCase) -> None:
    """Check that, without stop tokens, completions have ``max_tokens`` tokens, and ``"length"``.

    An engine must not stop at any other token, such as an end-of-text token, without a request.
    """
    for most in (1, case.max_tokens):
        answer = await case.generate(max_tokens=most)
        _expect(
            len(answer.token_ids) == most and answer.finish_reason == "length",
            f"with max_tokens={most} and no stop tokens, got {len(answer.token_ids)} tokens with "
            f"finish_reason {answer.finish_reason!r}; expected {most} with 'length'",
        )


async def greedy(case: EngineCase) -> None:
    """Check that ``temperature=0`` gives the same tokens every time."""
    first, second = [(await case.generate(temperature=0)).token_ids.tolist() for _ in range(2)]
    _expect(first == second, f"temperature=0 gave {first}, but then {second}")


async def stop_tokens(case: EngineCase) -> None:
    """Check that a completion ends with its first stop token, and ``"stop"``."""
    tokens = (await case.generate(temperature=0)).token_ids.tolist()
    stop = tokens[len(tokens) // 2]
    expected = tokens[: tokens.index(stop) + 1]
    answer = await case.generate(temperature=0, stop_token_ids=[stop])
    _expect(
        answer.token_ids.tolist() == expected and answer.finish_reason == "stop",
        f"with stop token {stop}, which is sampled at index {len(expected) - 1}, got "
        f"{answer.token_ids.tolist()} with finish_reason {answer.finish_reason!r}; expected "
        f"{expected} with 'stop'",
    )


async def own_answers(case: EngineCase) -> None:
    """Check that concurrent requests get the completions of their own prompts.

    Each greedy completion is compared with that of a single request. It may differ, because batches
    round differently, but it must not be the completion of another prompt.
    """
    base = case.prompt_ids
    prompts = [base[n:] + base[:n] for n in range(len(base))]
    alone = [(await case.generate(prompt_ids=one, temperature=0)).token_ids for one in prompts]
    together = await asyncio.gather(
        *(case.generate(prompt_ids=one, temperature=0) for one in prompts)
    )
    for own, answer in zip(alone, together, strict=True):
        tokens = answer.token_ids
        mixed = any(np.array_equal(tokens, other) for other in alone)
        _expect(
            np.array_equal(tokens, own) or not mixed,
            f"a concurrent request got {tokens.tolist()}, which is the completion of another "
            f"prompt; alone it got {own.tolist()}",
        )


async def concurrency(case: EngineCase) -> None:
    """Check that each of many concurrent requests gets a completion of its ``max_tokens``."""
    asked = [1 + n % case.max_tokens for n in range(case.concurrency)]
    answers = await asyncio.gather(*(case.generate(max_tokens=most) for most in asked))
    got = [len(answer.token_ids) for answer in answers]
    _expect(got == asked, f"concurrent requests for {asked} tokens got {got}")


async def cancellation(case: EngineCase) -> None:
    """Check that cancelling awaiting tasks ends them at once, and the engine keeps serving."""
    room = case.engine.context_length - len(case.prompt_ids)
    requests = [
        asyncio.ensure_future(case.generate(max_tokens=room)) for _ in range(case.concurrency)
    ]
    await asyncio.wait(requests, timeout=BEGIN_S)
    cancelled = [request for request in requests if request.cancel()]
    if cancelled:
        _, pending = await asyncio.wait(cancelled, timeout=CANCEL_S)
        _expect(not pending, f"{len(pending)} cancelled requests run on after {CANCEL_S:g} s")
        _expect(
            all(request.cancelled() for request in cancelled),
            "cancelled requests did not raise CancelledError; do not catch it",
        )
    await asyncio.gather(*(case.generate(max_tokens=1) for _ in range(case.concurrency)))


async def session(case: EngineCase) -> None:
    """Check that requests may name their conversation by ``session``."""
    for _ in range(2):
        await case.generate(max_tokens=1, session="conversation")


async def empty_prompt(case: EngineCase) -> None:
    """Check that an empty prompt is refused with ``ValueError``."""
    await _expect_refusal(case.generate(prompt_ids=[]), "an empty prompt")


async def too_long(case: EngineCase) -> None:
    """Check that a request beyond ``context_length`` is refused with ``ValueError``."""
    length = case.engine.context_length
    room = length - len(case.prompt_ids)
    long = (case.prompt_ids * length)[:length]
    where = f"beyond the context of {length} tokens"
    await _expect_refusal(case.generate(max_tokens=room + 1), f"max_tokens {where}")
    await _expect_refusal(case.generate(prompt_ids=long, max_tokens=1), f"a prompt {where}")


async def full_context(case: EngineCase) -> None:
    """Check that a request that fills ``context_length`` exactly is accepted."""
    length = case.engine.context_length
    if length > LONGEST_FILLED:
        raise Skipped(f"the context of {length} tokens is longer than {LONGEST_FILLED}")
    long = (case.prompt_ids * length)[: length - 1]
    answer = await case.generate(prompt_ids=long, max_tokens=1)
    _expect(len(answer.token_ids) == 1, f"got {len(answer.token_ids)} tokens, expected 1")


async def update(case: EngineCase) -> None:
    """Check that after an update the engine reports the new version and samples with it."""
    version = case.engine.version + 1
    await case.publish(version)
    _expect(
        case.engine.version == version,
        f"after the update to version {version} the engine reports {case.engine.version}",
    )
    seen = (await case.generate()).versions.tolist()
    _expect(set(seen) == {version}, f"tokens have versions {seen} after the update to {version}")


async def update_in_flight(case: EngineCase) -> None:
    """Check that requests in flight finish, with versions that were served and never decrease."""

    async def bounded(most: int) -> tuple[int, Completion, int]:
        before = case.engine.version
        answer = await case.generate(max_tokens=most)
        return before, answer, case.engine.version

    most = min(8 * case.max_tokens, case.engine.context_length - len(case.prompt_ids))
    requests = [asyncio.ensure_future(bounded(most)) for _ in range(case.concurrency)]
    await asyncio.wait(requests, timeout=BEGIN_S)
    try:
        for _ in range(2):
            await case.publish(case.engine.version + 1)
        answers = await asyncio.gather(*requests)
    finally:
        for request in requests:
            request.cancel()
        await asyncio.wait(requests, timeout=CANCEL_S)
    for before, answer, after in answers:
        seen = answer.versions
        _expect((np.diff(seen) >= 0).all(), f"the versions of tokens decrease: {seen.tolist()}")
        _expect(
            before <= seen.min() and seen.max() <= after,
            f"versions {seen.tolist()} of a request during which {before} to {after} were served",
        )


async def update_back(case: EngineCase) -> None:
    """Check that an update to an older version is refused with ``ValueError`` without effect."""
    await case.publish(case.engine.version + 1)
    version = case.engine.version
    await _expect_refusal(case.publish(version - 1), f"version {version - 1} after {version}")
    _expect(case.engine.version == version, f"a refused update left version {case.engine.version}")


async def _expect_refusal(request: Awaitable[Any], what: str) -> None:
    try:
        await request
    except ValueError:
        return
    except Skipped:
        raise
    except Exception as error:
        raise AssertionError(
            f"{what} raised {type(error).__name__}: {error}; expected ValueError"
        ) from error
    raise AssertionError(f"{what} was accepted; expected ValueError")


async def every_answer(case: EngineCase) -> None:
    """Check that all completions of the other checks meet the contract that a worker enforces.

    This finds intermittent faults, which the check of the violated rule may miss.
    """
    kinds = list(dict.fromkeys(case.broken))
    _expect(not kinds, f"{len(case.broken)} completions break it: {'; '.join(kinds[:5])}")


FIRST = (protocol, completion)  # the other checks are meaningless if these fail
CHECKS = (
    *FIRST,
    *(logprobs, versions, max_tokens, greedy, stop_tokens, own_answers, concurrency, cancellation),
    *(session, empty_prompt, too_long, full_context, update, update_in_flight, update_back),
    every_answer,
)
