"""Streams of tasks: their order, their shares, and resuming."""

import asyncio
import collections
import json
import pickle

import pytest
from conftest import make_group
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl import rollout
from primerl.types import Group, SamplingParams


def rows(count):
    return [{"prompt": f"p{n}"} for n in range(count)]


def ids(stream, count):
    return [stream.draw()["id"] for _ in range(count)]


class Dataset:
    """Rows as a Hugging Face dataset gives them: a fresh dict for each index."""

    def __init__(self, count):
        self.count = count
        self.read = []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError(index)
        self.read.append(index)
        return {"prompt": f"p{index}"}

    def __iter__(self):
        return (self[index] for index in range(self.count))


class Passes:
    """Iterable any number of times, without a length."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(rows(self.count))


# ---- in order, and shuffled


@pytest.mark.parametrize("kind", [rows, Dataset, Passes])
def test_in_order_repeats(kind):
    stream = rollout.InOrder(kind(3))

    assert isinstance(stream, rollout.TaskStream)
    assert ids(stream, 7) == ["0", "1", "2", "0", "1", "2", "0"]
    assert stream.draw() == {"prompt": "p1", "id": "1"}
    assert stream.state() | {"last": ""} == {"pass": 2, "index": 2, "last": ""}


def test_a_task_keeps_its_own_id_as_text_and_is_a_copy():
    row = {"id": 17, "prompt": "p"}
    stream = rollout.InOrder([row, {"id": None}])

    first = stream.draw()
    first["prompt"] = "changed"

    assert first["id"] == "17"
    assert row == {"id": 17, "prompt": "p"}
    assert stream.draw()["id"] == "1"


def test_a_generator_ends_after_its_one_pass():
    stream = rollout.InOrder(row for row in rows(2))

    assert ids(stream, 2) == ["0", "1"]
    assert [stream.draw(), stream.draw()] == [None, None]

    again = rollout.InOrder(row for row in rows(2))
    again.restore(stream.state())
    assert [again.draw(), again.draw()] == [None, None]


@pytest.mark.parametrize("kind", [list, iter])
def test_without_tasks_nothing_is_drawn(kind):
    assert rollout.InOrder(kind([])).draw() is None
    assert rollout.Shuffled(kind([]), seed=0).draw() is None
    assert rollout.DifficultyPools(kind([]), seed=0).draw() is None
    assert rollout.Mixture({"a": kind([])}).draw() is None


def test_restoring_indexed_tasks_reads_none_of_them():
    dataset = Dataset(1000)
    stream = rollout.InOrder(dataset)
    stream.restore({"pass": 5, "index": 700})

    assert stream.draw()["id"] == "700"
    assert dataset.read == [700]


@pytest.mark.parametrize(
    "make",
    [rollout.InOrder, lambda t: rollout.Shuffled(t, seed=0), lambda t: rollout.Mixture({"a": t})],
)
def test_an_invalid_task_is_named(make):
    with pytest.raises(ValueError, match=r"task 0 is 'what' \(str\); expected a mapping"):
        make(iter(["what"])).draw()  # in a list, the type checker of the tests would see it
    with pytest.raises(ValueError, match="tasks is dict; expected an iterable"):
        make({})


def test_the_place_in_tasks_that_are_no_longer_there():
    for tasks in (rows(2), Passes(2), iter(rows(2))):
        with pytest.raises(ValueError, match="after task 3 of a pass, but there are only 2"):
            rollout.InOrder(tasks).restore({"pass": 0, "index": 3})
    with pytest.raises(ValueError, match="of 3 tasks, but there are 2"):
        rollout.Shuffled(rows(2), seed=0).restore({"pass": 0, "index": 1, "tasks": 3, "seed": 0})


@pytest.mark.parametrize("kind", [list, iter])
@pytest.mark.parametrize("make", [rollout.InOrder, lambda t: rollout.Shuffled(t, seed=0)])
@pytest.mark.parametrize("drawn", [0, 1, 4])
def test_a_state_of_other_tasks_is_refused(kind, make, drawn):
    stream = make(rows(5))
    ids(stream, drawn)
    state = json.loads(json.dumps(stream.state()))
    others = [{"prompt": f"another {n}"} for n in range(5)]

    same = make(kind(rows(5)))
    same.restore(state)
    assert same.draw() == stream.draw()
    if drawn:
        shuffled = isinstance(stream, rollout.Shuffled)
        reason = "list of tasks has changed" if shuffled else "different task .*'another [0-4]'"
        with pytest.raises(ValueError, match=reason):
            make(kind(others)).restore(state)


def test_a_shuffled_stream_notices_any_edited_task_of_a_list():
    """The edited task is not the one drawn last, and their number is the same."""
    stream = rollout.Shuffled(rows(50), seed=0)
    last = int(ids(stream, 10)[-1])
    for edited in {0, 49} - {last}:
        tasks = rows(50)
        tasks[edited] = tasks[edited] | {"prompt": "edited"}
        with pytest.raises(ValueError, match="the list of tasks has changed. Resume with the same"):
            rollout.Shuffled(tasks, seed=0).restore(stream.state())
    with pytest.raises(ValueError, match="the list of tasks has changed"):
        rollout.Shuffled(rows(50)[::-1], seed=0).restore(stream.state())


def test_of_tasks_that_cannot_be_digested_the_last_is_compared():
    class Opaque:
        pass

    thing = Opaque()
    tasks = [{"prompt": f"p{n}", "thing": thing} for n in range(5)]
    for each in (tasks, Dataset(5)):
        stream = rollout.Shuffled(each, seed=0)
        ids(stream, 3)
        assert stream.state()["digests"] is None
        again = rollout.Shuffled(each, seed=0)
        again.restore(stream.state())
        assert again.draw() == stream.draw()
    with pytest.raises(ValueError, match="taken after a different task"):
        rollout.Shuffled([{"prompt": "other"}] * 5, seed=0).restore(stream.state())


def test_a_state_from_before_states_had_digests():
    stream = rollout.Shuffled(rows(5), seed=0)
    ids(stream, 3)
    state = stream.state()
    del state["digests"]
    again = rollout.Shuffled(rows(5), seed=0)
    again.restore(state)
    assert again.draw() == stream.draw()
    with pytest.raises(ValueError, match="taken after a different task"):
        rollout.Shuffled([{"prompt": "other"}] * 5, seed=0).restore(state)


def test_a_mixture_names_the_stream_whose_tasks_have_changed():
    def mixture(count):
        tasks = {"a": rows(5), "b": rows(count)}
        return rollout.Mixture({n: rollout.Shuffled(t, seed=0) for n, t in tasks.items()})

    with pytest.raises(ValueError, match="the stream 'b' of the mixture: .*list of tasks has"):
        mixture(6).restore(mixture(5).state())


STREAMS = {
    "InOrder": rollout.InOrder,
    "Shuffled": lambda tasks: rollout.Shuffled(tasks, seed=0),
    "DifficultyPools": lambda tasks: rollout.DifficultyPools(tasks, seed=0),
    "Mixture": lambda tasks: rollout.Mixture({"a": tasks}),
}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("other", [*STREAMS, None])
def test_a_state_of_another_kind_of_stream_is_refused(kind, other):
    stream = STREAMS[kind](rows(3))
    state = json.loads(json.dumps(STREAMS[other](rows(3)).state())) if other else None
    if other == kind:
        stream.restore(state)
    else:
        with pytest.raises(ValueError, match=f"does not fit a stream of the kind {kind}"):
            stream.restore(state)


def test_other_weights_or_another_seed_of_a_state():
    def mixture(a, b):
        return rollout.Mixture({"a": rows(9), "b": rows(9)}, weights={"a": a, "b": b})

    stream = mixture(9, 1)
    ids(stream, 1000)
    other = mixture(1, 1)
    other.restore(stream.state())
    drawn = [name.partition("/")[0] for name in ids(other, 100)]
    assert all(abs(drawn[:n].count("a") - n / 2) <= 1 for n in range(100))

    state = rollout.DifficultyPools(rows(3), seed=3).state()
    with pytest.raises(ValueError, match="taken with seed=3, not 4"):
        rollout.DifficultyPools(rows(3), seed=4).restore(state)


def test_shuffled_takes_every_task_once_a_pass_in_changing_orders():
    stream = rollout.Shuffled(Dataset(50), seed=3)
    passes = [ids(stream, 50) for _ in range(4)]

    assert all(sorted(map(int, order)) == list(range(50)) for order in passes)
    assert len({tuple(order) for order in passes}) == 4
    assert ids(rollout.Shuffled(iter(rows(50)), seed=3), 50) == passes[0]
    assert ids(rollout.Shuffled(rows(50), seed=4), 50) != passes[0]


# ---- mixtures


def test_a_mixture_by_hand():
    """Weights 2 and 1: a is owed 2/3 of a draw at the first, and due at 1.5; b is due at 3."""
    stream = rollout.Mixture({"a": rows(9), "b": rows(9)}, weights={"a": 2, "b": 1})

    assert ids(stream, 6) == ["a/0", "a/1", "b/0", "a/2", "a/3", "b/1"]
    assert stream.draw() == {"prompt": "p4", "id": "a/4", "environment": "a"}


def test_when_a_stream_ends_the_others_keep_their_proportions():
    stream = rollout.Mixture(
        {"a": iter(rows(2)), "b": rows(1), "c": rows(1)}, weights={"a": 2, "b": 3, "c": 1}
    )
    drawn = [task["environment"] for task in (stream.draw() for _ in range(40))]

    assert drawn.count("a") == 2
    last = collections.Counter(drawn[-32:])
    assert last == {"b": 24, "c": 8}


@given(
    weights=st.lists(st.floats(0.01, 100).map(lambda w: round(w, 3)), min_size=1, max_size=8),
    draws=st.integers(1, 300),
)
@settings(deadline=None, max_examples=40)
def test_shares_are_within_one_draw_at_every_moment(weights, draws):
    names = [f"s{n}" for n in range(len(weights))]
    stream = rollout.Mixture(
        {name: rows(1) for name in names}, weights=dict(zip(names, weights, strict=True))
    )
    counts = dict.fromkeys(names, 0)
    for n in range(1, draws + 1):
        counts[stream.draw()["environment"]] += 1
        for name, weight in zip(names, weights, strict=True):
            assert abs(counts[name] - n * weight / sum(weights)) < 1 + 1e-9


class Recorder(rollout.InOrder):
    def __init__(self, tasks):
        super().__init__(tasks)
        self.reports = []

    def report(self, task, group):
        self.reports.append((task["id"], group))


def test_reports_go_back_to_their_stream_also_through_two_mixtures():
    inner, group = Recorder([{"id": "x/y"}]), make_group()
    stream = rollout.Mixture({"all": rollout.Mixture({"math": inner})})

    task = stream.draw()
    stream.report(task, group)
    stream.report(task, None)

    assert (task["id"], task["environment"]) == ("all/math/x/y", "all")
    assert inner.reports == [("x/y", group), ("x/y", None)]
    for stranger in ("x", "math/x/y"):
        with pytest.raises(ValueError, match=f"'{stranger}' came from none of the streams"):
            stream.report({"id": stranger}, None)


@pytest.mark.parametrize(
    ("streams", "weights", "message"),
    [
        ({}, None, "no streams"),
        ({"a/b": []}, None, "'a/b' contains '/'"),
        ({"a": []}, {"b": 1.0}, r"weights are for \['b'\], the streams are \['a'\]"),
        ({"a": []}, {"a": 0.0}, "weight of 'a' is 0.0"),
        ({"a": []}, {"a": float("inf")}, "weight of 'a' is inf"),
    ],
)
def test_invalid_mixtures_are_refused(streams, weights, message):
    with pytest.raises(ValueError, match=message):
        rollout.Mixture(streams, weights=weights)


def test_a_mixture_of_other_streams_is_not_restored():
    state = rollout.Mixture({"a": rows(2)}).state()
    with pytest.raises(ValueError, match=r"has the streams \['a'\], but the mixture has \['b'\]"):
        rollout.Mixture({"b": rows(2)}).restore(state)


def test_routed_tasks_are_played_in_their_environment(fake_engine):
    def named(name):
        async def play(task, engine, params):
            return make_group(rewards=[float(len(name))]).rollouts[0]

        return play

    environment = rollout.combine_environments({"math": named("math"), "codes": named("codes")})
    params = SamplingParams(max_tokens=3)

    def play(task):
        return asyncio.run(environment(task, fake_engine, params)).reward

    assert [play({"environment": name}) for name in ("math", "codes")] == [4.0, 5.0]
    with pytest.raises(ValueError, match=r"'7' names the environment 'chess'; .*codes.*math"):
        play({"id": "7", "environment": "chess"})
    with pytest.raises(ValueError, match="names the environment ''"):
        play({"id": "7"})
    with pytest.raises(ValueError, match="no environments"):
        rollout.combine_environments({})


# ---- difficulty


def test_tasks_move_between_pools_with_their_solve_rates():
    stream = rollout.DifficultyPools(rows(3), momentum=0.5, seed=0)
    tasks = {task["id"]: task for task in (stream.draw() for _ in range(3))}
    assert list(tasks) == ["0", "1", "2"]

    stream.report(tasks["0"], make_group([1.0, 1.0]))
    stream.report(tasks["1"], make_group([0.0, 1.0]))
    stream.report(tasks["1"], make_group([0.0, 0.0]))  # 0.5 * 0.5 + 0.5 * 0
    stream.report(tasks["2"], None)
    assert stream.solve_rates() == {"0": 1.0, "1": 0.25}
    assert stream.pool_sizes() == {"unseen": 1, "easy": 1, "medium": 1, "hard": 0}

    stream.report(tasks["1"], make_group([0.0, 0.0]))  # 0.125
    stream.report(tasks["0"], make_group([1.0, 0.2]))  # 0.5 * 1 + 0.5 * 0.6 = 0.8: still easy
    stream.report(tasks["2"], Group(task_id="2", rollouts=[]))
    assert stream.pool_sizes() == {"unseen": 1, "easy": 1, "medium": 0, "hard": 1}


def test_pools_are_drawn_by_their_weights():
    weights = {"unseen": 1.0, "easy": 1.0, "medium": 6.0, "hard": 2.0}
    stream = rollout.DifficultyPools(rows(8), weights=weights, momentum=0.0, seed=1)
    rewards = [[1.0], [0.5], [0.0], None] * 2
    for task, group in [(stream.draw(), reward and make_group(reward)) for reward in rewards]:
        stream.report(task, group)

    counts = collections.Counter(int(task_id) % 4 for task_id in ids(stream, 4000))

    for kind, share in {0: 0.1, 1: 0.6, 2: 0.2, 3: 0.1}.items():
        assert abs(counts[kind] / 4000 - share) < 0.03


def test_within_a_pool_the_task_drawn_longest_ago_comes_first():
    stream = rollout.DifficultyPools(rows(4), seed=0)
    tasks = {task["id"]: task for task in (stream.draw() for _ in range(4))}
    for task_id in ("3", "1", "0", "2"):  # groups end in any order
        stream.report(tasks[task_id], make_group([0.0, 1.0]))

    assert ids(stream, 6) == ["0", "1", "2", "3", "0", "1"]
    stream.report(tasks["2"], make_group([1.0, 1.0]))  # 0.75
    stream.report(tasks["2"], make_group([1.0, 1.0]))  # 0.875: easy
    stream.report(tasks["2"], make_group([0.0, 0.0]))  # back in the middle, with its old place
    assert ids(stream, 4) == ["2", "3", "0", "1"]


def test_solve_rates_survive_a_changed_list_of_tasks():
    named = [{"id": name} for name in "abc"]
    stream = rollout.DifficultyPools(named, seed=0)
    for _ in range(3):
        task = stream.draw()
        stream.report(task, make_group([0.0, 1.0]))

    other = rollout.DifficultyPools([{"id": name} for name in "cdb"], seed=0)
    other.restore(json.loads(json.dumps(stream.state())))

    assert other.solve_rates() == {"c": 0.5, "b": 0.5}
    assert other.pool_sizes() == {"unseen": 1, "easy": 0, "medium": 2, "hard": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"easy": 0.2, "hard": 0.5}, "hard=0.5 and easy=0.2"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"weights": {"easy": 1.0}}, r"weights are for \['easy'\]"),
        ({"weights": dict.fromkeys(["unseen", "easy", "medium", "hard"], 0.0)}, "'unseen' is 0.0"),
        ({"tasks": [{"id": 1}, {"id": "1"}]}, "two tasks have the id '1'"),
        ({"tasks": [{}, 5]}, r"task 1 is 5 \(int\)"),
    ],
)
def test_invalid_curricula_are_refused(change, message):
    # A row that is no mapping goes past the type checker of the tests in an iterator.
    arguments = {"tasks": rows(2), "seed": 0} | change
    tasks = iter(arguments.pop("tasks"))
    with pytest.raises(ValueError, match=message):
        rollout.DifficultyPools(tasks, **arguments)


def test_rewards_outside_0_to_1_and_unknown_tasks_are_refused():
    stream = rollout.DifficultyPools(rows(2), seed=0)
    with pytest.raises(ValueError, match=r"rewards of task '0' are \[0.0, 2.0\].*scale"):
        stream.report(stream.draw(), make_group([0.0, 2.0]))
    with pytest.raises(ValueError, match="'9' is not one of the 2"):
        stream.report({"id": "9"}, make_group([0.0]))


def test_a_task_in_flight_that_is_removed_before_a_restore_counts_for_nothing():
    before = rollout.DifficultyPools([{"id": name} for name in "abc"], seed=0)
    in_flight = before.draw()
    after = rollout.DifficultyPools([{"id": name} for name in "bc"], seed=0)
    after.restore(before.state())
    assert in_flight["id"] == "a"
    after.report(in_flight, make_group([1.0]))
    assert after.solve_rates() == {}
    assert after.pool_sizes()["unseen"] == 2


class Slow:
    """A naive implementation of the curriculum: every draw examines every task."""

    def __init__(self, count):
        self.last = dict.fromkeys(range(count), -1)
        self.drawn = 0

    def draw(self, pool):
        index = min(pool, key=lambda index: (self.last[index], index))
        self.last[index] = self.drawn
        self.drawn += 1
        return str(index)


@pytest.mark.thorough
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_draws_agree_with_a_naive_implementation(data):
    stream, slow = rollout.DifficultyPools(rows(6), momentum=0.3, seed=0), Slow(6)
    for _ in range(40):
        if data.draw(st.booleans()):
            task = {"id": str(data.draw(st.integers(0, 5)))}
            stream.report(task, make_group([data.draw(st.sampled_from([0.0, 0.5, 1.0]))]))
        pools = collections.defaultdict(list)
        for index in range(6):
            rate = stream.solve_rates().get(str(index))
            name = (
                "unseen"
                if rate is None
                else "easy"
                if rate >= 0.8
                else "hard"
                if rate <= 0.2
                else "medium"
            )
            pools[name].append(index)
        assert stream.pool_sizes() == {name: len(pools[name]) for name in stream.pool_sizes()}
        drawn = stream.draw()["id"]
        (pool,) = [pool for pool in pools.values() if int(drawn) in pool]
        assert drawn == slow.draw(pool)


@pytest.mark.thorough
def test_all_tasks_are_visited_and_a_large_list_is_fast():
    stream = rollout.DifficultyPools(rows(20_000), seed=0)
    seen = set()
    for _ in range(20_000):
        task = stream.draw()
        seen.add(task["id"])

    assert len(seen) == 20_000
    heaps = sum(map(len, stream._heaps.values()))
    assert heaps == 20_000


# ---- resuming exactly


def streams(count):
    """A function that makes the stream anew, as a restarted process would."""
    return {
        "in order": lambda: rollout.InOrder(rows(count)),
        "passes": lambda: rollout.InOrder(Passes(count)),
        "one pass": lambda: rollout.InOrder(iter(rows(count))),
        "shuffled": lambda: rollout.Shuffled(rows(count), seed=5),
        "pools": lambda: rollout.DifficultyPools(rows(count), seed=5),
        "mixture": lambda: rollout.Mixture(
            {
                "a": iter(rows(count)),
                "b": rollout.Shuffled(rows(2), seed=1),
                "c": rollout.Mixture({"d": rollout.DifficultyPools(rows(3), seed=2), "e": rows(1)}),
            },
            weights={"a": 0.5, "b": 0.2, "c": 0.3},
        ),
    }


def play(stream, rewards, pending):
    """Draw, and report on what was drawn earlier, out of order; returns what was drawn."""
    drawn = []
    for reward in rewards:
        task = stream.draw()
        drawn.append(task)
        if task is not None:
            pending.append(task)
        if len(pending) > 2:
            earlier = pending.pop(int(reward is not None and reward > 0.5))
            stream.report(earlier, None if reward is None else make_group([reward]))
    return drawn


@pytest.mark.thorough
@pytest.mark.parametrize("kind", streams(1))
@given(
    count=st.integers(0, 7),
    rewards=st.lists(st.sampled_from([None, 0.0, 0.3, 0.6, 1.0]), max_size=30),
    cut=st.integers(0, 30),
)
@settings(deadline=None, max_examples=40)
def test_a_restored_stream_resumes_exactly(kind, count, rewards, cut):
    cut = min(cut, len(rewards))
    make = streams(count)[kind]
    stream, pending = make(), []
    play(stream, rewards[:cut], pending)
    restored, left = make(), list(pending)
    restored.restore(json.loads(json.dumps(stream.state())))

    assert restored.state() == stream.state()
    assert play(restored, rewards[cut:], left) == play(stream, rewards[cut:], pending)
    assert restored.state() == stream.state()


@given(count=st.integers(1, 20), seed=st.integers(-5, 5))
@settings(deadline=None, max_examples=30)
def test_every_task_is_drawn_in_the_first_pass(count, seed):
    every = {str(n) for n in range(count)}
    assert set(ids(rollout.InOrder(rows(count)), count)) == every
    assert set(ids(rollout.Shuffled(rows(count), seed=seed), count)) == every
    assert set(ids(rollout.DifficultyPools(rows(count), seed=seed), count)) == every


@pytest.mark.parametrize("kind", ["in order", "passes", "shuffled", "pools"])
def test_streams_can_be_pickled(kind):
    stream = streams(4)[kind]()

    copy = pickle.loads(pickle.dumps(stream))

    assert ids(copy, 9) == ids(stream, 9)
