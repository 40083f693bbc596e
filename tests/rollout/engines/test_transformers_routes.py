"""Routes that the engine in this process records, against a plain forward pass of each version."""

import asyncio
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_sample
from recording_store import RecordingStore
from served_models import generate_all, in_flight, most_sampled, perturbed, prompts, wide_model

from primerl import replay, rollout, testing, weights
from primerl.rollout.engines.contract import check_routes
from primerl.testing.families import tiny_family
from primerl.types import Rollout, SamplingParams


def engine_with_routes(model, store, **settings):
    return rollout.TransformersEngine(
        model, routes=store, capture=replay.capture, seed=0, **settings
    )


def plain_rows(model, token_ids):
    with torch.no_grad(), replay.capture(model) as routes:
        model(torch.tensor([token_ids]))
    return np.sort(routes.rows.numpy(), axis=-1)


def check_rows(models, prompt, completion, put):
    """Each row is what a forward pass of the version that it claims chooses, as a set."""
    rows, given = put
    token_ids = prompt + completion.token_ids.tolist()
    assert given["start"] + len(rows) == len(token_ids) - 1
    versions = np.array(given["versions"])
    for version in set(given["versions"]):
        plain = plain_rows(models[version], token_ids)[given["start"] : -1]
        ours = np.sort(rows, axis=-1)
        assert (ours == plain)[versions == version].all()


def test_routes_of_requests_that_are_batched_together():
    model, store = wide_model(), RecordingStore()
    asked = prompts(12)
    params = [SamplingParams(max_tokens=3 + n % 5) for n in range(12)]
    with engine_with_routes(model, store) as engine:
        completions = asyncio.run(generate_all(engine, list(zip(asked, params, strict=True))))

    for prompt, completion in zip(asked, completions, strict=True):
        (reference,) = completion.routes
        put = store.puts[int(reference.removeprefix("fake:"))]
        assert put[0].shape[1:] == (2, 2)
        assert put[1]["shared"] == len(prompt) - 1
        assert set(put[1]["versions"]) == {0}
        check_rows([model], prompt, completion, put)


class StoreInThreads(RecordingStore):
    """Routes of up to ``instant`` tokens take no time; notes in which threads it is called."""

    def __init__(self, instant):
        super().__init__()
        self.instant = instant
        self.threads = []

    def is_instant(self, tokens):
        return tokens <= self.instant

    def put(self, rows, **given):
        self.threads.append(threading.current_thread().name)
        return super().put(rows, **given)

    def check(self, sample):
        self.threads.append(threading.current_thread().name)


@pytest.mark.thorough
@pytest.mark.parametrize("instant", [2, 3])
def test_a_store_is_called_in_a_thread_unless_that_would_take_longer(instant):
    store = StoreInThreads(instant)
    with engine_with_routes(wide_model(), store) as engine:
        asyncio.run(engine.generate([5], SamplingParams(max_tokens=3)))

    assert store.threads[0].startswith("MainThread" if instant == 3 else "asyncio")


@pytest.mark.parametrize("instant", [2, 3])
def test_routes_are_checked_in_a_thread_unless_that_would_take_longer(instant):
    store = StoreInThreads(instant)
    sample = make_sample(1, 2)
    checked = check_routes(Rollout(samples=[sample], reward=0.0), SimpleNamespace(routes=store))
    asyncio.run(checked)

    assert store.threads[0].startswith("MainThread" if instant == 3 else "asyncio")


@pytest.mark.thorough
@pytest.mark.parametrize("known", [4, 5])
def test_routes_that_are_known_are_left_out(known):
    model, store = wide_model(), RecordingStore()
    prompt = [5, 9, 2, 30, 7]
    params = SamplingParams(max_tokens=3, routes_start=known)
    with engine_with_routes(model, store) as engine:
        (completion,) = asyncio.run(generate_all(engine, [(prompt, params)]))

    ((rows, given),) = store.puts
    assert given["start"] == known
    assert len(rows) == 5 + 3 - 1 - known
    assert given["shared"] == 0
    check_rows([model], prompt, completion, (rows, given))


@pytest.mark.thorough
def test_a_single_token_after_known_ones_has_no_routes():
    store = RecordingStore()
    params = SamplingParams(max_tokens=1, routes_start=2)
    with engine_with_routes(wide_model(), store) as engine:
        (completion,) = asyncio.run(generate_all(engine, [([5, 9], params)]))
        with pytest.raises(ValueError, match="routes_start is 2, beyond the prompt of 1 tokens"):
            asyncio.run(generate_all(engine, [([5], params)]))
    assert completion.routes == ()
    assert store.puts == []


def test_greedy_completions_have_no_routes():
    store = RecordingStore()
    with engine_with_routes(wide_model(), store) as engine:
        greedy = SamplingParams(max_tokens=3, temperature=0)
        (completion,) = asyncio.run(generate_all(engine, [([5, 9], greedy)]))
    assert completion.routes == ()
    assert store.puts == []


