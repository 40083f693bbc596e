import functools
import itertools
import json
import statistics
from fractions import Fraction

import attrs
import numpy as np
import pytest
from conftest import make_group, make_sample
from hypothesis import given
from hypothesis import strategies as st

from primerl import advantage
from primerl.types import NOT_SAMPLED, Group, Rollout, Sample, TrainingSample

ESTIMATORS = [
    advantage.centered,
    advantage.standardized,
    advantage.leave_one_out,
    advantage.max_rl,
    functools.partial(advantage.pass_at_k, k=1),
]
some_rewards = st.lists(st.floats(0, 1000).map(lambda x: round(x, 3)), min_size=1, max_size=12)
some_verdicts = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=9)


def sample_of(pattern, **fields):
    """A sample from a pattern: ``p`` a prompt token, ``c`` a sampled one, ``m`` one masked out."""
    sampled = np.array([letter != "p" for letter in pattern])
    return Sample(
        token_ids=np.arange(len(pattern)),
        loss_mask=[letter == "c" for letter in pattern],
        behavior_logprobs=np.where(sampled, -1.0, 0.0),
        versions=np.where(sampled, 0, NOT_SAMPLED),
        **fields,
    )


def group_of(*rows, environment=""):
    """A group of (agent, episode, reward)."""
    rollouts = [
        Rollout(samples=[make_sample()], reward=reward, agent=agent, episode_id=episode)
        for agent, episode, reward in rows
    ]
    return Group(task_id="task", rollouts=rollouts, environment=environment)


class TestCentered:
    def test_by_hand(self):
        values = advantage.centered(np.array([1.0, 0.0, 0.0, 1.0]))
        assert values.tolist() == [0.5, -0.5, -0.5, 0.5]
        assert advantage.centered(make_group([3.0, 1.0])).tolist() == [1.0, -1.0]
        assert advantage.centered([2.0]).tolist() == [0.0]

    @given(some_rewards)
    def test_against_the_statistics_module(self, rewards):
        mean = statistics.fmean(rewards)
        assert advantage.centered(rewards) == pytest.approx([r - mean for r in rewards], abs=1e-9)


class TestStandardized:
    def test_by_hand(self):
        values = functools.partial(advantage.standardized, epsilon=0.5)
        assert values([4.0, 0.0]).tolist() == [0.8, -0.8]  # std 2
        assert advantage.standardized([1.0, 0.0, 0.0, 1.0], epsilon=0).tolist() == [1, -1, -1, 1]

    def test_epsilon_is_one_millionth_by_default(self):
        assert advantage.standardized([4e-6, 0.0]) == pytest.approx([2 / 3, -2 / 3], rel=1e-12)

    @given(some_rewards)
    def test_against_the_statistics_module(self, rewards):
        mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
        expected = [(r - mean) / (std + 0.1) for r in rewards]
        assert advantage.standardized(rewards, epsilon=0.1) == pytest.approx(expected, abs=1e-6)

    def test_epsilon_is_not_negative(self):
        for epsilon in (-1e-9, float("nan")):
            with pytest.raises(ValueError, match=f"epsilon is {epsilon}, expected a number >= 0"):
                advantage.standardized([1.0, 0.0], epsilon=epsilon)


class TestLeaveOneOut:
    def test_by_hand(self):
        assert advantage.leave_one_out([3.0, 0.0, 0.0]).tolist() == [3.0, -1.5, -1.5]
        assert advantage.leave_one_out([7.0]).tolist() == [0.0]

    @given(some_rewards.filter(lambda rewards: len(rewards) > 1))
    def test_against_the_mean_of_the_others(self, rewards):
        expected = [
            reward - statistics.fmean(rewards[:i] + rewards[i + 1 :])
            for i, reward in enumerate(rewards)
        ]
        assert advantage.leave_one_out(rewards) == pytest.approx(expected, abs=1e-9)


class TestMaxRL:
    def test_by_hand(self):
        assert advantage.max_rl([1.0, 0.0, 0.0, 0.0]).tolist() == [3.0, -1.0, -1.0, -1.0]
        assert advantage.max_rl([0.0, 0.0]).tolist() == [0.0, 0.0]

    @given(some_verdicts)
    def test_is_the_mean_gradient_of_the_successes_alone(self, verdicts):
        """Algorithm 1: the mean score of the successes, less the mean score of all."""
        successes = sum(verdicts)
        scores = np.random.default_rng(0).normal(size=len(verdicts))
        expected = np.dot(verdicts, scores) / successes - scores.mean() if successes else 0.0
        values = advantage.max_rl(verdicts)
        assert np.dot(values, scores) / len(verdicts) == pytest.approx(expected, abs=1e-12)

    def test_negative_rewards_are_refused(self):
        with pytest.raises(ValueError, match=r"max_rl got a reward of -0.5, expected rewards >= 0"):
            advantage.max_rl([1.0, -0.5])


