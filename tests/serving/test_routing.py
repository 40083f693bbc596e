"""Routing policies, and the record of prefixes that places have probably cached."""

import asyncio
import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_vllm import ScriptedVLLM
from simulated_fleet import play, sessions_of_groups

from primerl import serving
from primerl.serving import (
    RoutedPlace,
    RoutedRequest,
    cost_aware,
    least_loaded,
    of_session,
    prefix_aware,
)
from primerl.serving.client.held_prefixes import BLOCK, HeldPrefixes, extend_hashes
from primerl.serving.client.routing import WITHOUT_PREFIXES
from primerl.serving.client.servers import KnownServers, RankState
from primerl.types import SamplingParams

POLICIES = (of_session, least_loaded, prefix_aware, cost_aware)


def place(url, rank=None, *, requests=0, **values):
    return RoutedPlace(url=url, rank=rank, server_requests=requests, requests=requests, **values)


def hashes_of(token_ids):
    found = []
    extend_hashes(found, np.asarray(token_ids, np.int32))
    return found


# ---- policies ----


def test_the_least_loaded_place_has_the_fewest_requests_and_then_tokens():
    places = [
        place("a", 0, requests=2, tokens=10),
        place("a", 1, requests=1, tokens=900),
        place("b", requests=1, tokens=800),
        place("c", requests=1, tokens=800),
    ]
    assert least_loaded(RoutedRequest(tokens=5, session="s"), places) == ("b", None)
    assert least_loaded(RoutedRequest(tokens=5), places[:2]) == ("a", 1)


def test_the_place_with_most_of_the_prompt_is_chosen_until_it_is_overloaded():
    request = RoutedRequest(tokens=1000)

    def chosen(requests):
        places = [
            place("a", requests=2, held=128),
            place("b", 3, requests=requests, held=896),
            place("c", requests=2),
        ]
        return prefix_aware(request, places)

    assert chosen(7) == ("b", 3)  # 7 <= 2 * 1.5 + 4
    assert chosen(8) == ("a", None), "the next longest prefix"
    equal = [place("a", requests=1), place("b", tokens=9), place("c", tokens=8)]
    assert prefix_aware(request, equal) == ("c", None), "nothing is cached: the least loaded"


def test_the_cost_is_the_prefill_and_the_queue():
    request = RoutedRequest(tokens=9000)

    def chosen(busy, **options):
        places = [place("a", requests=1), place("b", 2, requests=busy, held=4096)]
        return cost_aware(request, places, **options)

    assert chosen(4) == ("b", 2)  # 9000 - 4096 + 4 * 1024 < 9000 + 1024
    assert chosen(5) == ("a", None), "9000 - 4096 + 5 * 1024 is as much: fewer requests"
    assert chosen(40, request_tokens=100) == ("b", 2)  # 4904 + 4000 < 9100
    assert chosen(42, request_tokens=100) == ("a", None)  # 4904 + 4200 > 9100


def test_a_session_has_a_server_and_a_rank():
    places = [place(url, rank) for url in "ab" for rank in range(3)]
    homes = {n: of_session(RoutedRequest(tokens=1, session=str(n)), places) for n in range(60)}
    assert set(homes.values()) == {(one.url, one.rank) for one in places}
    shuffled = places[::-1]
    assert homes == {
        n: of_session(RoutedRequest(tokens=9, session=str(n)), shuffled) for n in range(60)
    }
    busy = [
        RoutedPlace(url="a", rank=0, requests=0, server_requests=3),
        RoutedPlace(url="b", rank=0, requests=2, server_requests=2),
    ]
    assert of_session(RoutedRequest(tokens=1), busy) == ("b", None), "the server chooses the rank"


values = st.builds(
    functools.partial(RoutedPlace, rank=None),
    url=st.sampled_from("abcdefgh"),
    requests=st.integers(0, 30),
    server_requests=st.integers(0, 30),
    tokens=st.integers(0, 1000),
    held=st.integers(0, 20).map(lambda blocks: blocks * BLOCK),
)
requests = st.builds(
    RoutedRequest, tokens=st.integers(0, 3000), session=st.none() | st.text(max_size=3)
)


