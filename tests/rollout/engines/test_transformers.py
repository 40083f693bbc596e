"""The engine against plain forward passes, under the version that each token claims."""

import asyncio
import copy
import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from served_models import (
    generate_all,
    in_flight,
    most_sampled,
    pages_in_use,
    perturbed,
    prompts,
    wide_model,
)

from primerl import loss, rollout, testing, weights
from primerl.rollout.engines.transformers import engine as engine_module
from primerl.testing.families import tiny_family
from primerl.types import SamplingParams

TOLERANCE = 1e-5


def forward_logprobs(model, prompt, completion, temperature):
    token_ids = torch.tensor(prompt + completion.token_ids.tolist())
    positions = torch.arange(len(token_ids))
    with torch.no_grad():
        logprobs = loss.model_logprobs(
            model, token_ids, positions, token_ids.roll(-1), temperature=temperature
        )
    return logprobs[len(prompt) - 1 : -1]


def packed_logprobs(model, prompt_ids, completions, temperature):
    documents = [p + c.token_ids.tolist() for p, c in zip(prompt_ids, completions, strict=True)]
    token_ids = torch.tensor([token for document in documents for token in document])
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    logprobs = loss.model_logprobs(
        model, token_ids, positions, token_ids.roll(-1), temperature=temperature
    ).detach()
    parts = logprobs.split([len(document) for document in documents])
    return [part[len(p) - 1 : -1] for part, p in zip(parts, prompt_ids, strict=True)]


def check_logprobs(model, prompt, completion):
    """They are those of a plain forward pass at temperature 1."""
    expected = forward_logprobs(model, prompt, completion, 1.0)
    logprobs = torch.tensor(completion.logprobs)
    torch.testing.assert_close(expected, logprobs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
def test_logprobs_equal_the_packed_forward_of_the_trainer(family, temperature):
    model = wide_model(family)
    asked = prompts(24)
    params = SamplingParams(max_tokens=10, temperature=temperature)

    with rollout.TransformersEngine(model, seed=0) as engine:
        completions = asyncio.run(generate_all(engine, [(p, params) for p in asked]))

    for ours, completion in zip(
        packed_logprobs(model, asked, completions, temperature), completions, strict=True
    ):
        assert len(completion.token_ids) == 10
        assert completion.finish_reason == "length"
        torch.testing.assert_close(ours, torch.tensor(completion.logprobs), atol=TOLERANCE, rtol=0)


def run_with_updates(engine, models, *, requests=12, tokens=60):
    """Publish every model in turn while requests are in flight."""
    asked = prompts(requests, seed=1)
    temperatures = [0.7 if n % 2 else 1.0 for n in range(requests)]

    async def main():
        tasks = [
            asyncio.create_task(
                engine.generate(p, SamplingParams(max_tokens=tokens, temperature=t))
            )
            for p, t in zip(asked, temperatures, strict=True)
        ]

        for version, model in enumerate(models[1:], start=1):
            while most_sampled(engine) < 15 * version and not all(task.done() for task in tasks):
                await asyncio.sleep(0.001)
            transport = weights.SharedMemory(model, engine)
            await asyncio.to_thread(transport.publish, version)
        return await asyncio.gather(*tasks)

    return list(zip(asked, temperatures, asyncio.run(main()), strict=True))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "lfm2"])
def test_recompute_samples_every_token_with_its_version(family):
    models = [wide_model(family)]
    models += [perturbed(models[0], seed) for seed in (1, 2)]

    with rollout.TransformersEngine(models[0], on_update="recompute", seed=0) as engine:
        results = run_with_updates(engine, models)

    mixed = 0
    for prompt, temperature, completion in results:
        assert (completion.versions[1:] >= completion.versions[:-1]).all()
        seen = set(completion.versions.tolist())
        mixed += len(seen) > 1
        for version in seen:
            of_version = torch.tensor(completion.versions == version)
            expected = forward_logprobs(models[version], prompt, completion, temperature)
            torch.testing.assert_close(
                torch.tensor(completion.logprobs)[of_version],
                expected[of_version],
                atol=TOLERANCE,
                rtol=0,
            )
    assert mixed > 0, "no request was in flight during an update"