class TestPassAtK:
    def test_by_hand(self):
        # Of the 6 pairs of [1, 0, 0, 0], 3 hold the right one: mean 1/2, std 1/2. A wrong one is
        # in 3 pairs, of which 1 is right: (1/3 - 1/2) / (1/2).
        values = advantage.pass_at_k([1.0, 0.0, 0.0, 0.0], k=2)
        assert values == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3], abs=1e-15)

    @given(some_verdicts, st.data())
    def test_against_every_draw_of_k(self, verdicts, data):
        g = len(verdicts)
        k = data.draw(st.integers(1, g))
        draws = [
            (draw, max(verdicts[i] for i in draw)) for draw in itertools.combinations(range(g), k)
        ]
        mean = Fraction(int(sum(won for _, won in draws)), len(draws))
        std = float(mean * (1 - mean)) ** 0.5
        expected = np.zeros(g)
        for i in range(g if std else 0):
            mine = [won for draw, won in draws if i in draw]
            expected[i] = (sum(mine) / len(mine) - float(mean)) / std

        assert advantage.pass_at_k(verdicts, k=k) == pytest.approx(expected, abs=1e-12)

    @given(some_verdicts)
    def test_with_one_draw_it_is_standardized(self, verdicts):
        expected = advantage.standardized(verdicts, epsilon=0)
        assert advantage.pass_at_k(verdicts, k=1) == pytest.approx(expected, abs=1e-12)

    def test_is_zero_where_no_draw_can_fail(self):
        assert advantage.pass_at_k([1.0, 1.0, 0.0], k=2).tolist() == [0.0, 0.0, 0.0]

    def test_large_groups(self):
        values = advantage.pass_at_k([1.0] + [0.0] * 4095, k=64)
        assert np.isfinite(values).all()
        assert values.sum() == pytest.approx(0, abs=1e-9)

    def test_what_does_not_fit_is_refused(self):
        for k in (0, 3):
            with pytest.raises(ValueError, match=rf"k={k} for a group of 2 rollouts, .* <= k <= 2"):
                advantage.pass_at_k([1.0, 0.0], k=k)
        for other in (0.5, -1.0, 2.0):
            with pytest.raises(ValueError, match=f"a reward of {other}, expected 0 or 1"):
                advantage.pass_at_k([1.0, other, 0.0], k=2)
        at_least_half = advantage.of_rewards(lambda r: advantage.pass_at_k(r > 0.4, k=2))
        assert at_least_half([0.5, 0.1]).tolist() == advantage.pass_at_k([1, 0], k=2).tolist()


class TestAllEstimators:
    @pytest.mark.parametrize("estimator", ESTIMATORS)
    @pytest.mark.parametrize("rewards", [[], [0.0], [1.0], [0.0] * 5, [1.0] * 5])
    def test_degenerate_groups_get_exact_zeros(self, estimator, rewards):
        assert estimator(np.array(rewards)).tolist() == [0.0] * len(rewards)
        assert estimator(make_group(rewards)).tolist() == [0.0] * len(rewards)

    @pytest.mark.parametrize(
        "estimator", [*ESTIMATORS[:4], functools.partial(advantage.standardized, epsilon=0)]
    )
    @pytest.mark.parametrize("count", [3, 6])
    def test_equal_rewards_get_exact_zeros_although_their_mean_is_rounded(self, estimator, count):
        rewards = np.array([0.1] * count)
        assert (rewards != rewards.mean()).all()
        assert estimator(rewards).tolist() == [0.0] * count

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    @given(data=st.data())
    def test_they_sum_to_zero_and_follow_the_order_of_the_rollouts(self, estimator, data):
        verdicts = np.array(data.draw(some_verdicts))
        order = data.draw(st.permutations(range(len(verdicts))))

        values = estimator(verdicts)

        assert values.sum() == pytest.approx(0, abs=1e-9)
        assert estimator(verdicts[order]) == pytest.approx(values[order], abs=1e-12)

    @given(some_rewards, st.integers(-1000, 1000), st.floats(0.1, 10))
    def test_shifts_and_scales(self, rewards, shift, scale):
        rewards = np.array(rewards)
        for estimator in (advantage.centered, advantage.leave_one_out):
            values = estimator(rewards)
            assert estimator(rewards + shift) == pytest.approx(values, abs=1e-8)
            assert estimator(rewards * scale) == pytest.approx(values * scale, abs=1e-8)
        apart = rewards.max() - rewards.min() > 0
        standardized = functools.partial(advantage.standardized, epsilon=0)
        if apart:  # where they differ, they do so by 0.001 or more
            values = standardized(rewards)
            assert standardized(rewards + shift) == pytest.approx(values, abs=1e-6)
            assert standardized(rewards * scale) == pytest.approx(values, abs=1e-6)
            assert values.std() == pytest.approx(1)
        assert advantage.max_rl(rewards * scale) == pytest.approx(advantage.max_rl(rewards))

    @given(some_rewards)
    def test_they_prefer_the_better_rollout(self, rewards):
        order = np.argsort(rewards, kind="stable")
        for estimator in ESTIMATORS[:4]:
            assert (np.diff(estimator(rewards)[order]) >= 0).all()