@pytest.mark.parametrize("policy", POLICIES)
@given(request=requests, places=st.lists(values, min_size=1, unique_by=lambda one: one.url))
def test_a_policy_chooses_one_of_the_places_and_always_the_same(policy, request, places):
    chosen = policy(request, places)
    assert chosen in [(one.url, one.rank) for one in places]
    assert policy(request, tuple(places)) == chosen


@given(request=requests, places=st.lists(values, min_size=1, unique_by=lambda one: one.url))
def test_no_place_is_overloaded_and_nothing_better_is_left(request, places):
    least = min(one.requests for one in places)
    url, _ = prefix_aware(request, places)
    (chosen,) = (one for one in places if one.url == url)
    assert chosen.requests <= least * 1.5 + 4
    assert all(one.held <= chosen.held for one in places if one.requests <= least * 1.5 + 4)


# ---- prefixes ----


def test_whole_blocks_are_hashed_with_all_tokens_before_them():
    first = np.arange(3 * BLOCK + 5)
    hashes = hashes_of(first)
    assert len(hashes) == 3
    assert hashes_of(first[: 3 * BLOCK - 1]) == hashes[:2]
    other = first.copy()
    other[BLOCK] += 1
    assert [a == b for a, b in zip(hashes_of(other), hashes, strict=True)] == [True, False, False]
    grown = hashes[:1]
    extend_hashes(grown, first.astype(np.int32))
    assert grown == hashes, "only the blocks that were added are hashed"


def test_a_place_holds_the_prefixes_that_were_sent_there():
    held = HeldPrefixes()
    held.add(hashes_of(np.arange(300)))
    assert held.tokens(hashes_of(np.arange(1000))) == 256
    assert held.tokens(hashes_of(np.arange(200))) == 128
    assert held.tokens(hashes_of(np.arange(1, 1000))) == 0
    assert held.tokens([]) == 0
    held.clear()
    assert held.tokens(hashes_of(np.arange(1000))) == 0


def test_the_least_recently_sent_blocks_are_forgotten_the_last_of_a_prompt_first():
    held = HeldPrefixes(most=4)
    held.add([1, 2, 3])
    held.add([1, 2, 4])
    held.add([1, 2, 5])
    assert [held.tokens([1, 2, last]) // BLOCK for last in (3, 4, 5)] == [2, 3, 3]
    held.add([6, 7, 8, 9, 10])
    assert held.tokens([6, 7, 8, 9, 10]) == 4 * BLOCK, "the beginning of a long prompt"
    assert held.tokens([1, 2, 5]) == 0


@given(prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=30))
def test_a_block_is_held_only_with_all_blocks_before_it(prompts):
    held = HeldPrefixes(most=7)
    chains = [[hash(tuple(prompt[: end + 1])) for end in range(len(prompt))] for prompt in prompts]
    for chain in chains:
        held.add(chain)
        assert held.tokens(chain) == len(chain) * BLOCK
        assert len(held) <= 7
        for other in chains:
            singly = [held.tokens([one]) > 0 for one in other]
            assert singly == sorted(singly, reverse=True)


# ---- simulated fleets ----


def test_groups_with_a_shared_system_prompt_are_cached_best_by_prefix():
    """Of 40 blocks, 32 are shared by all and 8 by the group: at most 99% can be cached."""
    cached = {}
    for policy in POLICIES:
        sessions = sessions_of_groups(32, size=8, shared=32, own=8, turns=1, added=0, tool_s=1.0)
        cached[policy] = play(policy, sessions, servers=4, at_once=64).cached
    assert cached[prefix_aware] > 0.95
    assert cached[cost_aware] > cached[least_loaded]
    assert 0.75 < cached[least_loaded] < 0.9