def mixed_cache_logprobs(models, prompt, completion, temperature):
    """What `keep` means, spelled out: each token through its own version's weights, one cache."""
    from transformers import DynamicCache

    tokens = prompt + completion.token_ids.tolist()
    cache = DynamicCache(config=models[0].config)
    logprobs = []
    # The token sampled at position i came from the forward pass of what precedes it.
    spans = [(0, len(prompt))] + [(i, i + 1) for i in range(len(prompt), len(tokens) - 1)]
    with torch.no_grad():
        for (start, end), version in zip(spans, completion.versions.tolist(), strict=True):
            # By position: the cache's name depends on the version of transformers.
            row = torch.tensor([tokens[start:end]])
            positions = torch.arange(start, end).unsqueeze(0)  # Bamba's default is wrong
            logits = models[version](row, None, positions, cache, use_cache=True).logits[0, -1:]
            label = torch.tensor([tokens[end]])
            logprobs.append(loss.token_logprobs(logits, label, temperature=temperature))
    return torch.cat(logprobs)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "bamba", "lfm2"])
def test_keep_continues_with_the_cache_of_earlier_weights(family):
    models = [perturbed(tiny_family(family).eval(), 99)]
    models += [perturbed(models[0], seed) for seed in (1, 2)]
    for model in models:
        model.set_attn_implementation("eager")

    with rollout.TransformersEngine(models[0], on_update="keep", seed=0) as engine:
        results = run_with_updates(engine, models)

    mixed = [c for _, _, c in results if len(set(c.versions.tolist())) > 1]
    assert mixed, "no request was in flight during an update"
    for prompt, temperature, completion in results:
        torch.testing.assert_close(
            mixed_cache_logprobs(models, prompt, completion, temperature),
            torch.tensor(completion.logprobs),
            atol=5 * TOLERANCE,  # a state sums up the rounding of all tokens before
            rtol=0,
        )


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_repeated_prompt_after_an_update_does_not_use_old_weights(mode):
    first, second = wide_model(), perturbed(wide_model(), seed=5)
    rng = random.Random(0)
    prompt = [rng.randrange(2, 64) for _ in range(80)]  # more than one page of the cache
    params = SamplingParams(max_tokens=8)

    with rollout.TransformersEngine(first, on_update=mode, seed=0) as engine:
        asyncio.run(engine.generate(prompt, params))
        weights.SharedMemory(second, engine).publish(1)
        completion = asyncio.run(engine.generate(prompt, params))

    assert completion.versions.tolist() == [1] * 8
    check_logprobs(second, prompt, completion)


def test_greedy_takes_the_likeliest_token_beside_sampled_requests():
    model = wide_model()
    asked = prompts(6)
    greedy, sampled = SamplingParams(max_tokens=12, temperature=0), SamplingParams(max_tokens=12)

    with rollout.TransformersEngine(model, seed=0) as engine:
        completions = asyncio.run(
            generate_all(engine, [(p, greedy) for p in asked] + [(p, sampled) for p in asked])
        )

    model.set_attn_implementation("sdpa")
    for prompt, completion in zip(asked, completions[:6], strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )[0, len(prompt) :]
        assert completion.token_ids.tolist() == expected.tolist()
        assert (completion.logprobs == 0).all()


def test_a_stop_token_ends_a_completion_and_is_part_of_it():
    model = wide_model()
    params = SamplingParams(max_tokens=30, stop_token_ids=range(2, 40))

    with rollout.TransformersEngine(model, seed=0) as engine:
        completions = asyncio.run(generate_all(engine, [(p, params) for p in prompts(8)]))

    assert any(completion.finish_reason == "stop" for completion in completions)
    for completion in completions:
        *before, last = completion.token_ids.tolist()
        assert (2 <= last < 40) == (completion.finish_reason == "stop")
        assert not any(2 <= token < 40 for token in before)


def test_a_cancelled_request_ends_and_the_others_continue():
    model = wide_model()

    async def main(engine):
        long = asyncio.create_task(engine.generate([5, 6], SamplingParams(max_tokens=120)))
        short = asyncio.create_task(engine.generate([7], SamplingParams(max_tokens=60)))
        await asyncio.sleep(0.1)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        return await short

    with rollout.TransformersEngine(model, max_concurrent=2, seed=0) as engine:
        completion = asyncio.run(main(engine))
        again = asyncio.run(engine.generate([5], SamplingParams(max_tokens=3)))

        assert in_flight(engine) == []
        assert pages_in_use(engine) == 0

    assert len(completion.token_ids) == 60
    assert len(again.token_ids) == 3