class TestOfRewards:
    def test_a_lambda_on_rewards_can_be_lifted(self):
        scaled = advantage.of_rewards(lambda rewards: 2 * rewards)

        (a, b) = advantage.assign([make_group([1.0, 0.0])], scaled)

        assert a.advantages[-1] == 2.0
        assert b.advantages[-1] == 0.0

    def test_hyperparameters_are_passed_on_and_kept_in_the_signature(self):
        @advantage.of_rewards
        def times(rewards, *, factor):
            """Scaled."""
            return (rewards * factor).tolist()

        assert times([1, 2], factor=3).tolist() == [3.0, 6.0]
        assert times.__name__ == "times"
        assert times.__doc__ == "Scaled."
        with pytest.raises(TypeError, match="factor"):
            times([1, 2])

    def test_a_lifted_partial_keeps_its_name(self):
        lifted = advantage.of_rewards(functools.partial(advantage.standardized, epsilon=0.5))
        assert lifted.__name__ == "standardized(epsilon=0.5)"
        assert lifted([4.0, 0.0]).tolist() == [0.8, -0.8]

    def test_rewards_have_one_axis(self):
        for rewards, shape in ((1.0, r"\(\)"), ([[1.0, 0.0]], r"\(1, 2\)")):
            with pytest.raises(ValueError, match=f"centered got rewards of shape {shape}"):
                advantage.centered(rewards)


