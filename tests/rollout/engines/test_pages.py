"""Which pages requests share, and that none is lost, shown by rules and by random requests."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl.rollout.engines.transformers.pages import (
    PAGE_TOKENS,
    PageTable,
    Prefix,
    pages_of_span,
)
from primerl.rollout.engines.transformers.scheduler import BatchedRequest, Scheduler
from primerl.rollout.engines.transformers.snapshots import SEGMENT_TOKENS, StateRows
from primerl.types import SamplingParams


def request(tokens, max_tokens=4):
    return BatchedRequest(
        tokens=list(tokens),
        prompt_length=len(tokens),
        params=SamplingParams(max_tokens=max_tokens),
        randomness=b"",
    )


class FakeModel:
    """Plays the forward pass: notes what each place in the cache holds, and checks what is read.

    With ``state_rows``, the model has recurrent states, too; with ``window``, it has layers with
    windows.
    """

    def __init__(
        self,
        *,
        pages,
        max_concurrent=8,
        max_step_tokens=64,
        seed=0,
        state_rows=0,
        window=None,
        windowed_pages=0,
    ):
        self.window = window
        self.seen = {}
        self.scheduler = Scheduler(
            PageTable(pages, window=window, windowed_pages=windowed_pages),
            max_concurrent=max_concurrent,
            max_step_tokens=max_step_tokens,
            states=StateRows(state_rows) if state_rows else None,
        )
        self.stored = {}
        self.states = {}
        self.prefixes = {}
        self.numbers = {}
        self.cuts = {}
        self.rng = random.Random(seed)
        self.weights = 0
        self.computed = 0

    def prefix(self, one, position):
        """Return a number for a request's tokens up to ``position``; equal tokens, equal number."""
        numbers = self.prefixes.setdefault(one, [0])
        for token in one.tokens[len(numbers) - 1 : position + 1]:
            key = (numbers[-1], token)
            numbers.append(self.numbers.setdefault(key, len(self.numbers) + 1))
        return numbers[position + 1]

    def step(self):
        plan = self.scheduler.plan()
        for page in plan.reallocated:
            for slot in range(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS):
                self.stored.pop(slot, None)
        for page in plan.reallocated_windows:
            for slot in range(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS):
                self.seen.pop(slot, None)
        for copy in plan.copies:
            for place in range(copy.tokens):
                value = self.stored[copy.source.index * PAGE_TOKENS + place]
                self.stored[copy.target.index * PAGE_TOKENS + place] = value
                if self.window is not None:
                    value = self.seen[copy.source.window_index * PAGE_TOKENS + place]
                    self.seen[copy.target.window_index * PAGE_TOKENS + place] = value
        self.scheduler.release_sources(plan)
        for source, target in plan.state_copies:
            self.states[target] = self.states[source]
        self.mix(plan)
        written = set()
        for chunk in plan.all_chunks:
            one = chunk.request
            self.computed += chunk.count
            for position in range(one.computed, one.computed + chunk.count):
                slot = one.slot(position)
                assert slot not in written, "two requests write to one place"
                assert slot >= PAGE_TOKENS, "page 0 is given out"
                written.add(slot)
                self.stored[slot] = (self.prefix(one, position), self.weights)
                self.see(one, position, written)
        for chunk in plan.all_chunks:
            one = chunk.request
            for position in range(one.computed + chunk.count):
                prefix, _ = self.stored[one.slot(position)]
                assert prefix == self.prefix(one, position), "a shared page has changed"
        self.check_windows(plan)
        ends = [chunk.request for chunk in plan.all_chunks if chunk.is_last]
        self.scheduler.advance(plan)
        for one in ends:
            one.tokens.append(self.rng.randrange(3))
            one.logprobs.append(0.0)
            if len(one.logprobs) == one.params.max_tokens:
                self.scheduler.finish(one)
                one.done.set_result("length")
        return plan

    def see(self, one, position, written):
        """Note what each place of layers with windows holds."""
        if self.window is None:
            assert one.pages[position // PAGE_TOKENS].window_index == 0
            return
        slot = one.window_slot(position)
        assert -slot not in written, "two requests write to one place"
        assert slot >= PAGE_TOKENS, "a token has no room in layers with windows"
        written.add(-slot)
        self.seen[slot] = self.stored[one.slot(position)]

    def check_windows(self, plan):
        """Read what the tokens of a step see in layers with windows."""
        if self.window is None:
            assert not plan.reallocated_windows
            return
        for chunk in plan.all_chunks:
            one = chunk.request
            first = max(0, one.computed + 1 - self.window)
            for position in range(first, one.computed + chunk.count):
                found = self.seen[one.window_slot(position)]
                assert found[0] == self.prefix(one, position), "a window has changed"
                assert found == self.stored[one.slot(position)], "of other weights"

    def mix(self, plan):
        """Note of which tokens, and weights, each row holds the state."""
        if self.scheduler._states is None:
            assert not plan.state_copies
            return
        rows = [chunk.request.state for chunk in plan.all_chunks]
        assert len({*rows}) == len(rows), "two requests write to one state"
        for chunk in plan.all_chunks:
            one = chunk.request
            state = self.states[one.state] if one.computed else ((), set())
            assert state[0] == tuple(one.tokens[: one.computed]), "a state is of other tokens"
            end = one.computed + chunk.count
            self.states[one.state] = (tuple(one.tokens[:end]), state[1] | {self.weights})
            self.cuts.setdefault(one, []).append(end)

    def submit(self, *requests):
        self.scheduler.waiting.extend(requests)

    def run(self):
        while self.scheduler.running or self.scheduler.waiting:
            plan = self.step()
            assert plan.all_chunks or not self.scheduler.waiting, "all wait for nothing"


def test_a_group_computes_its_prompt_once():
    model = FakeModel(pages=64, max_step_tokens=512)
    prompt = [n % 7 for n in range(100)]
    group = [request(prompt, max_tokens=1) for _ in range(8)]
    model.submit(*group)

    first, second = model.step(), model.step()

    assert [chunk.count for chunk in first.chunks] == [100]
    assert len(second.decoding) == 7
    assert [copy.tokens for copy in second.copies] == [3] * 7  # 99 tokens are 3 pages and 3 tokens
    assert model.computed == 100 + 7
    assert model.scheduler.pages.pool.used == 0


def test_a_turn_computes_only_what_is_new():
    model = FakeModel(pages=64)
    first = request(range(50), max_tokens=20)
    model.submit(first)
    model.run()
    before = model.computed

    model.submit(request([*first.tokens, 1, 2, 3], max_tokens=1))
    model.run()

    assert model.computed - before == 4  # the last token that was sampled, and three new ones


def test_a_prompt_that_is_being_computed_is_waited_for():
    model = FakeModel(pages=64, max_step_tokens=32)
    prompt = list(range(100))
    model.submit(request(prompt), request(prompt), request([5, 6]))

    assert [chunk.count for chunk in model.step().chunks] == [32]
    assert len(model.step().chunks) == 1
    model.run()

    assert model.computed < 100 + 2 + 2 * 4 + 32


def test_the_latest_request_gives_up_its_pages():
    model = FakeModel(pages=4)
    early, late = request([1] * 40, max_tokens=40), request([2] * 40, max_tokens=30)
    model.submit(early, late)
    model.step()
    while len(model.scheduler.running) == 2:
        model.step()

    assert model.scheduler.running == [early]
    model.run()
    assert len(late.logprobs) == 30


def test_a_request_that_needs_every_page_does_not_keep_one_to_copy_from():
    model = FakeModel(pages=4)
    model.submit(request([1] * 40, max_tokens=1))
    model.run()

    model.submit(request([1] * 127, max_tokens=2))
    for _ in range(4):
        model.step()

    assert not model.scheduler.running
    assert not model.scheduler.waiting


def test_the_least_recently_used_page_goes_first():
    model = FakeModel(pages=4)
    old, new = [1] * 33, [2] * 33
    for prompt in (old, new):
        model.submit(request(prompt, max_tokens=1))
        model.run()
    pages = model.scheduler.pages
    assert [len(pages.find(prompt).pages) for prompt in (old, new)] == [1, 1]

    model.submit(request([3] * 33, max_tokens=1))
    model.run()

    assert [len(pages.find(prompt).pages) for prompt in (old, new)] == [0, 1]


@pytest.mark.parametrize("recompute", [True, False])
def test_after_an_update_no_page_of_older_weights_is_found(recompute):
    model = FakeModel(pages=64, max_step_tokens=512)
    running = request([1] * 70, max_tokens=40)
    model.submit(running)
    for _ in range(5):
        model.step()
    scheduler = model.scheduler
    scheduler.recompute_all() if recompute else scheduler.forget_prefixes()
    model.weights = 1
    model.run()
    later = request([1] * 70, max_tokens=2)
    model.submit(later)
    model.step()

    found = [model.stored[later.slot(position)] for position in range(70)]
    assert {weights for _, weights in found} == {1}


def test_a_page_with_keys_of_two_versions_is_not_found():
    """Its first page is filled after an update that kept the cache."""
    model = FakeModel(pages=64, max_step_tokens=512)
    running = request([1] * 5, max_tokens=60)
    model.submit(running)
    for _ in range(5):
        model.step()
    model.scheduler.forget_prefixes()
    model.run()

    found = model.scheduler.pages.find(running.tokens)
    assert (found.pages, found.partial, found.pending) == ([], None, False)


def test_a_group_shares_the_state_at_the_last_page_end_of_its_prompt():
    model = FakeModel(pages=64, max_step_tokens=600, state_rows=16)
    group = [request([n % 7 for n in range(100)], max_tokens=2) for _ in range(8)]
    model.submit(*group)

    first, second, third = model.step(), model.step(), model.step()

    assert [chunk.count for chunk in first.chunks] == [96]
    assert [chunk.count for chunk in second.chunks] == [4] * 8
    assert len(second.state_copies) == 8  # to the snapshot, and from it to seven requests
    assert len(third.decoding) == 8
    assert not model.scheduler.running


def test_a_turn_goes_on_from_the_state_after_the_one_before():
    model = FakeModel(pages=64, max_step_tokens=600, state_rows=16)
    first = request([n % 7 for n in range(50)], max_tokens=20)
    model.submit(first)
    model.run()
    before = model.computed

    model.submit(request([*first.tokens, 1, 2, 3], max_tokens=1))
    model.run()

    assert model.computed - before == 4  # the last token that was sampled, and three new ones


def test_a_prompt_is_cut_at_the_same_tokens_whatever_is_computed_beside_it():
    prompt = [n % 7 for n in range(SEGMENT_TOKENS + 100)]
    cuts = []
    for beside in (0, 3, 7):
        model = FakeModel(pages=256, max_step_tokens=SEGMENT_TOKENS + 8, state_rows=16)
        model.submit(*(request([n] * (40 + n), max_tokens=9) for n in range(beside)))
        model.step()
        asked = request(prompt, max_tokens=1)
        model.submit(asked)
        model.run()
        cuts.append(model.cuts[asked])

    assert cuts == [[SEGMENT_TOKENS, SEGMENT_TOKENS + 96, SEGMENT_TOKENS + 100]] * 3


def test_the_least_recently_used_snapshot_goes_first():
    model = FakeModel(pages=64, max_step_tokens=600, max_concurrent=1, state_rows=3)
    prompts = [[n] * 40 for n in range(3)]
    for prompt in prompts:  # each leaves two snapshots, at a page end of the prompt and at its end
        model.submit(request(prompt, max_tokens=1))
        model.run()
    before = model.computed
    model.submit(request(prompts[2], max_tokens=1))
    model.run()
    assert model.computed - before == 8
    model.submit(request(prompts[0], max_tokens=1))
    model.run()
    assert model.computed - before == 8 + 40


@pytest.mark.parametrize("recompute", [True, False])
def test_after_an_update_no_state_of_older_weights_is_found(recompute):
    model = FakeModel(pages=64, max_step_tokens=600, state_rows=16)
    running = request([1] * 70, max_tokens=40)
    model.submit(running)
    for _ in range(5):
        model.step()
    scheduler = model.scheduler
    scheduler.recompute_all() if recompute else scheduler.forget_prefixes()
    model.weights = 1
    model.step()
    assert model.states[running.state][1] == ({1} if recompute else {0, 1})
    model.run()
    later = request([1] * 70, max_tokens=2)
    model.submit(later)
    model.step()

    assert model.states[later.state][1] == {1}


def windowed(window, *, pages=256, windowed_pages=256, **settings):
    settings = {"max_step_tokens": 64, **settings}
    return FakeModel(pages=pages, window=window, windowed_pages=windowed_pages, **settings)


@pytest.mark.parametrize("window", [1, 32, 33, 40, 100])
def test_a_window_is_all_that_a_long_request_keeps_in_layers_with_windows(window):
    model = windowed(window)
    one = request([1] * 700, max_tokens=300)
    model.submit(one)
    while len(one.logprobs) < 299:
        model.step()
        used = model.scheduler.pages.windowed_pool.used
        begun = -(-one.computed // PAGE_TOKENS)
        unseen = max(0, one.computed + 1 - window) // PAGE_TOKENS
        assert used == begun - unseen
    model.run()
    assert model.scheduler.pages.windowed_pool.used == 0


def test_a_request_longer_than_the_pool_of_windows_is_served():
    model = windowed(40, windowed_pages=pages_of_span(40) + pages_of_span(64))
    requests = [request([n] * 600, max_tokens=100) for n in (1, 2)]
    model.submit(*requests)
    model.run()
    assert [len(one.logprobs) for one in requests] == [100, 100]


def test_a_token_whose_page_has_a_window_needs_no_other():
    """The first request takes the last window; the second one goes on in its own page."""
    model = windowed(40, windowed_pages=5)
    model.submit(request([1] * 60, max_tokens=20), request([2] * 33, max_tokens=20))
    model.run()
    assert model.scheduler.preemptions == 0


def test_a_group_shares_its_prompt_beyond_the_window():
    model = windowed(40, max_step_tokens=512)
    group = [request([n % 7 for n in range(400)], max_tokens=1) for _ in range(8)]
    model.submit(*group)
    model.step()
    second = model.step()
    assert len(second.decoding) == 7
    assert model.computed == 400 + 7


def test_later_members_of_a_group_share_it_too():
    """The first one has long gone beyond the prompt; its window there was given up, and kept."""
    model = windowed(40, max_step_tokens=512)
    prompt = [n % 7 for n in range(400)]
    model.submit(request(prompt, max_tokens=300))
    for _ in range(200):
        model.step()
    before = model.computed
    model.submit(request(prompt, max_tokens=1))
    model.step()
    assert model.computed - before == 2


def test_turns_beyond_the_window_compute_only_what_is_new():
    """The conversation is much longer than the windows' pool."""
    model = windowed(40, windowed_pages=8)
    tokens = [5, 6, 7]
    for turn in range(20):
        before = model.computed
        one = request([*tokens, *([turn] * 20)], max_tokens=40)
        model.submit(one)
        model.run()
        # New in the prompt and, but for the last one, in the completion; and the last one before.
        assert model.computed - before == 20 + 39 + (1 if turn else 3)
        tokens = one.tokens
    assert len(tokens) > 7 * 4 * 40


def test_long_prompts_of_others_do_not_discard_the_window_of_a_conversation():
    model = windowed(40, windowed_pages=12)
    first = request([n % 5 for n in range(400)], max_tokens=1)
    model.submit(first)
    model.run()
    model.submit(request([7] * 3000, max_tokens=1))
    model.run()
    before = model.computed
    model.submit(request([*first.tokens, 1, 2], max_tokens=1))
    model.run()
    assert model.computed - before == 3


def test_a_conversation_whose_window_was_lost_is_computed_once_more():
    model = windowed(40, windowed_pages=8)
    first = request([n % 5 for n in range(400)], max_tokens=1)
    model.submit(first)
    model.run()
    for n in range(3):  # they take all windows
        model.submit(request([n + 6] * 300, max_tokens=1))
        model.run()
    pages = model.scheduler.pages
    assert len(pages.find(first.tokens).pages) == 12
    assert pages.shorten(pages.find(first.tokens)).pages == []

    tokens = first.tokens
    for expected in (404, 4):
        before = model.computed
        turn = request([*tokens, 1, 2, 3], max_tokens=1)
        model.submit(turn)
        model.run()
        assert model.computed - before == expected
        tokens = turn.tokens


def test_a_prefix_is_used_up_to_where_its_window_is_left():
    model = windowed(40, windowed_pages=256, max_step_tokens=512)
    prompt = [n % 7 for n in range(400)]
    model.submit(request(prompt, max_tokens=1))
    model.run()
    table = model.scheduler.pages
    found = table.find(prompt)
    table._give_up_window(found.pages[6])
    # The tokens after page 5 see pages 4 and 5; those after pages 6 and 7 also see page 6.
    assert len(table.shorten(Prefix(found.pages[:6])).pages) == 6
    assert len(table.shorten(Prefix(found.pages[:7])).pages) == 6
    assert len(table.shorten(Prefix(found.pages[:8])).pages) == 6
    assert len(table.shorten(Prefix(found.pages[:9])).pages) == 9


@pytest.mark.parametrize("recompute", [True, False])
def test_after_an_update_no_window_of_older_weights_is_found(recompute):
    model = windowed(40, max_step_tokens=512)
    running = request([1] * 170, max_tokens=90)
    model.submit(running)
    for _ in range(50):
        model.step()
    scheduler = model.scheduler
    scheduler.recompute_all() if recompute else scheduler.forget_prefixes()
    assert not scheduler.pages.windowed_pool.idle
    model.weights = 1
    model.run()
    later = request([1] * 170, max_tokens=2)
    model.submit(later)
    model.step()
    assert {model.seen[later.window_slot(n)][1] for n in range(140, 170)} == {1}


def check_no_page_is_lost(pool):
    assert pool.used == 0
    assert len({*pool.free}) == len(pool.free)
    assert len(pool.free) + len(pool.idle) == pool.size


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    stateful=st.booleans(),
    window=st.sampled_from([None, None, 1, 8, 32, 40, 100]),
)
def test_random_requests_read_only_their_own_tokens_and_leave_no_page_behind(
    data, stateful, window
):
    """Arrivals, cancellations, updates and evictions; prompts of three tokens often begin alike."""
    draw = data.draw
    pages = draw(st.integers(6, 24))
    most = draw(st.integers(1, 6))
    tokens = draw(st.sampled_from([8, 40, 100]))
    rows = most + draw(st.integers(1, 6)) if stateful else 0
    step_tokens = SEGMENT_TOKENS + tokens if stateful else tokens
    least = 0 if window is None else pages_of_span(window) + pages_of_span(step_tokens)
    windowed_pages = draw(st.integers(min(least, pages), pages)) if least else 0
    model = FakeModel(
        pages=pages,
        max_concurrent=most,
        max_step_tokens=step_tokens,
        seed=draw(st.integers(0, 9)),
        state_rows=rows,
        window=window,
        windowed_pages=windowed_pages,
    )
    rng = random.Random(draw(st.integers(0, 2**16)))
    everyone = []
    most = pages * PAGE_TOKENS
    for _ in range(draw(st.integers(5, 60))):
        action = rng.random()
        if action < 0.4:
            length = rng.randint(1, most - 1 if rng.random() < 0.1 else most // 2)
            begin = rng.choice(everyone).tokens[: rng.randint(0, 60)] if everyone else []
            tokens = (begin + [rng.randrange(3) for _ in range(length)])[:length]
            longest = most - length if rng.random() < 0.1 else min(most - length, 100)
            everyone.append(request(tokens, rng.randint(1, longest)))
            model.submit(everyone[-1])
        elif action < 0.5 and everyone:
            one = rng.choice(everyone)
            if not one.done.done():
                one.done.cancel()
                model.scheduler.finish(one)
        elif action < 0.56:
            model.weights += 1
            if rng.random() < 0.5:
                model.scheduler.recompute_all()
            else:
                model.scheduler.forget_prefixes()
        else:
            model.step()
    model.run()

    assert all(one.done.done() for one in everyone)
    table = model.scheduler.pages
    for pool in table.pools:
        check_no_page_is_lost(pool)
    assert sorted([*table.pool.free, *(page.index for page in table.pool.idle)]) == [
        *range(1, pages + 1)
    ]
    windows = [page.window_index for page in table.windowed_pool.idle]
    assert sorted([*table.windowed_pool.free, *windows]) == [*range(1, windowed_pages + 1)]
    if stateful:
        states = model.scheduler._states
        kept = [snapshot.row for snapshot in states._snapshots.values()]
        assert sorted([*states._free, *kept]) == [*range(rows)]


def test_ten_thousand_requests_leave_nothing():
    model = FakeModel(pages=32, max_step_tokens=512)
    for number in range(10_000):
        model.submit(request([number % 97, number % 89, 5], max_tokens=1))
        if number % 8 == 7:
            model.run()
    model.run()

    table = model.scheduler.pages
    known = [table._root]
    for page in known:
        known += page.children.values()
    assert len(known) <= 33


def test_all_pages_used_is_an_error():
    table = PageTable(1)
    table.allocate()
    with pytest.raises(IndexError, match="all pages"):
        table.allocate()
    assert (table.pool.used, table.pool.available) == (1, 0)


def test_only_a_complete_page_passes_its_room_in_windows_on():
    tokens = list(range(PAGE_TOKENS))
    table = PageTable(4, window=PAGE_TOKENS, windowed_pages=2)
    listed, other = table.allocate(), table.allocate()
    table.list_under(None, listed, tokens)
    listed.computed = PAGE_TOKENS  # its window was given up
    table.allocate_window(other)
    assert table.list_under(None, other, tokens) is listed
    other.computed = PAGE_TOKENS - 1
    table.release_windows([other], [listed])
    assert (listed.window_index, other.window_index) == (0, 0)
    assert table.windowed_pool.available == 2

    table.allocate_window(other)
    other.computed = PAGE_TOKENS
    room = other.window_index
    table.release_windows([other], [listed])
    assert (listed.window_index, other.window_index) == (room, 0)
    assert list(table.windowed_pool.idle) == [listed]