def test_its_load_is_what_runs_waits_and_is_cached():
    """Of three requests two are decoded together; the cache has 16 pages of 32 tokens."""
    model = wide_model()
    passes = threading.Semaphore(0)

    def load(engine):
        (found,) = engine.metrics().values()
        return [found[f"vllm:{name}"] for name in ("num_requests_running", "num_requests_waiting")]

    async def main(engine):
        params = SamplingParams(max_tokens=20)
        tasks = [asyncio.create_task(engine.generate([n] * 33, params)) for n in (5, 6, 7)]
        while load(engine) != [2, 1]:  # the first pass may begin before the others are submitted
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.05)
            passes.release()
        (found,) = engine.metrics().values()
        assert found["vllm:kv_cache_usage_perc"] == 2 * 2 / 16
        passes.release(1000)
        await asyncio.gather(*tasks)
        while load(engine) != [0, 0]:
            await asyncio.sleep(0.001)

    with rollout.TransformersEngine(model, max_concurrent=2, cache_tokens=512, seed=0) as engine:
        passes.release()
        engine._model.register_forward_pre_hook(lambda *_: passes.acquire() and None)
        asyncio.run(main(engine))
        assert engine.metrics()["this process"]["vllm:kv_cache_usage_perc"] == 0
    with pytest.raises(RuntimeError, match="was closed"):
        engine.metrics()


def test_more_requests_than_fit_the_cache_all_complete():
    """Requests whose cache is evicted for lack of memory are recomputed exactly."""
    model = wide_model()
    asked = prompts(12)
    params = SamplingParams(max_tokens=60)

    with rollout.TransformersEngine(model, cache_tokens=256, seed=0) as engine:
        completions = asyncio.run(generate_all(engine, [(p, params) for p in asked]))
        (found,) = engine.metrics().values()

    assert found["vllm:num_preemptions_total"] > 0
    sampled = sum(len(completion.token_ids) for completion in completions)
    assert found["vllm:generation_tokens_total"] == sampled
    queried = found["vllm:prefix_cache_queries_total"]
    assert queried == found["vllm:prompt_tokens_total"] > sum(map(len, asked)), "some again"
    assert found["vllm:prefix_cache_hits_total"] <= queried
    for prompt, completion in zip(asked, completions, strict=True):
        check_logprobs(model, prompt, completion)


def test_updates_while_requests_are_evicted_leave_none_waiting_forever():
    model = wide_model()
    asked = prompts(20)
    params = SamplingParams(max_tokens=100)

    async def main(engine):
        tasks = [asyncio.create_task(engine.generate(prompt, params)) for prompt in asked]
        for version in (1, 2, 3):
            while most_sampled(engine) < 25 * version:
                await asyncio.sleep(0.001)
            transport = weights.SharedMemory(model, engine)
            await asyncio.to_thread(transport.publish, version)
        async with asyncio.timeout(60):
            return await asyncio.gather(*tasks)

    with rollout.TransformersEngine(model, cache_tokens=512, seed=0) as engine:
        completions = asyncio.run(main(engine))
        assert pages_in_use(engine) == 0

    for prompt, completion in zip(asked, completions, strict=True):
        check_logprobs(model, prompt, completion)


def test_a_long_prompt_is_processed_in_parts_exactly():
    model = perturbed(testing.tiny_model("qwen3_moe", max_position_embeddings=2048), seed=99)
    prompt = [random.Random(1).randrange(2, 64) for _ in range(1500)]

    with rollout.TransformersEngine(model, seed=0) as engine:
        completion = asyncio.run(engine.generate(prompt, SamplingParams(max_tokens=8)))

    check_logprobs(model, prompt, completion)


def test_a_cache_that_does_not_fit_the_memory_is_an_error_before_work_starts():
    engine = rollout.TransformersEngine(wide_model(), cache_tokens=10**12)
    with pytest.raises(RuntimeError, match="did not start: .*does not fit into memory"):
        engine.start()


def test_an_error_in_a_forward_pass_fails_its_requests_and_no_others():
    model = wide_model()
    broken = [True]

    def fail(module, arguments):
        if broken[0]:
            raise ArithmeticError("a kernel failed")

    with rollout.TransformersEngine(model) as engine:
        engine._model.register_forward_pre_hook(fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="generation failed: a kernel failed") as caught:
                asyncio.run(engine.generate([5], SamplingParams(max_tokens=3)))
            assert isinstance(caught.value.__cause__, ArithmeticError)
        broken[0] = False
        completion = asyncio.run(engine.generate([5], SamplingParams(max_tokens=3)))
        assert pages_in_use(engine) == 0

    check_logprobs(model, [5], completion)


