"""A simulated fleet: servers with a queue, a prefix cache and deaths, under a routing policy.

The routing policy, its loads and its record of prefixes are primerl's own. Prompts are chains of
numbers instead of tokens: one number for each block of 128 tokens.
"""

import heapq
import itertools
import random

import attrs

from primerl.serving.client.held_prefixes import BLOCK, HeldPrefixes
from primerl.serving.client.routing import RoutedRequest
from primerl.serving.client.servers import KnownServers, RankState

PREFILL = 10_000.0  # tokens per second of one server
DECODE = 60.0  # tokens per second of one request, on a server without others
SLOWED = 16  # with so many other requests, each is sampled half as fast


@attrs.define
class Played:
    """What was measured."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    waited_s: list = attrs.Factory(list)

    @property
    def cached(self):
        return self.cached_tokens / self.prompt_tokens


@attrs.define(eq=False)
class Session:
    """A rollout: a prompt that grows in each of several turns."""

    name: str
    blocks: list
    turns: int
    added: int  # blocks per turn
    tool_s: float


def chain(blocks, *parts):
    """Continue a prompt by the blocks that are named by ``parts``."""
    previous = blocks[-1] if blocks else 0
    found = list(blocks)
    for part in parts:
        previous = hash((previous, part))
        found.append(previous)
    return found


def sessions_of_groups(groups, *, size, shared, own, turns, added, tool_s):
    """Make rollouts of groups: all share ``shared`` blocks, each group ``own`` further ones."""
    system = chain([], *[("system", n) for n in range(shared)])
    return [
        Session(
            f"{group}-{member}",
            chain(system, *[(group, n) for n in range(own)]),
            turns,
            added,
            tool_s,
        )
        for group in range(groups)
        for member in range(size)
    ]


def play(
    policy,
    sessions,
    *,
    servers,
    at_once,
    sampled=256,
    cache_blocks=8192,
    death_every_s=None,
    down_s=60.0,
    seed=0,
):
    """Play the sessions, ``at_once`` of them at any time, and return what was measured.

    With ``death_every_s``, servers die at random times; they return with nothing cached.
    """
    draw = random.Random(seed)
    known = KnownServers([f"http://r{n}" for n in range(servers)], routing=policy)
    caches = {}
    free_at = {}  # when a server has prefilled all requests
    lives = dict.fromkeys((one.url for one in known), 0)

    def start(server):
        known.reported(server, "run-0", 0)
        server.ranks = [RankState()]
        caches[server.url] = HeldPrefixes(most=cache_blocks)
        free_at[server.url] = 0.0

    for server in known:
        start(server)
    played = Played()
    order = itertools.count()
    events = []
    later = iter(sessions)

    def at(when, what, *args):
        heapq.heappush(events, (when, next(order), what, args))

    def ask(now, session, turn, began):
        request = RoutedRequest(tokens=len(session.blocks) * BLOCK, session=session.name)
        server, _ = known.choose(request, hashes=session.blocks)
        (rank,) = server.ranks
        server.in_flight += 1
        rank.requests += 1
        rank.held.add(session.blocks)
        cached = caches[server.url].tokens(session.blocks)
        caches[server.url].add(session.blocks)
        played.prompt_tokens += request.tokens
        played.cached_tokens += cached
        prefilled = max(now, free_at[server.url]) + (request.tokens - cached) / PREFILL
        free_at[server.url] = prefilled
        done = prefilled + sampled / DECODE * (1 + server.in_flight / SLOWED)
        at(done, answer, session, turn, began, server, rank, lives[server.url])

    def answer(now, session, turn, began, server, rank, life):
        server.in_flight -= 1
        rank.requests -= 1
        if life != lives[server.url]:  # the server died meanwhile
            ask(now, session, turn, began)
            return
        played.waited_s.append(now - began)
        if turn == session.turns:
            begin(now)
            return
        parts = [(session.name, turn, n) for n in range(session.added)]
        session.blocks = chain(session.blocks, *parts)
        at(now + draw.expovariate(1 / session.tool_s), next_turn, session, turn + 1)

    def next_turn(now, session, turn):
        ask(now, session, turn, now)

    def begin(now):
        if (session := next(later, None)) is not None:
            ask(now, session, 1, now)

    def die(now):
        server = draw.choice([one for one in known if one.alive])
        lives[server.url] += 1
        known.lost(server, "killed")
        at(now + down_s, come_back, server)
        at(now + draw.expovariate(1 / death_every_s), die)

    def come_back(now, server):
        start(server)
        free_at[server.url] = now

    for _ in range(at_once):
        at(0.0, begin)
    if death_every_s is not None:
        at(draw.expovariate(1 / death_every_s), die)
    total = sum(session.turns for session in sessions)
    while len(played.waited_s) < total:
        played.seconds, _, what, args = heapq.heappop(events)
        what(played.seconds, *args)
    return played