class TestPenalized:
    group = Group(
        task_id="task",
        rollouts=[
            Rollout(samples=[sample_of("ppcc"), sample_of("pcpc")], reward=1.0),  # 4, 4, 3
            Rollout(samples=[sample_of("ppppcc")], reward=1.0),  # 2, 4, 1
            Rollout(samples=[sample_of("pc")], reward=0.0),  # 1, 1, 1
            Rollout(samples=[], reward=0.0),
        ],
    )

    @pytest.mark.parametrize(
        ("weights", "price"),
        [
            ({}, [0, 0, 0, 0]),
            ({"completion_tokens": 0.4}, [0.2, 0.1, 0.05, 0]),
            ({"prompt_tokens": 0.4}, [0.2, 0.2, 0.05, 0]),
            ({"turns": 0.6}, [0.3, 0.1, 0.1, 0]),
            ({"turns": 0.6, "completion_tokens": 0.4}, [0.5, 0.2, 0.15, 0]),
        ],
    )
    def test_by_hand(self, weights, price):
        def rewards(group):
            return group.rewards

        paid = advantage.penalized(self.group, baseline=rewards, **weights)
        values = advantage.penalized(self.group, **weights)

        expected = np.array([1, 1, 0, 0]) - price
        assert paid == pytest.approx(expected, abs=1e-12)
        assert values == pytest.approx(expected - expected.mean(), abs=1e-12)

    def test_a_token_masked_out_because_it_is_old_still_counts(self):
        rollouts = [
            Rollout(samples=[sample_of(pattern)], reward=1.0)
            for pattern in ("pmmcc", "pcccc", "pmccc")
        ]
        group = Group(task_id="t", rollouts=rollouts)
        values = advantage.penalized(group, completion_tokens=1.0, turns=1.0)
        assert values.tolist() == [0.0] * 3

    def test_a_sample_without_a_prompt_begins_with_a_turn(self):
        samples = [sample_of("mccpc"), sample_of("pcppc")]
        group = Group(task_id="t", rollouts=[Rollout(samples=[one], reward=1.0) for one in samples])
        assert advantage.penalized(group, turns=1.0).tolist() == [0.0, 0.0]

    @pytest.mark.parametrize("reward", [0.0, -1.0])
    def test_a_group_that_failed_is_not_penalized(self, reward):
        group = attrs.evolve(
            self.group,
            rollouts=[attrs.evolve(one, reward=reward) for one in self.group.rollouts],
        )
        assert advantage.penalized(group, completion_tokens=1.0).tolist() == [0.0] * 4

    def test_groups_without_rollouts_or_tokens(self):
        weights = {"completion_tokens": 1.0, "prompt_tokens": 1.0, "turns": 1.0}
        assert advantage.penalized(make_group([]), **weights).tolist() == []
        silent = Group(task_id="t", rollouts=[Rollout(samples=[], reward=r) for r in (1.0, 0.0)])
        assert advantage.penalized(silent, **weights).tolist() == [0.5, -0.5]

    def test_weights_are_not_negative(self):
        for name in ("completion_tokens", "prompt_tokens", "turns"):
            with pytest.raises(ValueError, match=f"{name} is -0.1, expected a weight >= 0"):
                advantage.penalized(self.group, **{name: -0.1})

    def test_any_estimator_can_be_the_baseline(self):
        inner = functools.partial(advantage.hierarchical, inner_agents=["solver"])
        group = group_of(("solver", "a", 1.0), ("solver", "a", 0.0), ("solver", "b", 1.0))
        values = advantage.penalized(group, baseline=inner, completion_tokens=0.5)
        assert values == pytest.approx([0.5, -0.5, 0], abs=1e-12)


class TestHierarchical:
    group = group_of(
        ("proposer", "a", 1.0),
        ("solver", "a", 1.0),
        ("solver", "a", 0.0),
        ("proposer", "b", 0.0),
        ("solver", "b", 5.0),
        ("solver", "b", 2.0),
        ("judge", "b", 9.0),
        ("solver", "c", 7.0),
    )

    def test_by_hand(self):
        values = advantage.hierarchical(self.group, inner_agents=["solver"])
        assert values.tolist() == [0.5, 0.5, -0.5, -0.5, 1.5, -1.5, 0.0, 0.0]

    def test_without_inner_agents_each_agent_is_compared_across_the_group(self):
        values = advantage.hierarchical(self.group, inner_agents=[])
        assert values.tolist() == [0.5, -2.0, -3.0, -0.5, 2.0, -1.0, 0.0, 4.0]

    def test_another_baseline(self):
        standardized = functools.partial(advantage.standardized, epsilon=0)
        values = advantage.hierarchical(self.group, inner_agents={"solver"}, baseline=standardized)
        assert values.tolist() == [1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 0.0, 0.0]

    def test_what_cannot_be_compared_is_refused(self):
        with pytest.raises(ValueError, match=r"inner_agents is 'solver', expected .*\['solver'\]"):
            advantage.hierarchical(self.group, inner_agents="solver")
        with pytest.raises(ValueError, match="task 'task': .* inner agent 'solver' has no episode"):
            advantage.hierarchical(group_of(("solver", "", 1.0)), inner_agents=["solver"])
        assert advantage.hierarchical(make_group([1, 0]), inner_agents=["x"]).tolist() == [
            0.5,
            -0.5,
        ]
        assert advantage.hierarchical(make_group([]), inner_agents=["x"]).tolist() == []