def test_logits_that_are_not_numbers_fail_their_own_request():
    """Token 9 makes its request's numbers NaN, which must not reach others through the cache."""
    model = wide_model("qwen3")
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = float("nan")
    asked = prompts(6)
    for prompt in asked:
        prompt[:] = [token for token in prompt if token != 9] or [5]
    bad = [[4, 9], [9], [3] * 40 + [9, 5]]
    params = SamplingParams(max_tokens=20, top_k=3)

    async def main(engine):
        requests = [engine.generate(prompt, params) for prompt in bad + asked + bad]
        return await asyncio.gather(*requests, return_exceptions=True)

    with rollout.TransformersEngine(model, cache_tokens=512, seed=0) as engine:
        for _ in range(3):  # so that pages are used again
            answers = asyncio.run(main(engine))
            for answer in answers[:3] + answers[-3:]:
                assert isinstance(answer, RuntimeError)
                assert str(answer).startswith(
                    "generation failed: the logits of token 0 are not numbers under the weights "
                    "of version 0. Either the weights hold NaN"
                )
            for answer in answers[3:-3]:
                failed = isinstance(answer, RuntimeError)  # it sampled token 9 itself
                assert failed or not (answer.token_ids[:-1] == 9).any()
            assert pages_in_use(engine) == 0


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_good_weights_after_weights_that_are_not_numbers(mode):
    """Whatever was computed in between is not read again."""
    good = wide_model("qwen3")
    broken = copy.deepcopy(good)
    with torch.no_grad():
        for parameter in broken.parameters():
            parameter.fill_(float("nan"))
    asked = [*prompts(12), [5] * 70]
    params = SamplingParams(max_tokens=30)
    requests = [(prompt, params) for prompt in asked]

    with rollout.TransformersEngine(good, on_update=mode, cache_tokens=512, seed=0) as engine:
        for version in (1, 3, 5):
            weights.SharedMemory(broken, engine).publish(version)
            for prompt, _ in requests:
                with pytest.raises(RuntimeError, match="not numbers"):
                    asyncio.run(engine.generate(prompt, params))
            weights.SharedMemory(good, engine).publish(version + 1)
            completions = asyncio.run(generate_all(engine, requests))

    for prompt, completion in zip(asked, completions, strict=True):
        check_logprobs(good, prompt, completion)


def test_a_failed_update_fails_the_requests_in_flight_and_a_good_one_mends_it(monkeypatch):
    def broken(pairs):
        raise MemoryError("no room for the weights")

    model = wide_model()
    good = dict(model.state_dict())
    short = SamplingParams(max_tokens=3)

    async def main(engine):
        running = asyncio.create_task(engine.generate([5], SamplingParams(max_tokens=100)))
        while not most_sampled(engine):
            await asyncio.sleep(0.001)
        with monkeypatch.context() as patched:
            patched.setattr(engine_module, "_copy_tensors", broken)
            with pytest.raises(MemoryError):
                await asyncio.to_thread(engine.update_weights, good, version=1)
        for request in (running, engine.generate([5], short)):
            with pytest.raises(RuntimeError, match="version 1 failed: MemoryError: no room"):
                await asyncio.wait_for(request, 5)
        await asyncio.to_thread(engine.update_weights, good, version=1)
        return await engine.generate([5], short)

    with rollout.TransformersEngine(model) as engine:
        completion = asyncio.run(main(engine))

    assert completion.versions.tolist() == [1, 1, 1]


def test_the_engine_serves_a_copy():
    model = wide_model()
    original = copy.deepcopy(model.state_dict())

    with rollout.TransformersEngine(model) as engine:
        weights.SharedMemory(perturbed(model, 1), engine).publish(3)

        assert engine.version == 3
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, original[name])


def keep_busy(engine):
    """Have the engine wait in an update, so that later ones queue; return what ends it."""
    begun, ends = threading.Event(), threading.Event()

    def wait():
        begun.set()
        ends.wait(30)

    engine._decoder.update(wait, 0)
    assert begun.wait(30)
    return ends


def test_of_two_updates_at_once_the_older_one_is_refused():
    model = wide_model("qwen3")
    state = dict(model.state_dict())

    def update(version):
        engine.update_weights(state, version=version)

    with rollout.TransformersEngine(model) as engine, ThreadPoolExecutor(2) as pool:
        busy = keep_busy(engine)
        updates = engine._decoder._updates
        newer = pool.submit(update, 2)
        while len(updates) < 1:
            time.sleep(0.001)
        older = pool.submit(update, 1)
        while len(updates) < 2:
            time.sleep(0.001)
        busy.set()
        newer.result(30)
        with pytest.raises(ValueError, match="version 1 is older than 2"):
            older.result(30)
        assert engine.version == 2


