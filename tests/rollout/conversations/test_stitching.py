"""Stitching: the fewest samples, in which each sampled token is trained once."""

from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from primerl import advantage, packing
from primerl.rollout.conversations.calls import EngineCall, stitch
from primerl.types import Completion, Group, Rollout


def completion(tokens, *, version=0, logprob=-1.0, routes=()):
    return Completion(
        token_ids=tokens,
        logprobs=[logprob] * len(tokens),
        versions=[version] * len(tokens),
        finish_reason="length",
        routes=routes,
    )


def call(new_ids, tokens, parent=None, **options):
    return EngineCall(new_ids=new_ids, completion=completion(tokens, **options), parent=parent)


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=4)
PARENTS = st.just(-1) | st.integers(0, 11)
DRAWN = st.lists(st.tuples(st.none() | PARENTS, TOKENS, TOKENS), min_size=1, max_size=12)


def calls_of(drawn):
    """Calls of a rollout: each continues the last one, forks an earlier one, or starts anew."""
    calls = []
    for number, (parent, prompt, reply) in enumerate(drawn):
        made = completion(reply, version=number, logprob=-float(number))
        follows = calls[parent % len(calls)] if calls and parent is not None else None
        calls.append(EngineCall(new_ids=prompt, completion=made, parent=follows))
    return calls


def trained(samples):
    """Each trained token with what it follows, its logprob and its version."""
    return Counter(
        (tuple(one.token_ids[: i + 1]), float(one.behavior_logprobs[i]), int(one.versions[i]))
        for one in samples
        for i in np.flatnonzero(one.loss_mask)
    )


def sampled(calls):
    """The same of what the engine sampled."""
    return Counter(
        (
            (*call.prompt_ids, *call.completion.token_ids[: i + 1]),
            float(call.completion.logprobs[i]),
            int(call.completion.versions[i]),
        )
        for call in calls
        for i in range(len(call.completion.token_ids))
    )


@given(DRAWN)
def test_every_sampled_token_is_trained_once_after_what_the_engine_saw(drawn):
    calls = calls_of(drawn)
    samples = stitch(calls, temperature=0.5)

    assert trained(samples) == sampled(calls)
    parents = {id(one.parent) for one in calls}
    assert len(samples) == sum(id(one) not in parents for one in calls)


@given(DRAWN)
def test_what_came_between_calls_is_observed_once(drawn):
    calls = calls_of(drawn)

    observed = Counter(
        tuple(one.token_ids[: i + 1])
        for one in stitch(calls, temperature=1.0)
        if one.observation_mask is not None
        for i in np.flatnonzero(one.observation_mask)
    )

    assert observed == Counter(
        (*one.parent.token_ids, *one.new_ids[: i + 1])
        for one in calls
        if one.parent is not None
        for i in range(len(one.new_ids))
    )


def test_a_branch_observes_only_what_is_new():
    first = call([1, 2], [3])
    calls = [first, call([4, 5], [6], first), call([7], [8], first), call([1, 9], [3])]

    masks = [one.observation_mask for one in stitch(calls, temperature=1.0)]

    assert masks[0].tolist() == [False, False, False, True, True, False]
    assert masks[1].tolist() == [False, False, False, True, False]
    assert masks[2] is None  # a history that was edited is a prompt


def test_twenty_turns_are_one_sample():
    calls = [call([1, 2], [3])]
    for _ in range(19):
        calls.append(call([4, 5], [6], calls[-1]))

    (sample,) = stitch(calls, temperature=1.0)

    assert sample.token_ids.tolist() == [1, 2, 3, *[4, 5, 6] * 19]
    assert sample.loss_mask.sum() == 20


def test_a_sample_has_the_routes_of_all_its_calls():
    first = call([1], [2], routes=["a"])
    calls = [first, call([3], [4], first, routes=["b", "c"]), call([5], [6], first, routes=["d"])]

    assert [one.routes for one in stitch(calls, temperature=1.0)] == [("a", "b", "c"), ("a", "d")]


def test_a_parent_that_is_left_out_is_context():
    parent = call([1], [2])

    (sample,) = stitch([call([3], [4], parent)], temperature=1.0)

    assert sample.token_ids.tolist() == [1, 2, 3, 4]
    assert sample.loss_mask.tolist() == [False, False, False, True]


def test_a_call_that_is_listed_twice_is_refused():
    one = call([1], [2])
    with pytest.raises(ValueError, match="an engine call twice"):
        stitch([one, one], temperature=1.0)


def test_shared_prefixes_make_branches_cheap():
    """An agent of 20 turns that forks at each of the last ten: what packing has to compute."""
    calls = [call(range(50, 150), range(20))]
    for turn in range(19):
        calls.append(call(range(60), range(turn, turn + 40), calls[-1]))
    calls += [call([99], range(40), calls[-1 - back]) for back in range(1, 11)]
    samples = stitch(calls, temperature=1.0)
    group = Group(task_id="", rollouts=[Rollout(samples=samples, reward=1.0)])
    weighed = advantage.assign([group], lambda group: group.rewards)

    def rows(shared):
        packed = packing.pack(weighed, max_tokens=32_768, ranks=1, share_prefixes=shared)
        return sum(len(batch.token_ids) for steps in packed for batch in steps)

    assert len(samples) == 11
    assert sum(len(one.token_ids) for one in samples) == 17_130
    assert (rows(False), rows(True)) == (17_130, 2_430)
