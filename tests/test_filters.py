import itertools
import json
import pickle
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from conftest import make_group, make_sample
from hypothesis import given
from hypothesis import strategies as st

from primerl import filters
from primerl.types import NOT_SAMPLED, Group, Rollout, Sample

TEXT = (
    "The weather in the north of the country was cold and wet, and the roads were full of mud. "
    "Nobody had seen the old ferryman since the harvest, although his boat still lay beside the "
    "landing with its rope made fast. Some said that he had gone to live with a daughter on the "
    "coast; others, who knew him better, were sure that he would never leave the river while he "
    "could hold an oar. In the end it was the miller's youngest boy who crossed by himself, one "
    "grey morning before anyone was awake, and found the hut empty, the fire out, and a letter on "
    "the table addressed to whoever came first. "
)
LOOP = "The weather was cold and wet. I was going to the store, and I was going to buy some food. "


def recorded(name):
    """What SmolLM2-135M said after one prompt: greedily, and at temperatures 0.8 and 2.5."""
    said = json.loads((Path(__file__).parent / "helpers/smollm2_tokens.json").read_text())[name]
    mask = np.arange(len(said["prompt"]) + len(said["tokens"])) >= len(said["prompt"])
    return Sample(
        token_ids=said["prompt"] + said["tokens"],
        loss_mask=mask,
        behavior_logprobs=[0.0] * len(said["prompt"]) + said["logprobs"],
        versions=np.where(mask, 0, NOT_SAMPLED),
    )


def sample_of(text, *, logprob=-1.0, prompt="Tell me a story:"):
    """A sample of characters; ``logprob`` is one number, or one for each."""
    tokens = [ord(letter) for letter in prompt + text]
    mask = np.arange(len(tokens)) >= len(prompt)
    logprobs = np.zeros(len(tokens))
    logprobs[mask] = logprob
    return Sample(
        token_ids=tokens,
        loss_mask=mask,
        behavior_logprobs=logprobs,
        versions=np.where(mask, 0, NOT_SAMPLED),
    )


def group_of(*samples):
    return Group(task_id="t", rollouts=[Rollout(samples=[one], reward=0.0) for one in samples])


def spread(sample, *, gap):
    """The sample with a prompt token after every ``gap`` sampled ones."""
    length = len(sample.token_ids)
    mask = sample.loss_mask & (np.arange(length) % (gap + 1) != 0)
    return Sample(
        token_ids=sample.token_ids,
        loss_mask=mask,
        behavior_logprobs=sample.behavior_logprobs,
        versions=np.where(mask, 0, NOT_SAMPLED),
    )


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [([0.0, 1.0], True), ([1.0, 1.0], False), ([0.5], False), ([], False), ([0, 0, 1e-9], True)],
)
def test_has_signal_keeps_groups_whose_rewards_differ(rewards, kept):
    assert filters.has_signal(make_group(rewards)) is kept


class TestCompleted:
    @pytest.mark.parametrize(
        ("stops", "kept"),
        [
            (["stop", "stop"], True),
            (["stop", "length"], False),
            (["context"], False),
            (["max_turns"], True),
            ([], True),
        ],
    )
    def test_by_default_replies_that_ran_out_of_room_are_cut(self, stops, kept):
        rollouts = [Rollout(samples=[], reward=0.0, stop=stop) for stop in stops]
        assert filters.completed()(Group(task_id="t", rollouts=rollouts)) is kept

    def test_the_caller_names_what_is_cut(self):
        keeps = filters.completed(cut=["max_turns"])
        for stop, kept in (("max_turns", False), ("length", True), ("max", True)):
            rollout = Rollout(samples=[], reward=0.0, stop=stop)
            assert keeps(Group(task_id="t", rollouts=[rollout])) is kept
        with pytest.raises(ValueError, match=r"cut is 'length', expected a list: \['length'\]"):
            filters.completed(cut="length")


class TestWithinTokens:
    def test_counts_all_tokens_of_a_rollout(self):
        two = Rollout(samples=[make_sample(3, 4), make_sample(2, 0)], reward=0.0)  # 7 + 2
        one = Rollout(samples=[make_sample(3, 4)], reward=0.0)
        group = Group(task_id="t", rollouts=[one, two])
        assert filters.within_tokens(max_tokens=9)(group) is True
        assert filters.within_tokens(max_tokens=8)(group) is False

    def test_nothing_is_within_any_limit(self):
        keeps = filters.within_tokens(max_tokens=1)
        assert keeps(make_group([])) is True
        assert keeps(Group(task_id="t", rollouts=[Rollout(samples=[], reward=0.0)])) is True
        with pytest.raises(ValueError, match="max_tokens is 0, expected at least 1"):
            filters.within_tokens(max_tokens=0)