@pytest.mark.thorough
def test_what_was_recorded_first_wins_when_weights_change_in_mid_completion():
    """The cache is recomputed with the new weights, which routes earlier tokens again."""
    models = [wide_model()]
    models += [perturbed(models[0], seed) for seed in (1, 2)]
    store = RecordingStore()

    async def main(engine):
        asked = prompts(6, seed=1)
        tasks = [
            asyncio.create_task(engine.generate(prompt, SamplingParams(max_tokens=40)))
            for prompt in asked
        ]
        for version, model in enumerate(models[1:], start=1):
            while most_sampled(engine) < 10 * version:
                await asyncio.sleep(0.001)
            transport = weights.SharedMemory(model, engine)
            await asyncio.to_thread(transport.publish, version)
        return list(zip(asked, await asyncio.gather(*tasks), strict=True))

    with engine_with_routes(models[0], store) as engine:
        answers = asyncio.run(main(engine))

    seen = set()
    for prompt, completion in answers:
        put = store.puts[int(completion.routes[0].removeprefix("fake:"))]
        assert put[1]["versions"][len(prompt) - 1 :] == completion.versions.tolist()
        assert put[1]["versions"][: len(prompt) - 1] == [completion.versions[0]] * (len(prompt) - 1)
        check_rows(models, prompt, completion, put)
        seen.update(put[1]["versions"])
    assert seen == {0, 1, 2}


def test_an_update_in_the_middle_of_a_prompt_replaces_its_routes():
    """Nothing was sampled from those of the older weights."""
    settings = {"max_position_embeddings": 2048}
    models = [perturbed(testing.tiny_model("qwen3_moe", **settings), seed) for seed in (1, 2)]
    store = RecordingStore()
    rng = random.Random(0)
    prompt = [rng.randrange(2, 64) for _ in range(1200)]

    async def main(engine):
        task = asyncio.create_task(engine.generate(prompt, SamplingParams(max_tokens=2)))
        while not any(request.computed for request in in_flight(engine)):
            await asyncio.sleep(0)
        transport = weights.SharedMemory(models[1], engine)
        await asyncio.to_thread(transport.publish, 1)
        return await task

    with engine_with_routes(models[0], store) as engine:
        completion = asyncio.run(main(engine))

    ((rows, given),) = store.puts
    if completion.versions[0] == 1:  # else the prompt was faster
        assert set(given["versions"]) == {1}
    check_rows(models, prompt, completion, (rows, given))


@pytest.mark.thorough
def test_a_request_that_is_cancelled_leaves_no_routes():
    store = RecordingStore()

    async def main(engine):
        task = asyncio.create_task(engine.generate([3, 4], SamplingParams(max_tokens=100)))
        while not most_sampled(engine):
            assert not task.done()
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await asyncio.wait_for(engine.generate([3], SamplingParams(max_tokens=2)), 60)

    with engine_with_routes(wide_model(), store) as engine:
        completion = asyncio.run(main(engine))
        assert in_flight(engine) == []
    assert completion.routes == ("fake:0",)
    assert len(store.puts) == 1


def test_routes_of_tokens_that_another_request_computed():
    """A group shares its prompt, and a later turn shares the first one's tokens."""
    model, store = wide_model(), RecordingStore()
    rng = random.Random(3)
    prompt = [rng.randrange(2, 64) for _ in range(45)]
    params = SamplingParams(max_tokens=10)
    with engine_with_routes(model, store) as engine:
        group = asyncio.run(generate_all(engine, [(prompt, params)] * 4))
        turn = [*prompt, *group[0].token_ids.tolist(), 7, 8]
        (last,) = asyncio.run(generate_all(engine, [(turn, params)]))
        reused = engine.metrics()["this process"]["vllm:prefix_cache_hits_total"]

    assert reused == 3 * 44 + 54
    for asked, completion in [*((prompt, one) for one in group), (turn, last)]:
        put = store.puts[int(completion.routes[0].removeprefix("fake:"))]
        check_rows([model], asked, completion, put)


def test_what_the_store_refuses_fails_the_request():
    store = RecordingStore(fault="layer 1 has 8 experts, not 64")
    with (
        engine_with_routes(wide_model(), store) as engine,
        pytest.raises(ValueError, match="layer 1 has 8 experts"),
    ):
        asyncio.run(generate_all(engine, [([3], SamplingParams(max_tokens=2))]))


def test_a_store_alone_or_a_dense_model_is_refused():
    with pytest.raises(ValueError, match="capture=replay.capture"):
        rollout.TransformersEngine(wide_model(), routes=RecordingStore())
    threads = set(threading.enumerate())
    with pytest.raises(ValueError, match="no layers with routed experts"):
        engine_with_routes(wide_model("qwen3"), RecordingStore()).start()
    assert set(threading.enumerate()) <= threads, "nothing is left running"


def test_an_engine_that_does_not_start_leaves_no_hooks():
    engine = engine_with_routes(wide_model(), RecordingStore(), cache_tokens=10**12)
    with pytest.raises(RuntimeError, match="did not start"):
        engine.start()
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in engine._model.modules()
    )


def test_routes_of_requests_that_go_on_from_a_snapshot_of_recurrent_states():
    model, store = perturbed(tiny_family("lfm2_moe").eval(), 7), RecordingStore()
    asked = [[2 + n % 50 for n in range(40)]] * 3
    params = SamplingParams(max_tokens=6)
    with engine_with_routes(model, store) as engine:
        completions = asyncio.run(generate_all(engine, [(one, params) for one in asked]))
        turn = [*asked[0], *completions[0].token_ids.tolist(), 5]
        completions += asyncio.run(generate_all(engine, [(turn, params)]))
        hits = engine.metrics()["this process"]["vllm:prefix_cache_hits_total"]

    assert hits == 2 * 32 + 45
    for prompt, completion in zip([*asked, turn], completions, strict=True):
        (reference,) = completion.routes
        check_rows([model], prompt, completion, store.puts[int(reference.removeprefix("fake:"))])