class TestAgentBaselines:
    def test_by_hand(self):
        estimator = advantage.AgentBaselines(decay=0.5)
        chess = group_of(("white", "a", 1.0), ("black", "a", -1.0), ("white", "b", 1.0))

        assert estimator(attrs.evolve(chess, environment="chess")).tolist() == [1.0, -1.0, 0.5]
        assert estimator(attrs.evolve(chess, environment="go")).tolist() == [1.0, -1.0, 0.5]
        assert estimator(attrs.evolve(chess, environment="chess")).tolist() == [0.25, -0.5, 0.125]
        assert estimator.state() == {
            "baselines": [
                ["chess", "black", -0.75],
                ["chess", "white", 0.9375],
                ["go", "black", -0.5],
                ["go", "white", 0.75],
            ]
        }

    def test_the_paper_scales_them_by_the_decay(self):
        """Equation 2 updates the baseline first: ``A = R - (decay b + (1 - decay) R)``."""
        rewards = [1.0, 0.0, 1.0, 1.0]
        ours = advantage.AgentBaselines()(make_group(rewards))
        baseline, theirs = 0.0, []
        for reward in rewards:
            baseline = 0.95 * baseline + 0.05 * reward
            theirs.append(reward - baseline)
        assert theirs == pytest.approx(0.95 * ours, abs=1e-15)

    @given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(-9, 9)), max_size=20), st.data())
    def test_a_resumed_run_continues_exactly(self, played, data):
        cut = data.draw(st.integers(0, len(played)))
        groups = [group_of((agent, "", reward), environment=agent) for agent, reward in played]
        whole, first, second = (advantage.AgentBaselines(decay=0.9) for _ in range(3))
        second(make_group([5.0]))  # forgotten

        expected = [whole(group).tolist() for group in groups]
        values = [first(group).tolist() for group in groups[:cut]]
        second.restore(json.loads(json.dumps(first.state())))
        values += [second(group).tolist() for group in groups[cut:]]

        assert values == expected
        assert second.state() == whole.state()

    def test_it_is_an_estimator_with_a_name(self):
        estimator = advantage.AgentBaselines()
        assert estimator(make_group([])).tolist() == []
        (sample,) = advantage.assign([make_group([2.0])], estimator)
        assert sample.advantages[-1] == 2.0
        assert repr(estimator) == "AgentBaselines(decay=0.95)"
        for decay in (-0.1, 1.1):
            with pytest.raises(ValueError, match=f"decay is {decay}, expected a number within"):
                advantage.AgentBaselines(decay=decay)


