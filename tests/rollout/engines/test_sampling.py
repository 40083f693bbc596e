"""What is drawn, against probabilities computed by hand and by numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl.rollout.engines.transformers import sampling
from primerl.rollout.engines.transformers.sampling import RequestKeys, sample_tokens, uniform
from primerl.types import SamplingParams


def draw(logits, uniforms, **params):
    given = SamplingParams(max_tokens=1, **params)
    rows = torch.tensor(logits, dtype=torch.float32).expand(len(uniforms), -1)
    tokens, logprobs = sample_tokens(
        rows, [given] * len(uniforms), torch.tensor(uniforms, dtype=torch.float64)
    )
    return tokens.tolist(), logprobs.tolist()


def test_a_token_is_the_first_whose_cumulative_probability_exceeds_u():
    logits = [math.log(p) for p in (0.1, 0.2, 0.7)]
    tokens, logprobs = draw(logits, [0.0, 0.0999, 0.1001, 0.2999, 0.3001, 0.9999999])
    assert tokens == [0, 0, 1, 1, 2, 2]
    expected = [math.log(p) for p in (0.1, 0.1, 0.2, 0.2, 0.7, 0.7)]
    assert logprobs == pytest.approx(expected, abs=1e-6)


def test_the_logprob_is_after_temperature():
    (token,), (logprob,) = draw([0.0, math.log(4.0)], [0.9], temperature=2.0)
    assert token == 1
    assert logprob == pytest.approx(math.log(2 / 3), abs=1e-6)  # sqrt(4) : 1


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {3: 0.4, 1: 0.3}),
        ({"top_k": 9}, {3: 0.4, 1: 0.3, 0: 0.2, 2: 0.1}),
        ({"top_p": 0.39}, {3: 0.4}),
        ({"top_p": 0.41}, {3: 0.4, 1: 0.3}),
        ({"top_p": 0.5, "top_k": 3}, {3: 0.4, 1: 0.3}),
        ({"min_p": 0.6}, {3: 0.4, 1: 0.3}),
        ({"min_p": 0.51, "top_p": 0.5}, {3: 0.4}),
        ({"min_p": 1.0}, {3: 0.4}),
        ({"top_p": 1e-9}, {3: 0.4}),
    ],
)
def test_limits_keep_the_likeliest_and_normalize_again(params, kept):
    logits = [math.log(p) for p in (0.2, 0.3, 0.1, 0.4)]
    uniforms = [(n + 0.5) / 400 for n in range(400)]
    tokens, logprobs = draw(logits, uniforms, **params)
    total = sum(kept.values())
    assert set(tokens) == set(kept)
    for token, logprob in zip(tokens, logprobs, strict=True):
        assert logprob == pytest.approx(math.log(kept[token] / total), abs=1e-6)
    for token, probability in kept.items():
        assert tokens.count(token) / 400 == pytest.approx(probability / total, abs=0.01)


def test_rows_are_sampled_by_their_own_parameters():
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(3, 1)
    params = [
        SamplingParams(max_tokens=1, temperature=0, top_k=1),
        SamplingParams(max_tokens=1, top_k=1),
        SamplingParams(max_tokens=1),
    ]
    tokens, logprobs = sample_tokens(logits, params, torch.tensor([0.0, 0.0, 0.0]).double())
    assert tokens.tolist() == [2, 2, 0]
    assert logprobs[:2].tolist() == [0.0, 0.0]
    assert logprobs[2].item() == pytest.approx(torch.log_softmax(logits[2], 0)[0].item())


@settings(max_examples=100, deadline=None)
@given(
    columns=st.integers(1, 1000),
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    u=st.floats(0, 1, exclude_max=True),
)
def test_draws_against_numpy(columns, seed, scale, u):
    u = int(u * 2**48) / 2**48  # as many bits as ``uniform`` has
    logits = (np.random.default_rng(seed).standard_normal(columns) * scale).astype(np.float32)
    logits[:: 3 + seed % 5] = -np.inf
    logits[seed % columns] = 1.0
    (token,), (logprob,) = draw(logits.tolist(), [u])
    shifted = logits.astype(np.float64) - logits.max()
    p = np.exp(shifted) / np.exp(shifted).sum()
    before, after = p[:token].sum(), p[: token + 1].sum()
    assert p[token] > 0
    assert before - 1e-6 <= u <= after + 1e-6
    assert logprob == pytest.approx(math.log(p[token]), abs=2e-5)


@pytest.mark.parametrize("temperature", [1e-46, 1e-37, 1e-9])
def test_the_lowest_temperatures_take_the_likeliest_token(temperature):
    tokens, logprobs = draw([1.0, 90.0, 89.0], [0.001, 0.999], temperature=temperature)
    assert tokens == [1, 1]
    assert logprobs == [0.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_numbers_has_no_logprob_and_spoils_no_other(bad):
    logits = torch.tensor([[0.0, bad], [0.0, 0.0]])
    params = [SamplingParams(max_tokens=1)] * 2
    _, logprobs = sample_tokens(logits, params, torch.tensor([0.5, 0.5]).double())
    assert logprobs[0].isnan()
    assert logprobs[1].item() == pytest.approx(math.log(0.5))


def test_keys_depend_on_the_request_and_not_on_others():
    plain, seeded = SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, seed=7)
    one, other = RequestKeys(3), RequestKeys(3)
    expected = one.key([5, 6], plain, "a")
    for prompt, session in [([5, 6], "b"), ([5], "a"), ([5, 6], None), ([56], "a")]:
        assert other.key(prompt, plain, session) != expected
    assert other.key([5, 6], plain, "a") == expected
    assert other.key([5, 6], plain, "a") != expected, "asked again, it draws again"
    assert RequestKeys(4).key([5, 6], plain, "a") != expected
    assert one.key([5], seeded, "a") == RequestKeys(4).key([6], seeded, None)


def test_counting_equal_requests_takes_a_limited_room_and_repeats_no_key(monkeypatch):
    monkeypatch.setattr(sampling, "COUNTED", 10)
    keys, plain = RequestKeys(0), SamplingParams(max_tokens=1)
    given = [keys.key([n % 30], plain, None) for n in range(300)]
    assert len(set(given)) == 300
    assert len(keys._counts) == 10


def test_uniform_numbers():
    numbers = [uniform(b"key", position) for position in range(10_000)]
    assert numbers[:3] == [uniform(b"key", position) for position in range(3)]
    assert 0 <= min(numbers) < 0.001 < 0.999 < max(numbers) < 1
    assert np.mean(numbers) == pytest.approx(0.5, abs=0.01)
    assert np.corrcoef(numbers[1:], numbers[:-1])[0, 1] == pytest.approx(0, abs=0.03)
