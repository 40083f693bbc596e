"""An engine without a model: scripted replies, latencies, failures and weight updates."""

import asyncio
import functools
import math
import random
import statistics
import threading
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from primerl.types import Completion, PolicyVersion, SamplingParams

Reply = str | Sequence[int]
Latency = Callable[[random.Random], float]


def lognormal(*, median_s: float, p99_over_median: float = 10.0) -> Latency:
    """Make a distribution of latencies with a long tail, like those of real rollouts.

    Latencies are ``exp(N(ln median, sigma))`` seconds with ``sigma = ln(p99_over_median) /
    2.3263``, so that 1% of calls take more than ``p99_over_median`` times the median.

    Raises:
        ValueError: the median is not positive, or the ratio is below 1.
    """
    if not 0 < median_s < math.inf:
        raise ValueError(f"median_s is {median_s}, expected a positive number of seconds")
    if not 1 <= p99_over_median < math.inf:
        raise ValueError(f"p99_over_median is {p99_over_median}, expected at least 1")
    sigma = math.log(p99_over_median) / statistics.NormalDist().inv_cdf(0.99)
    return functools.partial(random.Random.lognormvariate, mu=math.log(median_s), sigma=sigma)


class ScriptedEngine:
    """An engine with scripted replies, latencies, failures and weight updates.

        engine = testing.ScriptedEngine(["four", "five"], tokenizer=tokenizer,
                                        latency=testing.lognormal(median_s=0.05), failures=0.01)

    A completion ends at its first stop token; if the reply has none, the first of
    ``stop_token_ids`` is appended. Without stop tokens the reply is repeated up to ``max_tokens``.
    Every logprob is -1.

    A call sleeps once. Its tokens are sampled at even intervals over that time, each with the
    version served at that moment, so an update splits the completions in flight. Replies, latencies
    and failures depend only on ``seed`` and the order of the calls.

    ``generate`` may be awaited on any event loop, and ``update_weights`` called from any thread. An
    engine can be pickled if its arguments can; the copy has no calls in flight.

    Args:
        replies: a list of replies, used in turn, repeatedly; for a greedy request, the reply is
            selected by a hash of its prompt. Or a function ``(prompt_ids, call number) -> reply``,
            with calls numbered from 0.
        tokenizer: encodes replies that are strings; other replies are token ids.
        latency: seconds per call, or a function that draws them.
        seconds_per_token: seconds added to the latency for each sampled token.
        failures: the fraction of calls that fail, or ``call number -> exception or None``; raised
            after a random part of the call's latency.
        context_length: the maximum number of tokens of one request.
        vocab_size: the number of token ids, if a worker should check them.
        seed: seed of latencies and failures.

    Raises:
        ValueError: there is no reply, a reply is neither text nor token ids, a reply is text and
            there is no tokenizer, or a number is out of range.
    """

    context_length: int
    """The maximum number of tokens of one request, prompt and completion together."""
    calls: int
    """Calls so far, including those in flight, failed and cancelled, but not refused ones."""
    in_flight: int
    """Calls in flight."""
    peak_in_flight: int
    """The maximum number of calls in flight."""
    cancelled: int
    """Calls that were cancelled."""

    def __init__(
        self,
        replies: Sequence[Reply] | Callable[[Sequence[int], int], Reply] = ((2, 3, 4, 5),),
        *,
        tokenizer: Any = None,
        latency: float | Latency = 0.0,
        seconds_per_token: float = 0.0,
        failures: float | Callable[[int], Exception | None] = 0.0,
        context_length: int = 32_768,
        vocab_size: int | None = None,
        seed: int = 0,
    ) -> None:
        if not callable(latency) and not 0 <= latency < math.inf:
            raise ValueError(f"latency is {latency}, expected a number of seconds >= 0")
        if not 0 <= seconds_per_token < math.inf:
            raise ValueError(f"seconds_per_token is {seconds_per_token}, expected a number >= 0")
        if not callable(failures) and not 0 <= failures <= 1:
            raise ValueError(f"failures is {failures}, expected a fraction between 0 and 1")
        if context_length < 2:
            raise ValueError(f"context_length is {context_length}, expected at least 2 tokens")
        self._tokenizer = tokenizer
        self._reply = replies if callable(replies) else self._encode_all(replies)
        self._latency = latency
        self._seconds_per_token = seconds_per_token
        self._failures = failures
        self.context_length = context_length
        self.vocab_size = vocab_size
        self._random = random.Random(seed)
        self._updates: list[tuple[float, PolicyVersion]] = [(-math.inf, 0)]
        self.calls = self.in_flight = self.peak_in_flight = self.cancelled = 0
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()

    @property
    def version(self) -> PolicyVersion:
        """The policy version that samples the next token."""
        return self._updates[-1][1]

    def update_weights(
        self,
        tensors: Mapping[str, Any],  # noqa: ARG002  a script has no weights
        *,
        version: int,
        timeout_s: float = 600.0,  # noqa: ARG002  it takes no time
    ) -> None:
        """Serve ``version`` from the next token on; the tensors are ignored.

        Raises:
            ValueError: the version is older than the one served.
        """
        with self._lock:
            if version < self.version:
                raise ValueError(f"version {version} is older than {self.version}, which is served")
            self._updates.append((time.monotonic(), version))

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,  # noqa: ARG002  there is one server
    ) -> Completion:
        """Return the scripted completion after its latency; cancelling the task cancels the call.

        Raises:
            ValueError: the prompt is empty, or the request exceeds the context.
            RuntimeError: this call was selected to fail at random. An exception that ``failures``
                returns is raised itself.
        """
        self._check(prompt_ids, params)
        began, number, latency_s, share, failure = self._begin()
        try:
            token_ids = self._completion_ids(prompt_ids, params, number)
            latency_s += self._seconds_per_token * len(token_ids)
            await asyncio.sleep(share * latency_s)
            if failure is not None:
                raise failure
            stopped = token_ids[-1] in params.stop_token_ids
            return Completion(
                token_ids=token_ids,
                logprobs=np.full(len(token_ids), -1.0),
                versions=self._versions(began, len(token_ids)),
                finish_reason="stop" if stopped else "length",
            )
        except asyncio.CancelledError:
            with self._lock:
                self.cancelled += 1
            raise
        finally:
            with self._lock:
                self.in_flight -= 1

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        if len(prompt_ids) == 0:
            raise ValueError("the prompt is empty; a completion needs at least one token before it")
        if len(prompt_ids) + params.max_tokens > self.context_length:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens and max_tokens={params.max_tokens} exceed "
                f"the context of {self.context_length} tokens"
            )

    def _begin(self) -> tuple[float, int, float, float, Exception | None]:
        """Count a call, and draw its latency and whether it fails.

        Returns the call's start time, its number, its latency, the fraction of the latency after
        which it fails (1 if it does not fail), and the failure or None.
        """
        with self._lock:
            number = self.calls
            latency_s = self._latency(self._random) if callable(self._latency) else self._latency
            failure = self._failure(number)
            share = 1.0 if failure is None else self._random.random()
            self.calls += 1
            self.in_flight += 1
            self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
            return time.monotonic(), number, latency_s, share, failure

    def _failure(self, number: int) -> Exception | None:
        if callable(self._failures):
            return self._failures(number)
        if self._failures and self._random.random() < self._failures:
            return RuntimeError(f"call {number} was scripted to fail")
        return None

    def _completion_ids(
        self, prompt_ids: Sequence[int], params: SamplingParams, number: int
    ) -> list[int]:
        if callable(self._reply):
            reply = self._encode(self._reply(prompt_ids, number), f"the reply to call {number}")
        else:
            # A greedy completion depends on its prompt only, not on earlier calls.
            greedy = params.temperature == 0
            turn = zlib.crc32(np.asarray(prompt_ids, np.int64).tobytes()) if greedy else number
            reply = self._reply[turn % len(self._reply)]
        stops = params.stop_token_ids
        end = next((i for i, token in enumerate(reply) if token in stops), None)
        if end is not None:
            reply = reply[: end + 1]
        elif stops:
            reply = [*reply, stops[0]]
        elif reply:
            reply = reply * math.ceil(params.max_tokens / len(reply))
        else:
            raise ValueError(
                f"the reply to call {number} is empty, so its completion would have no tokens: "
                "pass stop_token_ids, or a reply of at least one token"
            )
        return reply[: params.max_tokens]

    def _versions(self, began: float, count: int) -> np.ndarray:
        """Return the versions of ``count`` tokens sampled at even intervals since ``began``."""
        with self._lock:
            now = time.monotonic()
            first = bisect_right(self._updates, began, key=itemgetter(0)) - 1
            times, versions = zip(*self._updates[first:], strict=True)
        if len(times) == 1:
            return np.full(count, versions[0])
        sampled = np.linspace(began, now, count + 1)[1:]
        served: np.ndarray = np.array(versions)[np.searchsorted(times, sampled, side="right") - 1]
        return served

    def _encode_all(self, replies: Sequence[Reply]) -> list[list[int]]:
        if isinstance(replies, str):
            raise ValueError(f"replies is the string {replies!r}; expected a list of replies")
        if len(replies) == 0:
            raise ValueError("there are no replies; pass at least one")
        return [self._encode(reply, f"replies[{i}]") for i, reply in enumerate(replies)]

    def _encode(self, reply: Any, where: str) -> list[int]:
        if isinstance(reply, str):
            if self._tokenizer is None:
                raise ValueError(f"{where} is text, {reply!r}; pass tokenizer= to encode it")
            return list(self._tokenizer.encode(reply, add_special_tokens=False))
        if not isinstance(reply, Sequence | np.ndarray):
            raise ValueError(
                f"{where} is {reply!r} ({type(reply).__name__}); expected text or token ids"
            )
        return [int(token) for token in reply]
