"""Layers with sliding windows, whose keys and values are given up, against plain forward passes.

Contexts are three to eight times the window. In Gemma 3 some layers have a window, in Mistral all.
"""

import asyncio
import random

import pytest
import torch
from served_models import generate_all, in_flight, most_sampled, pages_in_use, perturbed

from primerl import rollout, testing, weights
from primerl.rollout.engines.transformers import engine as engine_module
from primerl.rollout.engines.transformers.pages import PAGE_TOKENS, pages_of_span
from primerl.types import SamplingParams

WINDOW = 40
FAMILIES = ["gemma3_text", "mistral"]


@pytest.fixture(autouse=True)
def one_thread():
    """More threads are slower for small models, above all beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def windowed_model(family, window=WINDOW, **settings):
    settings = {"max_position_embeddings": 4096, "eos_token_id": None, **settings}
    if family == "gemma3_text":
        settings = {"layer_types": ["sliding_attention", "full_attention"], **settings}
    return perturbed(testing.tiny_model(family, sliding_window=window, **settings), 3)


def random_tokens(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(2, 64) for _ in range(length)]


def plain_logprobs(model, prompt, completion, temperature=1.0):
    """Return the logprobs of a completion by the model's own forward pass, alone."""
    tokens = [*prompt, *completion.token_ids.tolist()]
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits / temperature, -1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(tokens[len(prompt) :])[:, None])[:, 0]


def check_logprobs(model, prompt, completion, *, models=()):
    """Each token's logprob is that of a plain forward pass of the token's version."""
    for version, one in enumerate(models or [model]):
        of_version = torch.tensor(completion.versions == version)
        expected = plain_logprobs(one, prompt, completion)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs)[of_version], expected[of_version], atol=1e-5, rtol=0
        )


def metrics(engine):
    return engine.metrics()["this process"]


