"""Calls to all vLLM servers of a fleet, except completion requests of rollouts."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from primerl._common.engine_usage import READ
from primerl.rollout.engines.contract import EngineLimits, check_completion
from primerl.serving.client.fleet import METRICS_BYTES, Fleet
from primerl.serving.client.http import BadResponse, Refused, ServerFailed, Unreachable
from primerl.serving.client.servers import ServerState
from primerl.serving.client.session_prompts import SessionPrompt
from primerl.serving.names import COLLECTIVE_RPC, METRICS, SERVED_CACHE_BLOCK
from primerl.serving.protocol import metrics, requests, responses
from primerl.types import SamplingParams

POLL_METRICS_S = 5.0  # timeout of a server's metrics in the background
T = TypeVar("T")


async def call_all(
    fleet: Fleet,
    call: Callable[[ServerState], Awaitable[Any]],
    what: str,
    *,
    timeout_s: float,
    servers: Collection[ServerState] | None = None,
) -> dict[ServerState, Any]:
    """Run ``call`` for all given servers concurrently, by default for the live ones.

    Servers that become unreachable are left out of the results.

    Raises:
        RuntimeError: a call failed for another reason or timed out, or no server answered. The
            message begins with ``what``.
    """

    async def bounded(server: ServerState) -> Any:
        async with asyncio.timeout(timeout_s), fleet.until_lost(server):
            return await call(server)

    if servers is None:
        servers = await fleet.live()
    results = await asyncio.gather(*map(bounded, servers), return_exceptions=True)
    answers: dict[ServerState, Any] = {}
    failures = []
    for server, result in zip(servers, results, strict=True):
        if isinstance(result, Unreachable):
            fleet.lost(server, str(result))
        elif isinstance(result, TimeoutError):
            failures.append(f"{server.url} did not answer within {round(timeout_s, 1):g} s")
        elif isinstance(result, Exception):
            failures.append(str(result) or type(result).__name__)
        elif isinstance(result, BaseException):
            raise result
        else:
            answers[server] = result
    if failures:
        raise RuntimeError(f"{what}: {'; '.join(failures)}")
    if not answers:
        raise RuntimeError(f"{what}: {fleet.servers.describe()}")
    return answers


async def call_route(
    fleet: Fleet, path: str, body: Mapping[str, Any] | None, *, timeout_s: float, max_bytes: int
) -> dict[str, Any]:
    """Send a POST to all live servers; return ``{url: decoded response}``."""
    answers = await call_all(
        fleet,
        lambda server: fleet.http.post(server.url, path, body, max_bytes=max_bytes),
        f"{path} failed",
        timeout_s=timeout_s,
    )
    return {server.url: decode(answer, server.url) for server, answer in answers.items()}


async def read_metrics(fleet: Fleet, read: Callable[[str], T], *, timeout_s: float) -> dict[str, T]:
    """Read the metrics of all live servers; return what ``read`` makes of each page, by url."""
    pages = await call_all(
        fleet,
        lambda server: fleet.http.get(server.url, METRICS, max_bytes=METRICS_BYTES),
        "the metrics could not be read",
        timeout_s=timeout_s,
    )
    return {server.url: read(page.decode(errors="replace")) for server, page in pages.items()}


async def poll_metrics(fleet: Fleet) -> dict[str, dict[int, dict[str, float]]]:
    """Read the metrics of usage of each live server that answers within a few seconds."""

    async def read(server: ServerState) -> dict[int, dict[str, float]]:
        try:
            async with asyncio.timeout(POLL_METRICS_S):
                page = await fleet.http.get(server.url, METRICS, max_bytes=METRICS_BYTES)
        except (Unreachable, Refused, ServerFailed, BadResponse, TimeoutError):
            return {}  # whether a server is lost is decided by the polls of its version
        return metrics.by_rank(page.decode(errors="replace"), names=READ)

    servers = fleet.servers.live()
    found = await asyncio.gather(*map(read, servers))
    return {server.url: ranks for server, ranks in zip(servers, found, strict=True) if ranks}


async def probe(
    fleet: Fleet,
    sequences: Sequence[np.ndarray],
    *,
    max_new_tokens: int,
    temperatures: Sequence[float],
    timeout_s: float,
) -> dict[str, list[dict[str, np.ndarray]]]:
    """Have each server score and continue the sequences; see ``VLLMEngine.probe``."""

    async def one(
        server: ServerState, token_ids: np.ndarray, temperature: float
    ) -> dict[str, np.ndarray]:
        # With a fixed seed, servers with the same weights mostly sample the same tokens.
        params = SamplingParams(max_tokens=max_new_tokens, temperature=temperature, seed=0)
        # Two requests, because vLLM scores without its prefix cache and samples with it. If several
        # cached blocks match, vLLM uses the oldest: a block that older weights computed, if there
        # is one, or else the block that scoring computed.
        how: dict[str, Any] = {
            "salt": server.label or "",
            "adapter": fleet.adapter_of(server),
            "routes_start": fleet.no_routes(token_ids),
            "priority": requests.FIRST,
        }
        prompt = SessionPrompt.alone(token_ids).for_server(server.url)
        scored, _ = await fleet.http.complete(
            server.url,
            requests.score_body(**how),
            prompt=prompt,
            max_bytes=responses.most_bytes(1, scored=len(token_ids)),
        )
        answer, _ = await fleet.http.complete(
            server.url,
            requests.generate_body(params, **how),
            prompt=prompt,
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
            newest=max(versions, default=0),  # any version is valid: the probe reports it
        )
        check_completion(completion, len(token_ids), params, limits)
        return {
            "scores": responses.prompt_scores(scored, token_ids),
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs,
        }

    async def every(server: ServerState) -> list[dict[str, np.ndarray]]:
        pairs = zip(sequences, temperatures, strict=True)
        return list(await asyncio.gather(*(one(server, *pair) for pair in pairs)))

    numbered = [server for server in await fleet.live() if server.version is not None]
    answers = await call_all(
        fleet, every, "the probe failed", timeout_s=timeout_s, servers=numbered
    )
    return {server.url: answer for server, answer in answers.items()}


async def rpc(
    fleet: Fleet, server: ServerState, method: str, **arguments: Any
) -> list[dict[str, Any]]:
    """Call a method of the worker extension; return one mapping per worker of the server."""
    results = await rpc_results(fleet, server, method, **arguments)
    if not all(isinstance(one, dict) for one in results):
        raise RuntimeError(f"{server.url} answered {method} with {results!r:.200}")
    return results


async def rpc_results(
    fleet: Fleet, server: ServerState, method: str, **arguments: Any
) -> list[Any]:
    """Call a method of the worker extension; return one result of any type per worker."""
    body = {"method": method, "kwargs": arguments}
    answer = decode(await fleet.http.post(server.url, COLLECTIVE_RPC, body), server.url)
    results = answer.get("results") if isinstance(answer, dict) else None
    return results if isinstance(results, list) else []


async def agreed(fleet: Fleet, method: str, *, timeout_s: float) -> Any:
    """Return the result of a method of the worker extension on which all workers agree.

    Raises:
        RuntimeError: the results differ, or a worker did not answer.
    """
    answers = await call_all(
        fleet,
        lambda server: rpc_results(fleet, server, method),
        f"{method} failed",
        timeout_s=timeout_s,
    )
    results = [one for results in answers.values() for one in results]
    if not results or any(one != results[0] for one in results):
        named = {server.url: results for server, results in answers.items()}
        raise RuntimeError(f"the servers' workers disagree on {method}: {named!r:.300}")
    return results[0]


async def cache_block(fleet: Fleet, *, timeout_s: float) -> int:
    """Return the number of tokens in a block of the prefix cache, the largest of all workers.

    Raises:
        RuntimeError: a worker did not answer, or answered something else.
    """
    answers = await call_all(
        fleet,
        lambda server: rpc(fleet, server, SERVED_CACHE_BLOCK),
        f"{SERVED_CACHE_BLOCK} failed",
        timeout_s=timeout_s,
    )
    found = [one.get("tokens") for workers in answers.values() for one in workers]
    known = [one for one in found if isinstance(one, int) and one > 0]
    if not known or len(known) < len(found):
        raise RuntimeError(f"the servers answered {SERVED_CACHE_BLOCK} with {found!r:.300}")
    return max(known)


def decode(content: bytes, where: str) -> Any:
    """Decode a JSON body; return None if it is empty.

    Raises:
        RuntimeError: the body is not JSON, or is nested too deeply.
    """
    return responses.decode(responses.anything, content, where) if content else None
