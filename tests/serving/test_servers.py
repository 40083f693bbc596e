"""Which server gets a request, and what version an engine of several serves."""

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from primerl.serving.client.routing import RoutedRequest
from primerl.serving.client.server_urls import ServerUrls
from primerl.serving.client.servers import KnownServers, RankState

URLS = [f"http://r{n}" for n in range(5)]
SESSIONS = [f"session-{n}" for n in range(200)]


def serving(urls=URLS, version=1):
    servers = KnownServers(urls)
    for one in servers:
        servers.reported(one, f"run-{version}", version)
    return servers


def choose(servers, session=None, **keywords):
    found = servers.choose(RoutedRequest(tokens=1, session=session), **keywords)
    return None if found is None else found[0]


def choose_rank(servers, session):
    _, rank = servers.choose(RoutedRequest(tokens=1, session=session))
    return rank


def url_of(servers, session):
    return choose(servers, session).url


def test_a_server_serves_once_it_holds_weights_of_this_run():
    servers = KnownServers(URLS[:2], version=7)
    first, second = servers
    assert choose(servers) is None
    servers.reported(first, "default", None)
    assert choose(servers) is None
    assert servers.version == 7
    assert "http://r0 is up, but its weights ('default')" in servers.describe()
    assert "http://r1 is down (not reached yet)" in servers.describe()
    servers.reported(second, "run-8", 8)
    assert choose(servers) is second
    assert servers.version == 8
    assert servers.live() == [first, second]


def test_requests_without_a_session_go_to_the_least_loaded():
    servers = serving(URLS[:3])
    a, b, c = servers
    a.in_flight, b.in_flight, c.in_flight = 4, 2, 3
    assert choose(servers) is b
    assert choose(servers, avoid={b.url}) is c
    assert choose(servers, avoid={a.url, b.url, c.url}) is b, "all are avoided: the least loaded"


def test_sessions_are_spread_evenly_and_stay():
    servers = serving()
    urls_before = {session: url_of(servers, session) for session in SESSIONS}
    counts = [list(urls_before.values()).count(url) for url in URLS]
    assert all(20 <= count <= 65 for count in counts), counts  # 40 of 200 each
    assert {session: url_of(servers, session) for session in SESSIONS} == urls_before


def test_when_a_server_leaves_only_its_own_sessions_move_and_come_back():
    servers = serving()
    before = {session: url_of(servers, session) for session in SESSIONS}
    servers.lost(servers.get(URLS[2]), "killed")
    during = {session: url_of(servers, session) for session in SESSIONS}
    assert URLS[2] not in during.values()
    assert all(during[s] == url for s, url in before.items() if url != URLS[2])
    servers.reported(servers.get(URLS[2]), "run-1", 1)
    assert {session: url_of(servers, session) for session in SESSIONS} == before
    servers.join("http://new")
    servers.reported(servers.get("http://new"), "run-1", 1)
    moved = {s for s in SESSIONS if url_of(servers, s) != before[s]}
    assert {url_of(servers, s) for s in moved} == {"http://new"}


def test_a_session_leaves_an_overloaded_server():
    servers = serving(URLS[:2])
    assigned = choose(servers, "chat")
    other = next(one for one in servers if one is not assigned)
    assigned.in_flight, other.in_flight = 4, 0  # 4 <= 0 * 1.5 + 4
    assert choose(servers, "chat") is assigned
    assigned.in_flight = 5
    assert choose(servers, "chat") is other
    other.in_flight = 4  # 5 <= 4 * 1.5 + 4
    assert choose(servers, "chat") is assigned


def test_a_session_stays_at_a_data_parallel_rank_until_that_is_overloaded():
    servers = serving(URLS[:1])
    (only,) = servers
    assert choose_rank(servers, "chat") is None, "the number of ranks is not known"
    only.ranks = [RankState()]
    assert choose_rank(servers, "chat") is None, "there is one"
    only.ranks = [RankState() for _ in range(4)]
    assert choose_rank(servers, None) is None, "the server balances other requests"
    ranks = {session: choose_rank(servers, session) for session in SESSIONS}
    counts = [list(ranks.values()).count(rank) for rank in range(4)]
    assert all(25 <= count <= 80 for count in counts), counts  # 50 of 200 each
    home = ranks["session-0"]
    only.ranks[home].requests = 4  # 4 <= 0 * 1.5 + 4
    assert choose_rank(servers, "session-0") == home
    only.ranks[home].requests = 5
    assert choose_rank(servers, "session-0") == (1 if home == 0 else 0)
    servers.lost(only, "killed")
    servers.reported(only, "run-1", 1)
    assert choose_rank(servers, "session-0") is None, "it may return with other ranks"


