"""What a request draws depends on nothing beside it, and equals a plain forward pass."""

import asyncio
import random
import secrets

import pytest
import torch
from admitted_families import ADMITTED, often
from served_models import generate_all, perturbed, wide_model

from primerl import rollout, testing, weights
from primerl.attention.admission import KEY_CHOOSING_LAYERS, layer_kinds, named_mixers
from primerl.testing.families import tiny_family
from primerl.types import NOT_SAMPLED, Rollout, Sample, SamplingParams


def requests(count=64):
    """Make prompts that begin alike, of 1 to 350 tokens."""
    rng = random.Random(1)
    common = [rng.randrange(2, 64) for _ in range(45)]
    return [
        common[: 15 * (n % 4)] + [rng.randrange(2, 64) for _ in range(rng.choice([1, 5, 40, 300]))]
        for n in range(count)
    ]


def answers(model, order, **settings):
    """Return each request's tokens and logprobs, submitted in this order."""
    prompts = requests()
    params = SamplingParams(max_tokens=40)
    with rollout.TransformersEngine(model, seed=5, **settings) as engine:

        async def main():
            return await asyncio.gather(
                *(engine.generate(prompts[n], params, session=str(n)) for n in order)
            )

        completions = asyncio.run(main())
    return {
        n: (completion.token_ids.tolist(), completion.logprobs.tolist())
        for n, completion in zip(order, completions, strict=True)
    }


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "gemma3_text", "qwen3_moe"])
def test_requests_draw_the_same_alone_together_in_other_orders_and_through_evictions(family):
    settings = {"max_position_embeddings": 512, "eos_token_id": None}
    model = perturbed(testing.tiny_model(family, **settings), 7)
    order = list(range(64))
    together = answers(model, order)
    alone = {}
    for n in order[::5]:
        alone |= answers(model, [n])
    assert {n: one[0] for n, one in alone.items()} == {n: together[n][0] for n in alone}
    for room in ({"cache_tokens": 1024}, {"max_concurrent": 5}):
        random.Random(2).shuffle(order)
        again = answers(model, order, **room)
        for n in order:
            assert again[n][0] == together[n][0]
            assert again[n][1] == pytest.approx(together[n][1], abs=1e-5)


def test_every_forward_pass_has_the_rows_that_round_alike():
    """With fewer than four, products of matrices round differently."""
    rows, scored = [], []

    def note(module, arguments, inputs):
        rows.append(inputs["input_ids"].shape[1])
        scored.append(len(inputs["logits_to_keep"]))

    with rollout.TransformersEngine(wide_model("qwen3"), seed=0) as engine:
        engine._model.register_forward_pre_hook(note, with_kwargs=True)
        asyncio.run(engine.generate([5, 6], SamplingParams(max_tokens=5)))
    assert rows == scored == [4] * 5


def test_the_seed_of_a_request_determines_its_tokens():
    model = wide_model("qwen3")
    seeded = SamplingParams(max_tokens=20, seed=3)
    other = SamplingParams(max_tokens=20, seed=4)
    plain = SamplingParams(max_tokens=20)
    asked = [([5, 6], seeded), ([5, 6], plain), ([5, 6], other), ([5, 6], plain), ([5, 6], seeded)]
    results = []
    for seed in (0, 1):
        with rollout.TransformersEngine(model, seed=seed) as engine:
            completions = asyncio.run(generate_all(engine, asked))
        results.append([one.token_ids.tolist() for one in completions])
    (first, plain_1, second, plain_2, again), rest = results
    assert first == again == rest[0] == rest[4]
    assert second == rest[2] != first
    assert plain_1 != plain_2, "equal requests draw again"
    assert plain_1 != rest[1]


async def two_turns(task, engine, params):
    """Play two turns; like an agent's, the session has a random name."""
    session = secrets.token_hex(8)
    first = await engine.generate(task["prompt"], params, session=session)
    tokens = [*task["prompt"], *first.token_ids.tolist(), 7]
    second = await engine.generate(tokens, params, session=session)
    sample = Sample(
        token_ids=[*tokens, *second.token_ids.tolist()],
        loss_mask=[0] * len(tokens) + [1] * len(second.token_ids),
        behavior_logprobs=[0.0] * len(tokens) + second.logprobs.tolist(),
        versions=[NOT_SAMPLED] * len(tokens) + second.versions.tolist(),
        temperature=params.temperature,
    )
    return Rollout(samples=[sample], reward=0.0)


