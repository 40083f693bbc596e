import numpy as np
import pytest
from conftest import make_group, make_sample

from primerl import advantage
from primerl.types import Group, Rollout


def test_centered_is_reward_minus_mean():
    assert advantage.centered(np.array([1.0, 0.0, 0.0, 1.0])).tolist() == [0.5, -0.5, -0.5, 0.5]
    assert advantage.centered(make_group([3.0, 1.0])).tolist() == [1.0, -1.0]
    assert advantage.centered([2.0]).tolist() == [0.0]


def test_assign_gives_a_rollouts_value_to_its_trained_tokens_only():
    (good, bad) = advantage.assign([make_group([1.0, 0.0])], advantage.centered)

    assert good.advantages.tolist() == [0, 0, 0, 0.5, 0.5, 0.5, 0.5]
    assert bad.advantages.tolist() == [0, 0, 0, -0.5, -0.5, -0.5, -0.5]
    assert good.versions.tolist() == make_sample().versions.tolist()


def test_assign_keeps_every_field_of_the_sample():
    sample = make_sample(temperature=0.7, routes="file:routes")
    group = Group(task_id="t", rollouts=[Rollout(samples=[sample], reward=1.0)])

    (assigned,) = advantage.assign([group], lambda group: [2.0])

    assert assigned.temperature == 0.7
    assert assigned.routes == "file:routes"
    assert assigned.behavior_logprobs.tolist() == sample.behavior_logprobs.tolist()


def test_assign_takes_per_token_values():
    group = make_group([1.0, 0.0])
    values = [[np.arange(7)], [-np.arange(7)]]

    (first, second) = advantage.assign([group], lambda group: values)

    assert first.advantages.tolist() == [0, 0, 0, 3, 4, 5, 6]
    assert second.advantages.tolist() == [0, 0, 0, -3, -4, -5, -6]


def test_assign_covers_rollouts_of_several_samples_and_leaves_out_untrained_ones():
    untrained = make_sample(prompt=4, completion=0)
    rollout = Rollout(samples=[make_sample(), untrained, make_sample(completion=1)], reward=1.0)
    group = Group(task_id="t", rollouts=[rollout])

    samples = advantage.assign([group], lambda group: [1.5])

    assert [len(sample.token_ids) for sample in samples] == [7, 4]
    assert samples[1].advantages.tolist() == [0, 0, 0, 1.5]


def test_a_lambda_on_rewards_can_be_lifted():
    scaled = advantage.of_rewards(lambda rewards: 2 * rewards)

    (a, b) = advantage.assign([make_group([1.0, 0.0])], scaled)

    assert a.advantages[-1] == 2.0
    assert b.advantages[-1] == 0.0


def test_an_estimator_that_returns_the_wrong_number_is_named():
    def three(group):
        return [1.0, 2.0, 3.0]

    with pytest.raises(ValueError, match="task 'x', three returned 3 values for 2 rollouts"):
        advantage.assign([make_group(task_id="x")], three)
    with pytest.raises(ValueError, match="returned 2 arrays for a rollout of 1 samples"):
        advantage.assign([make_group()], lambda group: [[[1.0], [2.0]], [[1.0], [2.0]]])


def test_a_value_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        advantage.assign([make_group()], lambda group: [np.nan, 1.0])