def test_version_is_that_of_the_slowest_and_stragglers_are_not_used():
    servers = serving(URLS[:2], version=4)
    fast, slow = servers
    servers.serves(fast, "run-8", 8)
    assert servers.version == 4, "one publication behind is used"
    assert set(servers.serving()) == {fast, slow}
    servers.serves(fast, "run-12", 12)
    assert servers.serving() == [fast], "two publications behind is not"
    assert servers.version == 12
    servers.reported(slow, "run-8", 8)
    assert servers.serving() == [fast], "12 was reported; older weights may not serve any more"
    servers.reported(slow, "run-12", 12)
    assert set(servers.serving()) == {fast, slow}


def test_a_version_learned_from_another_copy_is_a_lower_bound():
    servers = serving(URLS[:1], version=1)
    (only,) = servers
    servers.learn(2)
    assert servers.version == 2
    assert choose(servers) is None
    servers.reported(only, "run-2", 2)
    assert choose(servers) is only


def test_reports_out_of_order():
    servers = serving(URLS[:1], version=3)
    (only,) = servers
    servers.reported(only, "run-2", 2)
    assert (only.version, only.label) == (3, "run-3")
    assert servers.reported(only, "failed", None), "what is in flight there is lost"
    assert (only.version, only.label) == (None, "failed")
    assert not servers.reported(only, "failed", None)
    servers.lost(only, "killed")
    assert (only.alive, only.version) == (False, None)


def test_a_server_that_left_gets_no_requests_and_may_rejoin():
    servers = serving(URLS[:2])
    servers.leave(URLS[0])
    servers.leave("http://unknown")
    assert servers.get(URLS[0]) is None
    assert [one.url for one in servers.serving()] == URLS[1:2]
    again = servers.join(URLS[0])
    assert not again.alive
    assert servers.join(URLS[1]).alive, "who is there already stays as it is"


@given(loads=st.lists(st.integers(0, 50), min_size=1, max_size=5), session=st.text(max_size=5))
def test_no_session_overloads_its_server(loads, session):
    servers = serving(URLS[: len(loads)])
    for one, load in zip(servers, loads, strict=True):
        one.in_flight = load
    chosen = choose(servers, session)
    assert chosen.in_flight <= min(loads) * 1.5 + 4
    assert choose(servers).in_flight == min(loads)


class Fleet(RuleBasedStateMachine):
    """Servers that are updated in order, die and return; the rules that hold at any time."""

    def __init__(self):
        super().__init__()
        self.servers = KnownServers(URLS[:3])
        self.newest = 0
        self.reported = 0

    urls = st.sampled_from(URLS[:3])

    @rule(step=st.integers(1, 3))
    def publish(self, step):
        self.newest += step

    @precondition(lambda self: self.newest)
    @rule(url=urls)
    def update(self, url):
        one = self.servers.get(url)
        self.servers.reported(one, f"run-{self.newest}", self.newest)

    @rule(url=urls)
    def die(self, url):
        self.servers.lost(self.servers.get(url), "killed")

    @rule(url=urls)
    def restart(self, url):
        self.servers.reported(self.servers.get(url), "default", None)

    @invariant()
    def holds(self):
        version = self.servers.version
        assert version >= self.reported, "the version never goes back"
        self.reported = version
        serving = self.servers.serving()
        assert all(one.alive and one.version >= version for one in serving)
        assert not serving or min(one.version for one in serving) == version
        chosen = choose(self.servers, "session")
        assert (chosen is None) == (not serving)


TestFleet = Fleet.TestCase


def test_writing_the_list_of_urls_follows_no_symbolic_link(tmp_path, monkeypatch):
    """The folder may be shared; every file that is opened there is newly created."""
    precious, shared = tmp_path / "precious", tmp_path / "shared"
    precious.write_text("of the user")
    shared.mkdir()
    urls = shared / "urls.txt"
    urls.write_text("http://a\n")
    (shared / f"urls.txt.{os.getpid()}.partial").symlink_to(precious)
    opened = []
    monkeypatch.setattr("os.replace", lambda old, new: opened.append(old) or Path(old).rename(new))
    members = ServerUrls(urls)

    for url in ("http://b", "http://c"):
        members.write([url])

    assert precious.read_text() == "of the user"
    assert ServerUrls(urls).urls == ["http://c"]
    assert len(set(opened)) == 2  # no name can be foreseen
    assert urls.stat().st_mode & 0o777 == 0o600
    assert len(list(shared.iterdir())) == 2