class TestAssign:
    def test_gives_a_rollouts_value_to_its_trained_tokens_only(self):
        (good, bad) = advantage.assign([make_group([1.0, 0.0])], advantage.centered)

        assert good.advantages.tolist() == [0, 0, 0, 0.5, 0.5, 0.5, 0.5]
        assert bad.advantages.tolist() == [0, 0, 0, -0.5, -0.5, -0.5, -0.5]
        assert good.versions.tolist() == make_sample().versions.tolist()

    def test_keeps_every_field_of_the_sample(self):
        sample = make_sample(temperature=0.7, routes="file:routes")
        group = Group(task_id="t", rollouts=[Rollout(samples=[sample], reward=1.0)])

        (assigned,) = advantage.assign([group], lambda group: [2.0])

        assert assigned.temperature == 0.7
        assert assigned.routes == ("file:routes",)
        assert assigned.behavior_logprobs.tolist() == sample.behavior_logprobs.tolist()

    def test_takes_per_token_values(self):
        group = make_group([1.0, 0.0])
        values = [[np.arange(7)], [-np.arange(7)]]

        (first, second) = advantage.assign([group], lambda group: values)

        assert first.advantages.tolist() == [0, 0, 0, 3, 4, 5, 6]
        assert second.advantages.tolist() == [0, 0, 0, -3, -4, -5, -6]

    def test_covers_rollouts_of_several_samples_and_leaves_out_untrained_ones(self):
        untrained = make_sample(prompt=4, completion=0)
        rollout = Rollout(samples=[make_sample(), untrained, make_sample(completion=1)], reward=1.0)
        group = Group(task_id="t", rollouts=[rollout])

        samples = advantage.assign([group], lambda group: [1.5])
        each = advantage.assign([group], lambda group: [[1.0, np.nan, 2.0]])

        assert [len(sample.token_ids) for sample in samples] == [7, 4]
        assert samples[1].advantages.tolist() == [0, 0, 0, 1.5]
        assert [sample.advantages[-1] for sample in each] == [1.0, 2.0]

    def test_takes_arrays_of_different_lengths_for_the_samples_of_a_rollout(self):
        rollout = Rollout(samples=[make_sample(1, 2), make_sample(1, 1)], reward=1.0)
        values = [[np.array([0.0, 1.0, 2.0]), np.array([0.0, 3.0])]]
        samples = advantage.assign([Group(task_id="t", rollouts=[rollout])], lambda group: values)
        assert [sample.advantages.tolist() for sample in samples] == [[0, 1, 2], [0, 3]]

    def test_a_rollout_without_a_trained_token_counts_in_its_group(self):
        silent = Rollout(samples=[make_sample(completion=0)], reward=1.0)
        spoken = Rollout(samples=[make_sample()], reward=0.0)
        group = Group(task_id="t", rollouts=[silent, spoken])

        (sample,) = advantage.assign([group], advantage.centered)

        assert sample.advantages[-1] == -0.5

    @pytest.mark.parametrize(
        "estimator",
        [
            *ESTIMATORS,
            functools.partial(advantage.penalized, turns=0.1),
            functools.partial(advantage.hierarchical, inner_agents=["solver"]),
            advantage.AgentBaselines(),
        ],
    )
    def test_every_estimator_goes_through(self, estimator):
        samples = advantage.assign([make_group([1.0, 0.0]), make_group([])], estimator)
        assert [np.sign(sample.advantages[-1]) for sample in samples] == [1, -1]

    def test_an_estimator_that_returns_the_wrong_number_is_named(self):
        def three(group):
            return [1.0, 2.0, 3.0]

        with pytest.raises(ValueError, match="task 'x', three returned 3 values for 2 rollouts"):
            advantage.assign([make_group(task_id="x")], three)
        with pytest.raises(ValueError, match="returned 2 arrays for a rollout of 1 samples"):
            advantage.assign([make_group()], lambda group: [[[1.0], [2.0]], [[1.0], [2.0]]])
        for shape in (1, 6, 8):
            with pytest.raises(ValueError, match=rf"shape \({shape},\) for a sample of .*\(7,\)"):
                advantage.assign([make_group()], lambda group: [[np.ones(shape)]] * 2)  # noqa: B023

    def test_an_empty_estimate_of_an_empty_group(self):
        assert advantage.assign([make_group([])], advantage.centered) == []
        assert advantage.assign([], advantage.centered) == []

    @pytest.mark.parametrize(
        "bad", [np.nan, np.inf, -np.inf, 1e39, [np.array([0.0] * 6 + [np.nan])]]
    )
    def test_a_value_that_is_not_finite_is_refused(self, bad):
        def estimate(group, *, scale, baseline):
            return [bad, 1.0]

        partial = functools.partial(estimate, scale=2, baseline=advantage.centered)
        name = r"task 'sums', estimate\(scale=2, baseline=centered\) returned -?(nan|inf|1e\+39)"
        with pytest.raises(ValueError, match=f"{name} .* not finite in float32"):
            advantage.assign([make_group(task_id="sums")], partial)

    def test_what_is_not_trained_may_be_anything(self):
        values = np.array([np.nan, np.inf, 1e300, 1, 1, 1, 3.4e38])
        (sample,) = advantage.assign([make_group([1.0])], lambda group: [[values]])
        assert sample.advantages[:4].tolist() == [0, 0, 0, 1]


class TestWhitened:
    def test_by_hand(self):
        groups = [make_group([2.0, 0.0])]
        samples = advantage.assign(groups, lambda group: group.rewards)
        (good, bad) = advantage.whitened(samples, epsilon=1.0)
        assert good.advantages.tolist() == [0, 0, 0, 0.5, 0.5, 0.5, 0.5]
        assert bad.advantages.tolist() == [0, 0, 0, -0.5, -0.5, -0.5, -0.5]

    @given(st.lists(st.tuples(st.integers(0, 5), st.integers(-50, 50)), max_size=6))
    def test_against_the_statistics_module(self, rows):
        samples = []
        for index, (completion, value) in enumerate(rows):
            values = np.where(
                np.arange(3 + completion) < 3, 99.0, value + np.arange(3 + completion)
            )
            samples.append(
                make_sample(
                    completion=completion,
                    kind=TrainingSample,
                    advantages=values,
                    seed=index,
                    ref_logprobs=values - 1,
                    weights=values,
                )
            )
        tokens = [float(x) for sample in samples for x in sample.advantages[sample.loss_mask]]

        white = advantage.whitened(iter(samples), epsilon=0)

        assert [s.token_ids.tolist() for s in white] == [s.token_ids.tolist() for s in samples]
        for before, after in zip(samples, white, strict=True):
            assert after.weights.tolist() == before.weights.tolist()
            assert after.ref_logprobs.tolist() == before.ref_logprobs.tolist()
            assert not after.advantages[~after.loss_mask].any()
        if len(set(tokens)) > 1:
            mean, std = statistics.fmean(tokens), statistics.pstdev(tokens)
            expected = [(x - mean) / std for x in tokens]
            got = [float(x) for sample in white for x in sample.advantages[sample.loss_mask]]
            assert got == pytest.approx(expected, abs=1e-5)

    def test_equal_advantages_become_zero(self):
        samples = advantage.assign([make_group([0.1] * 3)], lambda group: group.rewards)
        assert not any(s.advantages.any() for s in advantage.whitened(samples))
        assert advantage.whitened([]) == []

    def test_centered_then_whitened_is_the_baseline_form_of_reinforce_plus_plus(self):
        groups = [make_group([1.0, 0.0]), make_group([9.0, 9.0]), make_group([4.0, 0.0])]
        samples = advantage.whitened(advantage.assign(groups, advantage.centered))
        std = statistics.pstdev([0.5, -0.5, 0, 0, 2, -2])
        expected = [0.5 / std, -0.5 / std, 0, 0, 2 / std, -2 / std]
        assert [s.advantages[-1] for s in samples] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("estimator", [advantage.centered, advantage.max_rl])
