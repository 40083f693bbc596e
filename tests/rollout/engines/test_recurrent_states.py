"""Recurrent states in the embedded engine: carried, shared, limited, and of the right request."""

import asyncio
import math
import random

import pytest
import torch
from served_models import generate_all, in_flight, perturbed

from primerl import loss, rollout
from primerl.rollout.engines.transformers import engine as engine_module
from primerl.rollout.engines.transformers import recurrent_states, snapshots
from primerl.testing.families import tiny_family
from primerl.types import SamplingParams

PARAMS = SamplingParams(max_tokens=20)


def prompts(lengths, seed=1):
    rng = random.Random(seed)
    return [[rng.randrange(2, 64) for _ in range(length)] for length in lengths]


def wide(family, **settings):
    return perturbed(tiny_family(family, **settings).eval(), 7)


def sample(engine, asked, params=PARAMS):
    """Return tokens and logprobs."""
    completions = asyncio.run(generate_all(engine, [(prompt, params) for prompt in asked]))
    return [(one.token_ids.tolist(), one.logprobs.tolist()) for one in completions]


def check_forward(model, prompt, tokens, logprobs):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0].float()
    expected = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    expected = expected.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-5, rtol=0)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "family",
    [
        "lfm2",
        "olmo_hybrid",
        "recurrent_gemma",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("bamba", "qwen3_5_text")),
    ],
)
def test_a_request_draws_the_same_tokens_whatever_is_served_beside_it(monkeypatch, family):
    monkeypatch.setattr(snapshots, "SEGMENT_TOKENS", 24)
    model = wide(family)
    asked = prompts([1, 2, 3, 5, 24, 33, 40, 70, 9, 64])
    asked += [asked[7], asked[7]]
    seeded = SamplingParams(max_tokens=20, seed=4)
    with rollout.TransformersEngine(model, seed=0, cache_tokens=4096) as engine:
        together = sample(engine, asked, seeded)
    for order in ([7], [0, 10], list(range(11, -1, -1))):
        with rollout.TransformersEngine(model, seed=0, cache_tokens=4096) as engine:
            again = sample(engine, [asked[n] for n in order], seeded)
        for n, (tokens, logprobs) in zip(order, again, strict=True):
            assert tokens == together[n][0]
            assert logprobs == pytest.approx(together[n][1], abs=1e-5)


@pytest.mark.parametrize("family", ["jamba", "nemotron_h", "qwen3_5_text"])
def test_states_are_carried_from_segment_to_segment_and_through_evictions(monkeypatch, family):
    monkeypatch.setattr(snapshots, "SEGMENT_TOKENS", 24)
    model = wide(family)
    asked = prompts([31, 30, 29, 70, 90, 25])
    with rollout.TransformersEngine(model, seed=0, cache_tokens=160) as engine:
        results = sample(engine, asked)
        assert engine.metrics()["this process"]["vllm:num_preemptions_total"] > 0
    for prompt, result in zip(asked, results, strict=True):
        check_forward(model, prompt, *result)


def test_turns_go_on_from_the_state_of_the_turn_before():
    model = wide("qwen3_5_text")
    (prompt,) = prompts([50])
    with rollout.TransformersEngine(model, seed=0, cache_tokens=4096) as engine:
        for _ in range(4):
            ((tokens, logprobs),) = sample(engine, [prompt])
            check_forward(model, prompt, tokens, logprobs)
            prompt = [*prompt, *tokens, 5, 6]
        metrics = engine.metrics()["this process"]
    # All tokens of earlier turns but the last one, which was sampled and not processed.
    assert metrics["vllm:prefix_cache_hits_total"] == 69 + 91 + 113


def test_a_cancelled_request_gives_its_state_to_others():
    model = wide("lfm2")
    with rollout.TransformersEngine(model, max_concurrent=2, cache_tokens=4096) as engine:
        rows = engine._decoder._scheduler._states

        async def main():
            long = SamplingParams(max_tokens=500)
            tasks = [asyncio.create_task(engine.generate([5, n], long)) for n in range(2)]
            while len(in_flight(engine)) < 2:
                await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()
            return await engine.generate([5, 6, 7], PARAMS)

        completion = asyncio.run(main())
        assert len(rows._free) + len(rows._snapshots) == 4
    check_forward(model, [5, 6, 7], completion.token_ids.tolist(), completion.logprobs.tolist())