def play(model, seed):
    """Take three synchronous steps, with other weights in each; return all tokens."""
    taken = []
    with rollout.TransformersEngine(model, seed=seed) as engine:
        worker = rollout.worker(
            engine,
            two_turns,
            [{"prompt": [5, 6, n]} for n in range(12)],
            params=SamplingParams(max_tokens=8),
            group_size=3,
            groups_per_step=4,
            max_staleness=0,
            isolation="thread",
        )
        with worker as rollouts:
            for version in range(3):
                groups = rollouts.take(version)
                taken += [one.samples[0].token_ids.tolist() for g in groups for one in g.rollouts]
                weights.SharedMemory(perturbed(model, version), engine).publish(version + 1)
    return sorted(taken)


def test_a_synchronous_run_draws_the_same_rollouts_again():
    model = wide_model("qwen3")
    first, again, other = play(model, 0), play(model, 0), play(model, 1)
    assert len(first) == 36
    assert first == again != other
    assert len({tuple(one) for one in first}) > 30


def check_forward(model, prompt, completion, temperature):
    token_ids = prompt + completion.token_ids.tolist()
    with torch.no_grad():
        logits = model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits / temperature, -1)[len(prompt) - 1 : -1]
    labels = torch.tensor(completion.token_ids).long().unsqueeze(1)
    expected = logprobs.gather(1, labels).squeeze(1)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


ALWAYS_TESTED = [
    "afmoe", "cohere2", "deepseek_v2", "diffllama", "gemma3_text", "gemma4_text", "glm4_moe",
    "glm_moe_dsa", "gpt2", "gpt_oss", "granitemoe", "hrm_text", "jamba", "kimi_linear", "lfm2",
    "longcat_flash", "minimax", "minimax_m2", "mistral", "modernbert-decoder", "nemotron_h",
    "olmo3", "opt", "phi3", "qwen2_moe", "qwen3_next", "recurrent_gemma", "smollm3",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", often(ADMITTED, always=ALWAYS_TESTED))
def test_a_family_against_its_plain_forward_pass(family):
    """Windows, latents, sinks, chosen keys, states: with shared prompts, and in parts."""
    model = tiny_family(family).eval()
    if layer_kinds(model) & {"chunked_attention", *KEY_CHOOSING_LAYERS}:
        with pytest.raises(ValueError, match="layers, which this engine does not support"):
            rollout.TransformersEngine(model, seed=0)
        return
    vocabulary = model.config.get_text_config().vocab_size
    rng = random.Random(3)
    common = [rng.randrange(2, vocabulary) for _ in range(40)]
    asked = [[*common[:35], rng.randrange(2, vocabulary)] for _ in range(3)]
    asked += [[rng.randrange(2, vocabulary) for _ in range(n)] for n in (1, 7)]
    params = SamplingParams(max_tokens=30, temperature=0.7)
    with rollout.TransformersEngine(model, seed=0, cache_tokens=4096) as engine:
        completions = asyncio.run(generate_all(engine, [(prompt, params) for prompt in asked]))
        outcomes = testing.check_engine(
            engine, update=weights.SharedMemory(model, engine).publish, max_tokens=8
        )
        # States are shared at the ends of pages, keys and values after any token.
        shared = 2 * (32 if named_mixers(model) else 35)
        assert engine.metrics()["this process"]["vllm:prefix_cache_hits_total"] >= shared
    assert {outcome for outcome in outcomes.values() if outcome != "passed"} <= {
        "skipped: engine.routes is None",
        # If all layers have windows, the cache does not limit requests.
        f"skipped: the context of {engine.context_length} tokens is longer than 4096",
    }
    model.set_attn_implementation("eager")
    for prompt, completion in zip(asked, completions, strict=True):
        check_forward(model, prompt, completion, 0.7)
