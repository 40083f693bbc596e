"""Calls to all vLLM servers of a fleet, other than completion requests."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from primerl.rollout.engines.contract import EngineLimits, check_completion
from primerl.serving.client.fleet import Fleet
from primerl.serving.client.http import Unreachable
from primerl.serving.client.replicas import Replica
from primerl.serving.names import COLLECTIVE_RPC, METRICS
from primerl.serving.protocol import requests, responses
from primerl.types import SamplingParams

METRICS_BYTES = 1 << 24


async def call_all(
    fleet: Fleet,
    call: Callable[[Replica], Awaitable[Any]],
    what: str,
    *,
    timeout_s: float,
    replicas: Collection[Replica] | None = None,
) -> dict[Replica, Any]:
    """Call all replicas at once, by default the live ones; those that die are left out.

    Raises:
        RuntimeError: a call failed for another reason or took too long, or no replica is left; the
            message begins with ``what``.
    """

    async def bounded(replica: Replica) -> Any:
        async with asyncio.timeout(timeout_s):
            return await call(replica)

    if replicas is None:
        replicas = await fleet.live()
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


async def call_route(
    fleet: Fleet, path: str, body: Mapping[str, Any] | None, *, timeout_s: float, max_bytes: int
) -> dict[str, Any]:
    """The decoded responses of all live replicas to a POST, by url."""
    answers = await call_all(
        fleet,
        lambda replica: fleet.http.post(replica.url, path, body, max_bytes=max_bytes),
        f"{path} failed",
        timeout_s=timeout_s,
    )
    return {replica.url: decode(answer, replica.url) for replica, answer in answers.items()}


async def read_metrics(fleet: Fleet, *, timeout_s: float) -> dict[str, dict[str, float]]:
    """The metrics of all live replicas, by url and name."""
    pages = await call_all(
        fleet,
        lambda replica: fleet.http.get(replica.url, METRICS, max_bytes=METRICS_BYTES),
        "there are no metrics",
        timeout_s=timeout_s,
    )
    return {
        replica.url: _parse_metrics(page.decode(errors="replace"))
        for replica, page in pages.items()
    }


async def probe(
    fleet: Fleet,
    sequences: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperatures: Sequence[float],
    timeout_s: float,
) -> dict[str, list[dict[str, np.ndarray]]]:
    """Each replica's scores and continuations of the sequences, by url; see ``VLLMEngine``."""

    async def one(
        replica: Replica, token_ids: Sequence[int], temperature: float
    ) -> dict[str, np.ndarray]:
        # With a fixed seed, replicas with the same weights mostly sample the same tokens.
        params = SamplingParams(max_tokens=max_new_tokens, temperature=temperature, seed=0)
        # Two requests: vLLM scores without its prefix cache, and samples with it. Of equal blocks
        # it uses the oldest: those of older weights, if any, or those that scoring computed.
        how: dict[str, Any] = {
            "salt": replica.label or "",
            "adapter": fleet.adapter_of(replica),
            "routes_start": fleet.no_routes(token_ids),
            "priority": requests.FIRST,
        }
        scored = await fleet.http.complete(
            replica.url,
            requests.score_body(token_ids, **how),
            max_bytes=responses.most_bytes(1, scored=len(token_ids)),
        )
        answer = await fleet.http.complete(
            replica.url,
            requests.generate_body(token_ids, params, **how),
            max_bytes=responses.most_bytes(max_new_tokens),
        )
        choice = answer.choices[0]
        known = responses.token_versions(choice, fleet.number, adapter=how["adapter"])
        versions = [one or 0 for one in known]
        completion = responses.make_completion(choice, versions)
        limits = EngineLimits(
            context_length=len(token_ids) + max_new_tokens,
            vocab_size=None,
            oldest=0,
            newest=max(versions, default=0),  # not known: the probe is there to find out
        )
        check_completion(completion, len(token_ids), params, limits)
        return {
            "scores": responses.prompt_scores(scored, token_ids),
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs,
        }

    async def every(replica: Replica) -> list[dict[str, np.ndarray]]:
        pairs = zip(sequences, temperatures, strict=True)
        return list(await asyncio.gather(*(one(replica, *pair) for pair in pairs)))

    numbered = [replica for replica in await fleet.live() if replica.version is not None]
    answers = await call_all(
        fleet, every, "the probe failed", timeout_s=timeout_s, replicas=numbered
    )
    return {replica.url: answer for replica, answer in answers.items()}


async def rpc(
    fleet: Fleet, replica: Replica, method: str, **arguments: Any
) -> list[dict[str, Any]]:
    """Call a method of the worker extension; one result per worker of the replica."""
    results = await rpc_results(fleet, replica, method, **arguments)
    if not all(isinstance(one, dict) for one in results):
        raise RuntimeError(f"{replica.url} answered {method} with {results!r:.200}")
    return results


async def rpc_results(fleet: Fleet, replica: Replica, method: str, **arguments: Any) -> list[Any]:
    """As ``rpc``, with results of any type."""
    body = {"method": method, "kwargs": arguments}
    answer = decode(await fleet.http.post(replica.url, COLLECTIVE_RPC, body), replica.url)
    results = answer.get("results") if isinstance(answer, dict) else None
    return results if isinstance(results, list) else []


async def agreed(fleet: Fleet, method: str, *, timeout_s: float) -> Any:
    """The result of a method of the worker extension, which must be the same on all workers.

    Raises:
        RuntimeError: the results differ, or a worker did not answer.
    """
    answers = await call_all(
        fleet,
        lambda replica: rpc_results(fleet, replica, method),
        f"{method} was not answered",
        timeout_s=timeout_s,
    )
    results = [one for results in answers.values() for one in results]
    if not results or any(one != results[0] for one in results):
        named = {replica.url: results for replica, results in answers.items()}
        raise RuntimeError(f"the servers differ in {method}: {named!r:.300}")
    return results[0]


def decode(content: bytes, where: str) -> Any:
    """Decode a JSON body; None if it is empty.

    Raises:
        RuntimeError: it is not JSON, or is nested too deeply.
    """
    return responses.decode(responses.anything, content, where) if content else None


def _parse_metrics(text: str) -> dict[str, float]:
    """Counters and gauges in Prometheus text format, by name, summed over labels."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        if not name or line.startswith("#") or name.endswith(("_bucket", "_created", "_info")):
            continue
        try:
            values[name] = values.get(name, 0.0) + float(value)
        except ValueError:
            continue  # a line of a later version of the format
    return values
