"""Calls to several vLLM servers at once: whatever is not a request of a completion."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from primerl.rollout import vllm_wire as wire
from primerl.rollout.replicas import Replica
from primerl.rollout.vllm_fleet import Fleet
from primerl.rollout.vllm_http import Unreachable
from primerl.types import SamplingParams


async def call_all(
    fleet: Fleet,
    replicas: Sequence[Replica],
    call: Callable[[Replica], Awaitable[Any]],
    deadline: float,
    what: str,
) -> dict[Replica, Any]:
    """Call for all replicas at once; those that die are left out while others remain.

    Args:
        fleet: that the replicas are of.
        replicas: to call for.
        call: what to do for each.
        deadline: until when, by the monotonic clock.
        what: failed, for the error.

    Raises:
        RuntimeError: a call failed otherwise, or all replicas are gone.
    """

    async def bounded(replica: Replica) -> Any:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await call(replica)

    results = await asyncio.gather(*map(bounded, replicas), return_exceptions=True)
    answers: dict[Replica, Any] = {}
    failures = []
    for replica, result in zip(replicas, results, strict=True):
        if isinstance(result, Unreachable):
            fleet.lost(replica, str(result))
        elif isinstance(result, TimeoutError):
            failures.append(f"{replica.url} did not answer in time")
        elif isinstance(result, Exception):
            failures.append(str(result) or type(result).__name__)
        elif isinstance(result, BaseException):
            raise result
        else:
            answers[replica] = result
    if failures:
        raise RuntimeError(f"{what}: {'; '.join(failures)}")
    if not answers:
        raise RuntimeError(f"{what}: {fleet.replicas.describe()}")
    return answers


async def call_route(fleet: Fleet, path: str, body: bytes, timeout_s: float) -> dict[str, Any]:
    """The answers of all live replicas to a POST, decoded, by url."""
    answers = await call_all(
        fleet,
        await fleet.live(),
        lambda replica: post(fleet, replica, path, body),
        time.monotonic() + timeout_s,
        f"{path} failed",
    )
    return {replica.url: decode(answer) for replica, answer in answers.items()}


async def read_metrics(fleet: Fleet, timeout_s: float) -> dict[str, dict[str, float]]:
    """The metrics of all live replicas, by url and name."""
    pages = await call_all(
        fleet,
        await fleet.live(),
        lambda replica: fleet.http.get(replica.url, "/metrics"),
        time.monotonic() + timeout_s,
        "there are no metrics",
    )
    return {replica.url: wire.read_metrics(page.decode()) for replica, page in pages.items()}


async def probe(
    fleet: Fleet,
    sequences: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperatures: Sequence[float],
    timeout_s: float,
) -> dict[str, list[dict[str, np.ndarray]]]:
    """Each replica's scores of the sequences and its continuations of them, by url."""

    async def one(
        replica: Replica, token_ids: Sequence[int], temperature: float
    ) -> dict[str, np.ndarray]:
        # With a seed, replicas of the same weights mostly sample the same tokens.
        params = SamplingParams(max_tokens=max_new_tokens, temperature=temperature, seed=0)
        # Two requests: vLLM scores without reading its prefix cache, and what serves reads it. It
        # reads the oldest of equal blocks: those of older weights, or else what scoring computed.
        how: dict[str, Any] = {"salt": replica.label or "", "priority": wire.FIRST}
        scored = await fleet.ask(replica, wire.score_body(token_ids, **how))
        continued = await fleet.ask(replica, wire.generate_body(token_ids, params, **how))
        content = continued.choices[0].logprobs
        logprobs = [token.logprob for token in content.content] if content else []
        return {
            "scores": wire.prompt_scores(scored, token_ids),
            "token_ids": np.array(continued.choices[0].token_ids, dtype=np.int32),
            "logprobs": np.array(logprobs, dtype=np.float32),
        }

    async def every(replica: Replica) -> list[dict[str, np.ndarray]]:
        pairs = zip(sequences, temperatures, strict=True)
        return list(await asyncio.gather(*(one(replica, *pair) for pair in pairs)))

    numbered = [replica for replica in await fleet.live() if replica.version is not None]
    deadline = time.monotonic() + timeout_s
    answers = await call_all(fleet, numbered, every, deadline, "the probe failed")
    return {replica.url: answer for replica, answer in answers.items()}


async def post(fleet: Fleet, replica: Replica, path: str, body: bytes = b"") -> bytes:
    """The content of one replica's answer."""
    return await fleet.http.post(replica.url, path, body)


async def rpc(
    fleet: Fleet, replica: Replica, method: str, arguments: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The results of a method of the worker extension, one for each worker of a replica."""
    body = encode({"method": method, "kwargs": arguments})
    answer = decode(await post(fleet, replica, "/collective_rpc", body))
    results = answer.get("results") if isinstance(answer, dict) else None
    return results if isinstance(results, list) else []


def encode(value: Mapping[str, Any]) -> bytes:
    """A body of JSON."""
    return msgspec.json.encode(value)


def decode(content: bytes) -> Any:
    """What a body of JSON holds; None where it is empty.

    Raises:
        RuntimeError: it is no JSON.
    """
    try:
        return msgspec.json.decode(content) if content else None
    except msgspec.DecodeError as error:
        raise RuntimeError(f"a server answered what is no JSON: {content[:200]!r}") from error