def test_a_reward_that_is_not_finite_is_refused(estimator, bad):
    with pytest.raises(ValueError, match=rf"rewards\[1\] is {bad}, expected a finite number"):
        estimator([1.0, bad])
    assert len(estimator(rewards=[1.0, 0.0])) == 2


@pytest.mark.parametrize("decay", [0, 1, 0.5])
def test_a_decay_may_be_at_its_bounds(decay):
    baselines = advantage.AgentBaselines(decay=decay)
    group = group_of(("a", "e", 1.0), ("a", "e", 1.0))

    assert baselines(group).tolist() == [1.0, 1.0 - (1 - decay)]
    with pytest.raises(TypeError):
        advantage.AgentBaselines(decay=decay, baselines={})


def test_one_token_of_completion_is_the_whole_share():
    short = make_sample(prompt=3, completion=1)
    rollouts = [Rollout(samples=[short], reward=1.0), Rollout(samples=[short], reward=0.0)]
    group = Group(task_id="task", rollouts=rollouts)

    paid = advantage.penalized(
        group, baseline=advantage.of_rewards(lambda rewards: rewards), completion_tokens=0.5
    )

    assert paid.tolist() == [0.75, -0.25]  # half of the mean of 0.5


def test_the_largest_float32_is_an_advantage():
    largest = float(np.finfo(np.float32).max)

    (one, _) = advantage.assign([make_group([1.0, 0.0])], lambda group: [largest, -largest])

    assert one.advantages[-1] == largest


def test_whitening_adds_a_hundred_millionth():
    samples = advantage.assign([make_group([1.0, 0.0])], lambda group: [1e-8, -1e-8])

    whitened = advantage.whitened(samples)

    assert whitened[0].advantages[-1] == pytest.approx(0.5)


class TestObservationWeights:
    def sample(self, **fields):
        return attrs.evolve(
            sample_of("ppcppc"), observation_mask=[False] * 3 + [True, True, False], **fields
        )

    def assigned(self, *samples):
        group = Group(task_id="t", rollouts=[Rollout(samples=samples, reward=1.0)])
        return advantage.assign([group], lambda _: [0.5])

    def test_a_number_is_of_each_observed_token(self):
        samples = self.assigned(self.sample(), sample_of("ppc"))

        first, second = advantage.with_observation_weights(samples, 0.25)

        assert first.weights.tolist() == [0, 0, 0, 0.25, 0.25, 0]
        assert second.weights.tolist() == [0, 0, 0]
        assert first.advantages.tolist() == [0, 0, 0.5, 0, 0, 0.5]

    def test_a_function_weighs_tokens(self):
        samples = self.assigned(self.sample())

        (weighted,) = advantage.with_observation_weights(samples, lambda one: one.token_ids / 4)

        assert weighted.weights.tolist() == [0, 0, 0, 0.75, 1.0, 0]

    @pytest.mark.parametrize(
        ("weight", "fault"), [(-1.0, "negative"), (float("nan"), "finite"), ([1.0, 2.0], "shape")]
    )
    def test_other_weights_are_refused(self, weight, fault):
        samples = self.assigned(self.sample())
        with pytest.raises(ValueError, match=fault):
            advantage.with_observation_weights(samples, lambda _: weight)