def test_the_reference_has_a_window():
    """The last token is changed by the first token of its window, and not by the one before."""
    model = windowed_model("mistral", num_hidden_layers=1)
    prompt = random_tokens(200)
    changed = [list(prompt), list(prompt)]
    for tokens, place in zip(changed, (199 - WINDOW, 200 - WINDOW), strict=True):
        tokens[place] = 1
    logits = [model(torch.tensor([tokens])).logits[0, -1] for tokens in (prompt, *changed)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_beyond_the_window_share_their_prompts(family):
    model = windowed_model(family)
    prompts = [random_tokens(300, 1)] * 6 + [random_tokens(n, n) for n in (3, 130, 700)]
    params = SamplingParams(max_tokens=100)
    with rollout.TransformersEngine(model, seed=0) as engine:
        completions = asyncio.run(generate_all(engine, [(prompt, params) for prompt in prompts]))
        assert metrics(engine)["vllm:prefix_cache_hits_total"] == 5 * 299
        assert pages_in_use(engine) == 0
    assert len({tuple(one.token_ids.tolist()) for one in completions[:6]}) == 6
    for prompt, completion in zip(prompts, completions, strict=True):
        check_logprobs(model, prompt, completion)


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_beyond_the_window_cost_only_what_is_new(family):
    model = windowed_model(family)
    tokens = random_tokens(30)
    with rollout.TransformersEngine(model, seed=0) as engine:
        for turn in range(20):
            completion = asyncio.run(engine.generate(tokens, SamplingParams(max_tokens=10)))
            check_logprobs(model, tokens, completion)
            found = metrics(engine)
            new = found["vllm:prompt_tokens_total"] - found["vllm:prefix_cache_hits_total"]
            assert new == 30 + turn * 8  # seven, and the last one that was sampled
            tokens += [*completion.token_ids.tolist(), *random_tokens(7, turn)]
    assert len(tokens) > 8 * WINDOW


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_cancellations_preemptions_and_updates_beyond_the_window(family, mode):
    model = windowed_model(family)
    models = [model, perturbed(model, 8)]
    prompts = [random_tokens(length, length) for length in (120, 200, 33, 250, 64, 230)]
    params = SamplingParams(max_tokens=120)

    async def main():
        tasks = [asyncio.create_task(engine.generate(prompt, params)) for prompt in prompts]
        while most_sampled(engine) < 60:
            await asyncio.sleep(0.001)
        tasks[1].cancel()
        await asyncio.to_thread(weights.SharedMemory(models[1], engine).publish, 1)
        return await asyncio.gather(*tasks, return_exceptions=True)

    with rollout.TransformersEngine(model, seed=0, cache_tokens=576, on_update=mode) as engine:
        completions = asyncio.run(main())
        again = asyncio.run(generate_all(engine, [(prompt, params) for prompt in prompts]))
        assert pages_in_use(engine) == 0
        assert in_flight(engine) == []
        preempted = metrics(engine)["vllm:num_preemptions_total"]
        assert preempted > 0 or family == "mistral"
    assert isinstance(completions.pop(1), asyncio.CancelledError)
    mixed = 0
    for prompt, completion in zip(prompts[:1] + prompts[2:], completions, strict=True):
        mixed += len({*completion.versions}) > 1
        if mode == "recompute" or len({*completion.versions}) == 1:
            check_logprobs(model, prompt, completion, models=models)
    assert mixed
    for prompt, completion in zip(prompts, again, strict=True):
        assert {*completion.versions} == {1}
        check_logprobs(model, prompt, completion, models=models)


def test_keep_continues_with_the_window_of_earlier_weights():
    """Against transformers' own cache, with the weights of each token's version."""
    from transformers import DynamicCache

    model = windowed_model("gemma3_text")
    models = [model, perturbed(model, 8)]
    prompt = random_tokens(150)

    async def main():
        task = asyncio.create_task(engine.generate(prompt, SamplingParams(max_tokens=200)))
        while most_sampled(engine) < 60:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(weights.SharedMemory(models[1], engine).publish, 1)
        return await task

    with rollout.TransformersEngine(model, seed=0, on_update="keep") as engine:
        completion = asyncio.run(main())
    assert {*completion.versions} == {0, 1}

    cache, logprobs, row = DynamicCache(config=model.config), [], prompt
    versions, sampled = completion.versions.tolist(), completion.token_ids.tolist()
    with torch.no_grad():
        for token, version in zip(sampled, versions, strict=True):
            tokens = torch.tensor([row])
            logits = models[version](tokens, past_key_values=cache, use_cache=True).logits[0, -1]
            logprobs.append(logits.float().log_softmax(-1)[token])
            row = [token]
    torch.testing.assert_close(
        torch.tensor(completion.logprobs), torch.stack(logprobs), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_what_layers_with_windows_keep_does_not_grow_with_the_context(family):
    model = windowed_model(family)
    most = []

    def note(*_):
        most.append(engine._decoder._scheduler.pages.windowed_pool.used)

    with rollout.TransformersEngine(model, seed=0, max_concurrent=2) as engine:
        assert engine._cache_size.windowed_pages < engine._cache_size.pages
        engine._model.register_forward_pre_hook(note)
        asyncio.run(engine.generate(random_tokens(64), SamplingParams(max_tokens=400)))
    assert len(most) == 400
    # The page of the token that is computed, and those of the tokens that it sees.
    assert max(most) <= pages_of_span(WINDOW) + 1


@pytest.mark.parametrize(
    ("window", "lengths"),
    [(1, (1460,)), (2, (1460, 1600)), (33, (1460, 1530)), (700, (1990, 1500))],
)
def test_a_request_longer_than_a_cache_of_windows_is_served(window, lengths):
    """The rows of decoding requests, which have room for 1,536 or 2,048 tokens, slide, too.

    The windows of 2 and 33 tokens begin a token and a page before a block of keys.
    """
    model = windowed_model("mistral", window=window)
    size = (pages_of_span(window) + pages_of_span(512)) * PAGE_TOKENS
    requests = [(random_tokens(n, n), SamplingParams(max_tokens=120)) for n in lengths]
    with rollout.TransformersEngine(model, seed=0, cache_tokens=size, max_concurrent=2) as engine:
        assert engine.context_length == 4096
        completions = asyncio.run(generate_all(engine, requests))
    for (asked, _), completion in zip(requests, completions, strict=True):
        check_logprobs(model, asked, completion)


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_that_held_nan_are_used_again(family):
    """Token 9 makes its request's numbers NaN; the others' pages hold them before."""
    model = windowed_model(family, 33, tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = float("nan")
    params = SamplingParams(max_tokens=20, seed=2)
    good = [([token for token in random_tokens(n, n) if token != 9], params) for n in (3, 40, 130)]
    bad = [([*random_tokens(100, 1), 9, *[3] * n], params) for n in (0, 1, 33)]

    async def main():
        requests = [engine.generate(*one) for one in bad + good]
        return await asyncio.gather(*requests, return_exceptions=True)

    with rollout.TransformersEngine(model) as engine:
        expected = asyncio.run(generate_all(engine, good))
    with rollout.TransformersEngine(model, cache_tokens=384) as engine:
        for _ in range(3):
            answers = asyncio.run(main())
            assert all(isinstance(answer, RuntimeError) for answer in answers[:3])
            for answer, one in zip(answers[3:], expected, strict=True):
                assert answer.token_ids.tolist() == one.token_ids.tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [2**20, 2**25, 2**27])
def test_windows_and_bookkeeping_fit_into_the_memory_together(monkeypatch, family, budget):
    monkeypatch.setattr(engine_module, "free_memory", lambda _: budget / engine_module.CACHE_SHARE)
    model = windowed_model(family, window=700)
    engine = rollout.TransformersEngine(model)
    size, layer = engine._cache_size, 2 * 2 * 8 * 4  # a key and a value, 2 heads of 8, 4 bytes
    all_windowed = family == "mistral"
    windows = size.windowed_tokens * layer * (2 if all_windowed else 1)
    others = size.tokens * (engine_module.BOOKKEEPING_BYTES if all_windowed else layer)
    assert windows + others <= budget
    if budget == 2**27:
        assert size.tokens == 128 * 4096


def test_a_smaller_cache_limits_requests_to_its_size():
    model = windowed_model("mistral", window=700)
    with rollout.TransformersEngine(model, cache_tokens=1000) as engine:
        assert engine.context_length == 1000
        with pytest.raises(ValueError, match=r"1000 tokens, the limit of .*\(cache_tokens\)"):
            asyncio.run(engine.generate(random_tokens(900), SamplingParams(max_tokens=101)))


@pytest.mark.parametrize(
    ("family", "window"),
    [
        ("gemma3_text", 40),
        ("mistral", 600),
        pytest.param("gemma3_text", 600, marks=pytest.mark.thorough),
        pytest.param("mistral", 40, marks=pytest.mark.thorough),
    ],
)
def test_draws_beyond_the_window_are_equal_alone_together_and_through_evictions(family, window):
    model = windowed_model(family, window)
    prompts = [random_tokens(100 + 230 * n, n) for n in range(6)]
    prompts += [[*prompts[4][:800], 7, 8]] * 3
    params = SamplingParams(max_tokens=50)

    def answers(order, **settings):
        with rollout.TransformersEngine(model, seed=5, **settings) as engine:

            async def main():
                return await asyncio.gather(
                    *(engine.generate(prompts[n], params, session=str(n)) for n in order)
                )

            completions = asyncio.run(main())
            preempted = metrics(engine)["vllm:num_preemptions_total"]
        return preempted, {
            n: (one.token_ids.tolist(), one.logprobs.tolist())
            for n, one in zip(order, completions, strict=True)
        }

    order = list(range(len(prompts)))
    _, together = answers(order)
    runs = [answers(order[::-1], max_concurrent=3), answers(order, cache_tokens=1936)]
    runs += [answers([n]) for n in (0, 5, 8)]
    assert runs[1][0] > 0 or family == "mistral"
    for _, run in runs:
        for n, (tokens, logprobs) in run.items():
            assert tokens == together[n][0]
            assert logprobs == pytest.approx(together[n][1], abs=2e-6)
