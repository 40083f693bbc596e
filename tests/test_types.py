import inspect

import numpy as np
import pytest
from conftest import make_group, make_sample

from primerl.types import (
    NOT_SAMPLED,
    Completion,
    Group,
    Rollout,
    Sample,
    SamplingParams,
    TrainingSample,
)


def test_arrays_take_their_declared_dtype_and_are_read_only():
    sample = make_sample()

    assert sample.token_ids.dtype == np.int32
    assert sample.loss_mask.dtype == np.bool_
    assert sample.behavior_logprobs.dtype == np.float32
    assert sample.versions.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        sample.token_ids[0] = 3


def test_a_value_does_not_share_memory_with_what_it_was_made_from():
    tokens = np.array([5, 6], np.int32)

    completion = Completion(
        token_ids=tokens, logprobs=[0, 0], versions=[0, 0], finish_reason="stop"
    )
    tokens[0] = 9

    assert completion.token_ids.tolist() == [5, 6]


def test_lengths_must_agree():
    with pytest.raises(ValueError, match=r"Completion.logprobs has shape \(1,\), expected \(2,\)"):
        Completion(token_ids=[5, 6], logprobs=[0.0], versions=[0, 0], finish_reason="stop")
    with pytest.raises(ValueError, match="Sample.versions has shape"):
        Sample(token_ids=[5, 6], loss_mask=[False, True], behavior_logprobs=[0, 0], versions=[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": [True, True]}, "token 0 has no context"),
        ({"behavior_logprobs": [0.0, np.nan]}, "not finite"),
        ({"versions": [NOT_SAMPLED, NOT_SAMPLED]}, "negative"),
        ({"temperature": np.inf}, "temperature"),
        (
            {"token_ids": [], "loss_mask": [], "behavior_logprobs": [], "versions": []},
            "no tokens",
        ),
    ],
)
def test_a_sample_that_could_not_be_trained_is_refused(change, message):
    fields = {
        "token_ids": [5, 6],
        "loss_mask": [False, True],
        "behavior_logprobs": [0.0, -1.0],
        "versions": [NOT_SAMPLED, 0],
    }

    with pytest.raises(ValueError, match=message):
        Sample(**(fields | change))


def test_what_is_masked_out_may_be_anything():
    sample = Sample(
        token_ids=[5, 6],
        loss_mask=[False, False],
        behavior_logprobs=[np.nan, np.inf],
        versions=[NOT_SAMPLED, NOT_SAMPLED],
    )

    assert not sample.loss_mask.any()


def test_a_greedy_sample_can_be_recorded_but_not_trained():
    greedy = make_sample(temperature=0.0)

    assert greedy.temperature == 0
    with pytest.raises(ValueError, match="greedy"):
        make_sample(kind=TrainingSample, temperature=0.0, advantages=np.zeros(7))


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        (np.ones((7, 3)), None),
        (None, np.zeros((7, 3))),
        (np.ones((7, 3)), np.zeros((7, 2))),
        (np.ones((6, 3)), np.zeros((6, 3))),
        (np.ones(7), np.zeros(7)),
    ],
)
def test_top_tokens_of_other_shapes_are_refused(ids, logprobs):
    fields = {"kind": TrainingSample, "advantages": np.zeros(7)}
    sample = make_sample(**fields, ref_top_ids=np.ones((7, 3)), ref_top_logprobs=np.zeros((7, 3)))

    assert sample.ref_top_ids.dtype == np.int32
    with pytest.raises(ValueError, match=r"ref_top_ids and ref_top_logprobs .*expected \(7, k\)"):
        make_sample(**fields, ref_top_ids=ids, ref_top_logprobs=logprobs)


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf, 1.7e308, -1.1e38])
def test_a_reward_must_be_finite(reward):
    with pytest.raises(ValueError, match="finite"):
        Rollout(samples=[make_sample()], reward=reward)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": 0},
        {"top_k": -2},
    ],
)
def test_sampling_params_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**({"max_tokens": 4} | bad))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"max_tokens": 2.5}, "max_tokens is 2.5, expected a whole number"),
        ({"max_tokens": "3"}, "max_tokens is '3', expected a whole number"),
        ({"max_tokens": True}, "max_tokens is True, expected a whole number"),
        ({"seed": "a"}, "seed is 'a', expected a whole number"),
        ({"seed": 1.5}, "seed is 1.5, expected a whole number"),
        ({"top_k": None}, "top_k is None, expected a whole number"),
        ({"routes_start": 0.5}, "routes_start is 0.5, expected a whole number"),
        ({"temperature": "1"}, "temperature is '1', expected a number"),
        ({"top_p": True}, "top_p is True, expected a number"),
        ({"min_p": None}, "min_p is None, expected a number"),
        ({"stop_token_ids": 7}, "stop_token_ids is 7, expected a sequence of token ids"),
        ({"stop_token_ids": "7"}, "stop_token_ids is '7', expected a sequence of token ids"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids is 1.5, expected a whole number"),
    ],
)
def test_sampling_params_of_another_kind_are_refused(bad, message):
    make = inspect.unwrap(SamplingParams.__init__)  # without the checks of types in these tests
    with pytest.raises(ValueError, match=message):
        make(object.__new__(SamplingParams), **({"max_tokens": 4} | bad))


def test_sampling_params_of_numpy_become_pythons_own():
    params = object.__new__(SamplingParams)
    inspect.unwrap(SamplingParams.__init__)(
        params, max_tokens=np.int64(4), seed=np.uint8(3), temperature=1, stop_token_ids=np.arange(2)
    )

    assert (params.max_tokens, params.seed, params.temperature) == (4, 3, 1.0)
    assert [type(params.max_tokens), type(params.seed), type(params.temperature)] == [
        int,
        int,
        float,
    ]
    assert [type(token) for token in params.stop_token_ids] == [int, int]


def test_a_group_gathers_rewards_and_versions():
    group = make_group([0.0, 0.5, 1.0], version=3)

    assert group.rewards.tolist() == [0.0, 0.5, 1.0]
    assert group.versions.tolist() == [3] * 12
    assert Group(task_id="empty", rollouts=[]).versions.tolist() == []


def test_shapes_of_annotations_are_checked_in_these_tests():
    from beartype.roar import BeartypeCallHintViolation
    from jaxtyping import TypeCheckError

    from primerl import filters

    with pytest.raises((TypeCheckError, BeartypeCallHintViolation)):
        filters._repeated_share(np.zeros(3, np.int32), np.zeros(4, bool), 2)


def test_metrics_are_pythons_own_numbers_by_name():
    one = Rollout(samples=[], reward=1.0, metrics={"turns": np.float32(2), "won": True})

    assert dict(one.metrics) == {"turns": 2.0, "won": True}
    assert type(one.metrics["turns"]) is float


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"metrics": {"colour": "red"}},
            "metric 'colour' is 'red'; expected a string and a number",
        ),
        ({"metrics": {"all": np.zeros(3)}}, "metric 'all' is array"),
        ({"metrics": {"seed": 2**70}}, "metric 'seed' is 1180591620717411303424; expected"),
        ({"episode_id": 7}, "episode_id is 7, expected a string"),
        ({"agent": None}, "agent is None, expected a string"),
        ({"stop": 7}, "stop is 7, expected a string"),
    ],
)
def test_a_rollout_that_could_not_be_recorded_is_refused_where_it_is_made(fields, message):
    rollout_fields = {"samples": [], "reward": 1.0, **fields}
    make = inspect.unwrap(Rollout.__init__)  # without the checks of types that these tests add
    with pytest.raises(ValueError, match=message):
        make(object.__new__(Rollout), **rollout_fields)