def test_turns_are_cached_while_servers_die_except_by_the_least_loaded():
    cached = {}
    for policy in POLICIES:
        sessions = sessions_of_groups(8, size=4, shared=8, own=8, turns=20, added=8, tool_s=2.0)
        cached[policy] = play(policy, sessions, servers=8, at_once=32, death_every_s=60.0).cached
    assert cached[least_loaded] < 0.65
    assert cached[of_session] > 0.8
    assert min(cached[prefix_aware], cached[cost_aware]) > cached[of_session]


# ---- the servers of an engine ----


def known(*urls, **keywords):
    servers = KnownServers(urls, **keywords)
    for one in servers:
        servers.reported(one, "run-1", 1)
        one.ranks = [RankState(), RankState()]
    return servers


def test_new_weights_and_the_loss_of_a_server_clear_what_it_has_cached():
    servers = known("a", "b", routing=prefix_aware)
    a, b = servers
    hashes = hashes_of(np.arange(500))
    request = RoutedRequest(tokens=500)
    b.ranks[1].held.add(hashes)
    assert servers.choose(request, hashes=hashes) == (b, 1)
    assert servers.choose(request, hashes=hashes, avoid={"b"}) == (a, 0)
    servers.serves(b, "run-1", 1)
    assert servers.choose(request, hashes=hashes) == (b, 1), "the same weights"
    servers.serves(b, "run-2", 2)
    assert servers.choose(request, hashes=hashes) == (a, 0)
    b.ranks[1].held.add(hashes)
    servers.lost(b, "killed")
    servers.reported(b, "run-2", 2)
    assert servers.choose(request, hashes=hashes) == (a, 0)


def test_a_place_that_was_not_offered_is_refused():
    for wrong in (("c", None), ("a", 2), ("b", "0")):
        servers = known("a", "b", routing=lambda request, places, wrong=wrong: wrong)
        with pytest.raises(ValueError, match="routing policy chose the server"):
            servers.choose(RoutedRequest(tokens=1))
    servers = known("a", "b", routing=lambda request, places: ("b", None))
    server, rank = servers.choose(RoutedRequest(tokens=1))
    assert (server.url, rank) == ("b", None)


# ---- VLLMEngine ----


def test_only_policies_that_read_prefixes_need_hashes():
    assert WITHOUT_PREFIXES == (least_loaded, of_session)


def test_an_engine_asks_its_policy_once_per_request():
    """The policy sees the prompt's length, the loads, and what was sent to each rank before."""
    seen = []

    def policy(request, places):
        seen.append((request, places))
        return places[-1].url, places[-1].rank

    async def ask(engine):
        params = SamplingParams(max_tokens=2, temperature=0)
        prompt = list(range(1, 61)) * 5
        await engine.generate(prompt, params, session="s")
        await engine.generate([*prompt[:299], 9], params)
        await engine.score(prompt[:4])

    with ScriptedVLLM(ranks=2, context=512) as server:
        with serving.VLLMEngine(server.url, routing=policy) as engine:
            engine.adopt(0)
            asyncio.run(asyncio.wait_for(ask(engine), 30))
        ranks = [headers.get("x-data-parallel-rank") for headers, _ in server.sent]
    assert ranks == ["1", "1", "1"]
    assert [request for request, _ in seen] == [
        RoutedRequest(tokens=300, session="s"),
        RoutedRequest(tokens=300),
        RoutedRequest(tokens=4),
    ]
    assert [one.rank for one in seen[0][1]] == [0, 1]
    assert [[one.held for one in places] for _, places in seen] == [[0, 0], [0, 256], [0, 0]]
    assert {one.requests for _, places in seen for one in places} == {0}
    assert {one.tokens for _, places in seen for one in places} == {0}


def test_a_policy_must_be_a_function():
    with pytest.raises(ValueError, match="routing is 'prefix', expected a function"):
        serving.VLLMEngine("http://127.0.0.1:1", routing="prefix")