def test_a_failed_update_is_remembered_by_an_engine_that_is_started_again():
    model = wide_model("qwen3")
    good = dict(model.state_dict())
    engine = rollout.TransformersEngine(model, share_weights=True)
    with engine:
        with pytest.raises(ZeroDivisionError), engine.update_in_place(version=1):
            1 / 0  # noqa: B018
        with pytest.raises(RuntimeError, match="already running"):
            engine.start()
    with engine:
        with pytest.raises(RuntimeError, match="weight update to version 1 failed"):
            asyncio.run(engine.generate([5], SamplingParams(max_tokens=3)))
        engine.update_weights(good, version=1)
        completion = asyncio.run(engine.generate([5], SamplingParams(max_tokens=3)))
    assert completion.versions.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_concurrent": 0}, "max_concurrent is 0, expected a whole number of at least 1"),
        ({"max_concurrent": 2.5}, "max_concurrent is 2.5, expected a whole number of at least 1"),
        ({"cache_tokens": 1}, "cache_tokens is 1, expected a whole number of at least 2"),
        ({"version": -1}, "version is -1, expected a whole number of at least 0"),
        ({"seed": "x"}, "seed is 'x', expected a whole number"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16', expected a torch.dtype with floating point"),
        ({"dtype": torch.int64}, "dtype is torch.int64, expected a torch.dtype with floating"),
    ],
)
def test_settings_of_another_kind_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        rollout.TransformersEngine(wide_model(), **setting)


def test_the_loop_that_has_ended_is_an_error():
    """As in a process that was forked while the engine ran."""
    with rollout.TransformersEngine(wide_model()) as engine:
        engine._decoder.close(30)
        with pytest.raises(RuntimeError, match="does not run in this process, or has ended"):
            asyncio.run(engine.generate([5], SamplingParams(max_tokens=3)))


def test_shared_weights_change_between_two_steps():
    """The trainer's own weights serve, and keep their gradients."""
    model = wide_model("qwen3")
    asked = prompts(6)
    params = SamplingParams(max_tokens=60)
    snapshots = [copy.deepcopy(model)]
    model.get_input_embeddings().weight.sum().backward()

    def train(version):
        with engine.update_in_place(version=version), torch.no_grad():
            for parameter, other in zip(
                model.parameters(), perturbed(model, version).parameters(), strict=True
            ):
                parameter.copy_(other)
            snapshots.append(copy.deepcopy(model))

    async def main():
        tasks = [asyncio.create_task(engine.generate(prompt, params)) for prompt in asked]
        for version in (1, 2):
            while most_sampled(engine) < 15 * version:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(train, version)
        return await asyncio.gather(*tasks)

    with rollout.TransformersEngine(model, share_weights=True, seed=0) as engine:
        served = {parameter.data_ptr() for parameter in engine._model.parameters()}
        assert served == {parameter.data_ptr() for parameter in model.parameters()}
        completions = asyncio.run(main())
        with pytest.raises(ValueError, match="version 1 is older than 2"):
            train(1)
        with pytest.raises(ZeroDivisionError), engine.update_in_place(version=3):
            raise ZeroDivisionError
        with pytest.raises(RuntimeError, match="ZeroDivisionError.* until .*update_in_place") as e:
            asyncio.run(engine.generate([5], params))
        assert isinstance(e.value.__cause__, ZeroDivisionError)
        assert e.value.__cause__.__traceback__ is None  # its frames hold the engine
        assert engine.version == 2

    assert model.get_input_embeddings().weight.grad is not None
    assert all(parameter.requires_grad for parameter in model.parameters())
    for prompt, completion in zip(asked, completions, strict=True):
        for version, snapshot in enumerate(snapshots):
            of_version = torch.tensor(completion.versions == version)
            assert of_version.any()
            torch.testing.assert_close(
                torch.tensor(completion.logprobs)[of_version],
                forward_logprobs(snapshot, prompt, completion, 1.0)[of_version],
                atol=TOLERANCE,
                rtol=0,
            )