class TestRewardIn:
    @pytest.mark.parametrize(
        ("rewards", "kept"),
        [
            ([0.0, 1.0], True),
            ([0.0, 0.0, 0.0, 1.0], True),  # the mean is low
            ([0.0] * 5 + [1.0], False),
            ([1.0, 1.0, 1.0, 0.0], True),  # the mean is high
            ([1.0] * 5 + [0.0], False),
            ([0.5], True),
            ([], False),
        ],
    )
    def test_keeps_means_within_both_ends(self, rewards, kept):
        assert filters.reward_in(low=0.25, high=0.75)(make_group(rewards)) is kept

    @given(st.floats(-10, 10), st.integers(1, 12))
    def test_equal_rewards_have_exactly_that_mean(self, reward, count):
        assert filters.reward_in(low=reward, high=reward)(make_group([reward] * count)) is True

    def test_the_ends_are_in_order(self):
        for low, high in ((0.8, 0.2), (float("nan"), 1.0)):
            with pytest.raises(ValueError, match=f"low is {low} and high is {high}, expected low"):
                filters.reward_in(low=low, high=high)


class TestFluent:
    @pytest.mark.parametrize(
        ("name", "criterion"),
        [("loop", {"max_repeated": 1}), ("noise", {"max_entropy": 100.0}), ("text", {})],
    )
    def test_a_real_model_that_loops_raves_or_writes(self, name, criterion):
        group = group_of(recorded("text"), recorded(name))
        assert filters.fluent()(group) is (name == "text")
        assert filters.fluent(**criterion)(group) is True  # for this reason and no other

    def test_text_is_fluent_and_a_loop_is_not(self):
        keeps = filters.fluent()
        assert keeps(group_of(sample_of(TEXT))) is True
        assert keeps(group_of(sample_of(TEXT + LOOP * 2))) is True
        assert keeps(group_of(sample_of(TEXT + LOOP * 12))) is False
        assert keeps(group_of(sample_of(TEXT), sample_of(LOOP * 12))) is False

    def test_repeating_the_prompt_is_not_a_loop(self):
        keeps = filters.fluent()
        assert keeps(group_of(sample_of(TEXT, prompt=TEXT))) is True
        assert keeps(group_of(sample_of(TEXT), sample_of(TEXT))) is True

    @given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 5), st.data())
    def test_repeated_is_the_share_of_ngrams_seen_before(self, letters, n, data):
        masked = data.draw(st.lists(st.booleans(), min_size=len(letters), max_size=len(letters)))
        ngrams = [
            tuple(letters[i : i + n]) for i in range(len(letters) - n + 1) if all(masked[i : i + n])
        ]
        share = 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
        logprobs = np.where([False, *masked], -1.0, 0.0)
        group = group_of(
            Sample(
                token_ids=[9, *letters],
                loss_mask=[False, *masked],
                behavior_logprobs=logprobs,
                versions=np.where([False, *masked], 0, NOT_SAMPLED),
            )
        )
        for limit in (0.25, 0.5, 0.75, 1.0):
            assert filters.fluent(ngram=n, max_repeated=limit)(group) is (share <= limit)

    @pytest.mark.parametrize(("period", "kept"), [(20, True), (21, False)])
    def test_ngrams_of_any_twenty_tokens_are_told_apart(self, period, kept):
        """The second half copies the first, but for a bit in one token of each period."""
        rng = np.random.default_rng(0)
        ids = rng.integers(0, 2**31 - 1, 5000)
        ids[2500:] = np.where(np.arange(2500) % period == 0, ids[:2500] ^ 1, ids[:2500])
        mask = np.arange(5000) > 0
        sample = Sample(
            token_ids=ids,
            loss_mask=mask,
            behavior_logprobs=np.where(mask, -1.0, 0.0),
            versions=np.where(mask, 0, NOT_SAMPLED),
        )
        assert filters.fluent(max_repeated=1e-9)(group_of(sample)) is kept

    @pytest.mark.parametrize(("run", "kept"), [(9, True), (10, False), (11, False)])
    def test_near_certain_tokens_in_a_row(self, run, kept):
        keeps = filters.fluent(certainty=0.9, certain_tokens=10)
        logprobs = np.full(len(TEXT), np.log(0.89))
        logprobs[50 : 50 + run] = np.log(0.91)
        assert keeps(group_of(sample_of(TEXT, logprob=logprobs))) is kept
        logprobs[54] = np.log(0.89)
        assert keeps(group_of(sample_of(TEXT, logprob=logprobs))) is True

    def test_a_single_certain_token_can_be_too_many(self):
        keeps = filters.fluent(certain_tokens=1)
        assert keeps(group_of(sample_of("ab", logprob=-0.02))) is True
        assert keeps(group_of(sample_of("ab", logprob=[-0.02, -0.001]))) is False

    def test_a_loop_of_thousands_of_certain_tokens_by_default(self):
        keeps = filters.fluent(max_repeated=1)
        assert keeps(group_of(sample_of("x" * 2999, logprob=-0.01))) is True
        assert keeps(group_of(sample_of("x" * 3000, logprob=-0.01))) is False
        assert keeps(group_of(sample_of("x" * 3000, logprob=-0.011))) is True

    def test_gibberish_is_high_entropy_over_a_window(self):
        keeps = filters.fluent(window=10, max_entropy=5.0)
        logprobs = np.full(len(TEXT), -1.0)
        logprobs[30] = -40.0  # one rare token among others: (40 + 9) / 10 nats
        assert keeps(group_of(sample_of(TEXT, logprob=logprobs))) is True
        logprobs[35] = -3.0
        assert keeps(group_of(sample_of(TEXT, logprob=logprobs))) is False
        logprobs[35] = -1.0
        logprobs[-10:] = -5.1
        assert keeps(group_of(sample_of(TEXT, logprob=logprobs))) is False

    def test_the_defaults_refuse_a_few_dozen_tokens_of_noise(self):
        logprobs = np.full(len(TEXT), -1.5)
        logprobs[100:164] = -10.0
        assert filters.fluent()(group_of(sample_of(TEXT, logprob=logprobs))) is False
        logprobs[100:132] = -1.5
        assert filters.fluent()(group_of(sample_of(TEXT, logprob=logprobs))) is True

    def test_a_prompt_or_a_tools_reply_interrupts_every_criterion(self):
        cases = [
            ("round and round we go" * 12, -1.0, {"ngram": 20}),  # 21 characters
            (TEXT, -0.001, {"certain_tokens": 20}),
            (TEXT, -9.0, {"window": 20}),
        ]
        for text, logprob, criterion in cases:
            keeps = filters.fluent(**criterion)
            sample = sample_of(text, logprob=logprob)
            assert keeps(group_of(sample)) is False
            assert keeps(group_of(spread(sample, gap=20))) is False
            assert keeps(group_of(spread(sample, gap=19))) is True

    def test_short_and_empty_groups_pass(self):
        keeps = filters.fluent(certain_tokens=50, ngram=5)
        assert keeps(make_group([])) is True
        assert keeps(group_of(make_sample(completion=0), make_sample(1, 0))) is True
        assert keeps(group_of(sample_of("aaaa", logprob=-20.0))) is True
        assert keeps(Group(task_id="t", rollouts=[Rollout(samples=[], reward=0.0)])) is True

    def test_criteria_can_be_disabled(self):
        keeps = filters.fluent(certainty=1, max_repeated=1, max_entropy=float("inf"))
        for logprob in (0.0, -30.0):
            assert keeps(group_of(sample_of("x" * 4000, logprob=logprob))) is True

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("certain_tokens", 0),
            ("ngram", 0),
            ("window", 0),
            ("certainty", 0.0),
            ("certainty", 1.01),
            ("max_repeated", 0.0),
            ("max_repeated", 1.01),
            ("max_entropy", 0.0),
            ("max_entropy", float("nan")),
        ],
    )
    def test_hyperparameters_have_a_range(self, name, value):
        with pytest.raises(ValueError, match=f"{name} is {value}, expected"):
            filters.fluent(**{name: value})


MADE = {
    "completed": filters.completed(),
    "within_tokens": filters.within_tokens(max_tokens=5),
    "reward_in": filters.reward_in(low=0.0, high=0.5),
    "fluent": filters.fluent(certain_tokens=2),
    "has_signal": filters.has_signal,
}


@pytest.mark.parametrize("name", filters.__all__)
def test_every_filter_has_its_name_also_in_another_process(name):
    keeps = MADE[name]
    crossed = pickle.loads(cloudpickle.dumps(keeps))

    assert keeps.__name__ == name
    assert crossed.__name__ == name
    groups = [make_group([]), make_group([1.0, 0.0]), make_group([1.0, 1.0])]
    groups.append(group_of(sample_of("xxxx", logprob=-0.001)))
    assert [crossed(group) for group in groups] == [keeps(group) for group in groups]
    assert len({keeps(group) for group in groups}) == (2 if name != "completed" else 1)


def test_filters_do_not_share_their_hyperparameters():
    limits = [filters.within_tokens(max_tokens=limit) for limit in (6, 7)]
    assert [keeps(make_group([0.0])) for keeps in limits] == [False, True]
    for first, second in itertools.permutations(limits):
        assert first is not second
