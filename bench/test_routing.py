r"""Routing policies on simulated fleets: the share of prompt tokens that is cached, and the times.

    python -m pytest bench/test_routing.py -m "" --benchmark-only --benchmark-columns=median -s \
        -o addopts=--import-mode=importlib

``tests/helpers/simulated_fleet.py`` simulates the servers, with 10,000 tokens/s of prefill and room
for a million tokens in the cache of each. The policies, and what they know, are primerl's own.
"""

import functools

import numpy as np
import pytest
from simulated_fleet import play, sessions_of_groups

from primerl.serving import RoutedRequest, cost_aware, least_loaded, of_session, prefix_aware
from primerl.serving.client.servers import KnownServers, RankState
from primerl.serving.client.session_prompts import SessionPrompt

POLICIES = {
    "of_session": of_session,
    "least_loaded": least_loaded,
    "prefix_aware": prefix_aware,
    "cost_aware": cost_aware,
    "cost_aware 256": functools.partial(cost_aware, request_tokens=256),
    "cost_aware 4096": functools.partial(cost_aware, request_tokens=4096),
}


def groups():
    """Groups of 8 rollouts of one turn; all share a system prompt of 4,096 tokens."""
    sessions = sessions_of_groups(256, size=8, shared=32, own=8, turns=1, added=0, tool_s=1.0)
    return {"sessions": sessions, "servers": 16, "at_once": 256}


def turns():
    """Rollouts of 50 turns up to 52k tokens on 64 servers, of which one dies every 30 s."""
    sessions = sessions_of_groups(64, size=8, shared=16, own=8, turns=50, added=8, tool_s=4.0)
    return {"sessions": sessions, "servers": 64, "at_once": 512, "death_every_s": 30.0}


@pytest.mark.parametrize("workload", [groups, turns])
@pytest.mark.parametrize("name", POLICIES)
def test_simulated_fleet(benchmark, workload, name):
    played = benchmark.pedantic(lambda: play(POLICIES[name], **workload()), rounds=1)
    waits = np.quantile(played.waited_s, (0.5, 0.99))
    print(
        f"\n{workload.__name__:8} {name:16} cached {played.cached:6.1%}  "
        f"prefilled {(played.prompt_tokens - played.cached_tokens) / 1e6:7.2f} M tokens  "
        f"{played.seconds:6.0f} s in all, a request {waits[0]:5.1f} s (p50) {waits[1]:5.1f} s (p99)"
    )


@pytest.mark.parametrize("name", list(POLICIES)[:4])
def test_time_of_a_choice(benchmark, name):
    """A prompt of 131k tokens that grew by 300, at 64 places that hold parts of it."""
    draws = np.random.default_rng(0)
    prompt = SessionPrompt(draws.integers(0, 150_000, 1 << 17, np.int32), bytearray())
    servers = KnownServers([f"http://r{n}" for n in range(8)], routing=POLICIES[name])
    for server in servers:
        servers.reported(server, "run-0", 0)
        server.ranks = [RankState() for _ in range(8)]
        for rank in server.ranks:
            rank.held.add(prompt.hashes()[: draws.integers(0, 1024)])
    hashes = prompt.hashes() if name.endswith("aware") else []
    request = RoutedRequest(tokens=len(prompt.token_ids), session="a session")
    benchmark(lambda: servers.choose(request, hashes=hashes))