def test_an_update_in_place_ends_with_the_engine():
    """It does not wait for its time limit."""
    engine = rollout.TransformersEngine(wide_model("qwen3"), share_weights=True)

    def change():
        with engine.update_in_place(version=1):
            raise AssertionError("the engine was closed")

    with engine, ThreadPoolExecutor(1) as pool:
        decoder = engine._decoder
        busy = keep_busy(engine)
        change_it = pool.submit(change)
        while not decoder._updates:
            time.sleep(0.001)
        with decoder._changed:
            decoder._closed = True
        busy.set()
        with pytest.raises(RuntimeError, match="the engine was closed"):
            change_it.result(30)


def test_an_engine_that_serves_a_copy_is_not_updated_in_place():
    with rollout.TransformersEngine(wide_model("qwen3")) as engine:
        with pytest.raises(ValueError, match="share_weights=True, or publish"):
            with engine.update_in_place(version=1):
                pass
        assert engine.version == 0


def test_calls_that_would_wait_for_their_own_update_in_place_are_refused_at_once():
    model = wide_model("qwen3")
    state = dict(model.state_dict())
    params = SamplingParams(max_tokens=2)

    def nest():
        with engine.update_in_place(version=2):
            pass

    async def main():
        other = asyncio.create_task(engine.generate([5], params, session="beside"))
        with engine.update_in_place(version=1):
            for call in (
                lambda: engine.update_weights(state, version=2),
                lambda: weights.SharedMemory(model, engine).publish(2),
                nest,
                engine.close,
            ):
                with pytest.raises(RuntimeError, match="within update_in_place"):
                    call()
            for request in (
                engine.generate([5], params),
                asyncio.gather(engine.generate([5], params)),
                asyncio.to_thread(engine.update_weights, state, version=2),
            ):
                with pytest.raises(RuntimeError, match="within update_in_place"):
                    await request
            await asyncio.sleep(0.05)  # the other task sends its request meanwhile
        return await other, await engine.generate([5], params)

    with rollout.TransformersEngine(model, share_weights=True) as engine:
        completions = asyncio.run(asyncio.wait_for(main(), 60))
        nest()
        assert engine.version == 2

    assert [completion.versions.tolist() for completion in completions] == [[1, 1], [1, 1]]


def test_an_update_that_does_not_begin_in_time_does_not_take_effect():
    model = wide_model("qwen3")
    state = dict(model.state_dict())
    with rollout.TransformersEngine(model, share_weights=True) as engine:
        with ThreadPoolExecutor(1) as pool, engine.update_in_place(version=1):
            update = pool.submit(engine.update_weights, state, version=2, timeout_s=0.05)
            with pytest.raises(RuntimeError, match="0.05 s; loading has not begun, and will not"):
                update.result(30)
        assert engine.version == 1


def test_an_engine_whose_update_failed_is_freed_when_it_is_dropped():
    model = testing.tiny_model("qwen3")
    engine = rollout.TransformersEngine(model, share_weights=True).start()
    with pytest.raises(ZeroDivisionError), engine.update_in_place(version=1):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="until update_weights or update_in_place succeeds"):
        asyncio.run(engine.generate([5], SamplingParams(max_tokens=2)))
    thread = engine._decoder._thread
    del engine
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


class UncopiedError(Exception):
    def __init__(self, *, text):
        super().__init__(text)


def test_an_error_that_cannot_be_copied_is_named_too():
    with rollout.TransformersEngine(wide_model("qwen3"), share_weights=True) as engine:
        with pytest.raises(UncopiedError), engine.update_in_place(version=1):
            raise UncopiedError(text="the step diverged")
        with pytest.raises(RuntimeError, match="UncopiedError: the step diverged"):
            asyncio.run(engine.generate([5], SamplingParams(max_tokens=2)))


def test_weights_in_another_dtype_cannot_be_shared():
    with pytest.raises(ValueError, match="can't be shared in torch.bfloat16"):
        rollout.TransformersEngine(wide_model(), dtype=torch.bfloat16, share_weights=True)