def test_states_are_part_of_the_memory_and_limit_the_requests(monkeypatch, caplog):
    """Room for three requests: half of the cache's share of the memory, with a snapshot each."""
    model = tiny_family("qwen3_5_text")
    with rollout.TransformersEngine(model, cache_tokens=64) as engine:
        each = recurrent_states.state_bytes(engine._state_examples)
        held = [one for states in engine._decoder._states.mixers for one in states]
    # In each of the linear layers: 3 convolutions of 2 heads of 16, and 2 states of 16 x 16.
    linear = model.config.layer_types.count("linear_attention")
    kernel = model.config.linear_conv_kernel_dim
    assert each == linear * 4 * (3 * 2 * 16 * kernel + 2 * 16 * 16)
    assert {len(one) for one in held} == {2 * 128}

    budget = 2 * (3 * 2 * each) + each
    monkeypatch.setattr(engine_module, "free_memory", lambda _: budget / engine_module.CACHE_SHARE)
    with rollout.TransformersEngine(model) as engine:
        token = sum(shape.token_bytes for shape in engine._shapes)
        assert engine._max_concurrent == 3
        assert engine.context_length == (budget - 3 * 2 * each) // token
    assert "at most 3 requests are decoded together instead of 128" in caplog.text


def test_a_model_that_was_trained_in_packs_before():
    model = wide("qwen3_5_text")
    token_ids, positions = torch.arange(2, 12), torch.tensor([*range(4), *range(6)])
    loss.model_logprobs(model, token_ids, positions, token_ids)
    asked = prompts([3, 40])
    with rollout.TransformersEngine(model, seed=0, cache_tokens=512) as engine:
        results = sample(engine, asked)
    model.set_attn_implementation("eager")
    for prompt, result in zip(asked, results, strict=True):
        check_forward(model, prompt, *result)


def test_decays_are_rounded_with_the_weights():
    """MiniMax's code multiplies the two."""
    model = tiny_family("minimax")
    with rollout.TransformersEngine(model, dtype=torch.bfloat16, cache_tokens=512) as engine:
        ((tokens, _),) = sample(engine, prompts([3]))
    assert len(tokens) == 20


def test_limits_of_time_steps_that_cannot_be_kept_are_refused():
    """FalconH1 scales its projection afterwards."""
    model = tiny_family("falcon_h1", time_step_limit=(0.01, math.inf))
    with pytest.raises(ValueError, match="falcon_h1 limits time steps, .*; serve this model with"):
        rollout.TransformersEngine(model)


@pytest.mark.parametrize("family", ["nemotron_h", "bamba"])
def test_time_steps_are_limited_in_every_token(family):
    least = {"time_step_min": 0.5} if family == "nemotron_h" else {"time_step_limit": (0.5, 0.9)}
    model = wide(family, **least)
    asked = prompts([1, 9, 40])
    with rollout.TransformersEngine(model, seed=0, cache_tokens=512) as engine:
        results = sample(engine, asked)
    for prompt, result in zip(asked, results, strict=True):
        check_forward(model, prompt, *result)


@pytest.mark.parametrize("value", [0.001, 0.1, 1.0, 20.0])
def test_inverse_softplus(value):
    inverse = torch.tensor(recurrent_states.inverse_softplus(value), dtype=torch.float64)
    assert torch.nn.functional.softplus(inverse, threshold=1000).item() == pytest.approx(value)


def test_no_time_step_is_limited_by_zero_and_infinity():
    assert recurrent_states.inverse_softplus(0.0) == -math.inf
    assert recurrent_states.inverse_softplus(math.inf) == math.inf


@pytest.mark.parametrize("family", ["granitemoehybrid", "qwen3_next"])
def test_a_hybrid_family_with_attention_alone_is_served(family):
    model = tiny_family(family, layer_types=["full_attention"] * 2).eval()
    with rollout.TransformersEngine(model) as engine:
        (completion,) = asyncio.run(
            generate_all(engine, [([5, 6, 7], SamplingParams(max_tokens=3))])
        )
    ids = torch.tensor([5, 6, 7, *completion.token_ids.tolist()])
    expected = loss.model_logprobs(model, ids, torch.arange(6), ids.roll(-1))
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected[2:5].detach())