def test_a_smaller_dtype_rounds_the_copy_and_its_updates_and_nothing_else():
    model = wide_model("qwen3")
    other = perturbed(model, 1)
    params = SamplingParams(max_tokens=20)

    with rollout.TransformersEngine(model, dtype=torch.bfloat16, seed=0) as engine:
        for version, source in enumerate((model, other)):
            weights.SharedMemory(source, engine).publish(version)
            completion = asyncio.run(engine.generate([5, 6, 7], params))

            rounded = copy.deepcopy(source).to(torch.bfloat16)
            logprobs = torch.tensor(completion.logprobs)
            for reference, least, most in ((rounded, 0.0, 0.05), (source, 1e-4, 0.2)):
                expected = forward_logprobs(reference, [5, 6, 7], completion, 1.0).float()
                assert least <= (expected - logprobs).abs().mean() < most
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_wrong_weights_are_refused_and_change_nothing():
    model = wide_model()
    good = dict(model.state_dict())
    name = next(iter(good))

    with rollout.TransformersEngine(model) as engine:
        engine.update_weights(good, version=2)
        for bad, message in [
            ({k: v for k, v in good.items() if k != name}, "no weights were given for"),
            (good | {name: torch.zeros(1)}, "have shape"),
            (good | {"extra": torch.zeros(1)}, "no such tensor"),
        ]:
            with pytest.raises(ValueError, match=message):
                engine.update_weights(bad, version=3)
        with pytest.raises(ValueError, match="older"):
            engine.update_weights(good, version=1)
        for version in (-1, 2.5, "3", True):
            with pytest.raises(ValueError, match="expected a whole number of at least 0"):
                engine.update_weights(good, version=version)

        assert engine.version == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: (tensor * 100).to(torch.int8), "have the dtype torch.int8"),
        (lambda tensor: tensor.to("meta"), "have no values"),
    ],
)
def test_weights_of_another_kind_are_refused_and_change_nothing(change, message):
    model = testing.tiny_model("qwen3")
    given = dict(model.state_dict())
    name = next(iter(given))
    with rollout.TransformersEngine(model, seed=0) as engine:
        before = asyncio.run(generate_all(engine, [([5, 6, 7], SamplingParams(max_tokens=8))]))
        with pytest.raises(ValueError, match=f"weights for '{name}' {message}"):
            engine.update_weights({**given, name: change(given[name])}, version=1)
        assert engine.version == 0
        again = asyncio.run(generate_all(engine, [([5, 6, 7], SamplingParams(max_tokens=8))]))
    assert len(before[0].token_ids) == len(again[0].token_ids)


def test_an_engine_that_is_dropped_without_being_closed_is_freed():
    engine = rollout.TransformersEngine(testing.tiny_model("qwen3"), seed=0).start()
    asyncio.run(generate_all(engine, [([5, 6, 7], SamplingParams(max_tokens=8))]))
    model = weakref.ref(engine._model)
    thread = engine._decoder._thread
    del engine
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    gc.collect()
    assert model() is None


def test_tied_weights_are_sent_once_and_loaded_under_both_names():
    model = testing.tiny_model("llama", tie_word_embeddings=True)
    other = perturbed(model, 3)
    params = SamplingParams(max_tokens=5)

    with rollout.TransformersEngine(model) as engine:
        weights.SharedMemory(other, engine).publish(1)
        completion = asyncio.run(engine.generate([5, 6], params))

    torch.testing.assert_close(
        forward_logprobs(other, [5, 6], completion, 1.0),
        torch.tensor(completion.logprobs),
        atol=TOLERANCE,
        rtol=0,
    )


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("falcon_mamba", "linear_attention layers"),
        ("minimax_m3_vl_text", "MiniMaxM3VLAttention layers"),
        ("deepseek_v4", "DeepseekV4Attention layers"),
        ("llama4_text", "chunked_attention layers"),
        ("falcon", "its own attention implementation"),
    ],
)
def test_unsupported_models_are_refused_naming_vllm(family, reason):
    with pytest.raises(ValueError, match=f"^{family} .*{reason}.*vLLM"):
        rollout.TransformersEngine(tiny_family(family))


@pytest.mark.parametrize("has_other_head", [False, True])
def test_a_model_without_a_language_model_head_is_refused(has_other_head):
    from transformers import LlamaForSequenceClassification

    model = testing.tiny_model("llama")
    headless = LlamaForSequenceClassification(model.config) if has_other_head else model.model
    with pytest.raises(ValueError, match="has no language-model head; expected a causal"):
        rollout.TransformersEngine(headless)


def test_inference_mode_is_refused():
    model = wide_model()
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        rollout.TransformersEngine(model)
    with (
        rollout.TransformersEngine(model) as engine,
        torch.inference_mode(),
        pytest.raises(RuntimeError, match="inference_mode"),
    ):
        engine.update_weights(dict(model.state_dict()), version=1)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(max_tokens=3), "prompt is empty"),
        ([5, 64], SamplingParams(max_tokens=3), "vocabulary of 64"),
        ([-1], SamplingParams(max_tokens=3), "vocabulary of 64"),
        ([5], SamplingParams(max_tokens=128), "the context of 128 .* the model's positions"),
        (
            [1.5],
            SamplingParams(max_tokens=3),
            r"the prompt is \[1.5\]; expected a sequence of token",
        ),
        ("hello", SamplingParams(max_tokens=3), "the prompt is 'hello'; expected a sequence of"),
        (None, SamplingParams(max_tokens=3), "the prompt is None; expected .*tokenizer.encode"),
        ([[5, 6]], SamplingParams(max_tokens=3), "expected a sequence of token ids"),
    ],
)
def test_requests_that_it_cannot_serve_are_refused(prompt, params, message):
    with rollout.TransformersEngine(wide_model()) as engine:
        with pytest.raises(ValueError, match=message):
            asyncio.run(engine.generate(prompt, params))


def test_a_request_beyond_a_small_cache_is_refused_naming_the_cache():
    with rollout.TransformersEngine(wide_model(), cache_tokens=31) as engine:
        with pytest.raises(ValueError, match=r"31 tokens, the limit of .*\(cache_tokens\)"):
            asyncio.run(engine.generate([5], SamplingParams(max_tokens=31)))


def test_an_engine_that_was_closed_says_so_and_can_be_started_again():
    engine = rollout.TransformersEngine(wide_model())
    with engine:
        pass
    with pytest.raises(RuntimeError, match=r"was closed; engine.start\(\) serves again"):
        asyncio.run(engine.generate([5], SamplingParams(max_tokens=3)))
    with pytest.raises(RuntimeError, match="was closed"):
        engine.metrics()
    engine.start()
    completion = asyncio.run(engine.generate([5], SamplingParams(max_tokens=3)))
    engine.close()
    assert len(completion.token_ids) == 3


def test_an_engine_that_is_not_running_raises():
    engine = rollout.TransformersEngine(wide_model())
    with pytest.raises(RuntimeError, match="with TransformersEngine"):
        asyncio.run(engine.generate([5], SamplingParams(max_tokens=3)))
    with pytest.raises(ValueError, match="on_update='both'"):
        rollout.TransformersEngine(wide_model(), on_update="both")


def test_closing_fails_what_is_in_flight_and_leaves_no_thread():
    before = {*threading.enumerate()}

    async def main():
        with rollout.TransformersEngine(wide_model()) as engine:
            running = asyncio.create_task(engine.generate([5], SamplingParams(max_tokens=120)))
            await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError):
            await running

    asyncio.run(main())

    left = {thread.name for thread in {*threading.enumerate()} - before}
    assert left <= {"primerl-clock"}, "one thread of the process, for all workers"


@pytest.mark.thorough
def test_a_process_exits_although_nobody_closed_its_engine():
    """The library's own thread would keep it waiting for ever."""
    script = (
        "from primerl import rollout, testing\n"
        "engine = rollout.TransformersEngine(testing.tiny_model()).start()\n"
        "raise ZeroDivisionError\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, encoding="utf-8", timeout=120
    )
    assert child.returncode == 1
    assert child.stderr.endswith("ZeroDivisionError\n")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_on_cuda_logprobs_equal_the_forward(mode):
    models = [wide_model().cuda()]
    models.append(perturbed(wide_model(), 1).cuda())
    params = SamplingParams(max_tokens=10)

    with rollout.TransformersEngine(models[0], on_update=mode, seed=0) as engine:
        for version, model in enumerate(models):
            weights.SharedMemory(model, engine).publish(version)
            completion = asyncio.run(engine.generate([5, 6, 7], params))
            token_ids = torch.tensor([5, 6, 7, *completion.token_ids.tolist()], device="cuda")
            with torch.no_grad():
                ours = loss.model_logprobs(
                    model, token_ids, torch.arange(13, device="cuda"), token_ids.roll(-1)
                )[2:-1]
            torch.testing.assert_close(
                ours.cpu(), torch.tensor(completion.logprobs), atol=1e-4, rtol=0
            )


def test_a_resumed_run_serves_the_version_that_it_has_reached():
    with rollout.TransformersEngine(testing.tiny_model(), version=40) as engine:
        completion = asyncio.run(engine.generate([3, 4], SamplingParams(max_tokens=2)))

        assert engine.version == 40
        assert completion.versions.tolist() == [40, 40]
        with pytest.raises(ValueError, match="version 39 is older than 40"):
            engine.update_weights({}, version=39)
