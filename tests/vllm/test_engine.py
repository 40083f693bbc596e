"""VLLMEngine on real vLLM: the contract, its numbers, and what becomes of it as servers die."""

import asyncio
import os
import signal
import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from primerl import rollout, testing, weights
from primerl.types import SamplingParams

P = SamplingParams
TOLERANCE = 5e-5  # of logprobs in float32


def run(coroutine, timeout_s=120):
    return asyncio.run(asyncio.wait_for(coroutine, timeout_s))


def until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def model(smollm2):
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture
def engine(server):
    with rollout.VLLMEngine(server) as engine:
        engine.adopt(0)
        yield engine


def expected(model, prompt, completion, temperature=1.0):
    """Logprobs of a completion by a plain forward pass."""
    tokens = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        logits = model(tokens).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(-1, tokens[0, len(prompt) :, None])[:, 0].numpy()


def prompts_of(count, length=12, seed=0):
    return np.random.default_rng(seed).integers(100, 40_000, (count, length)).tolist()


def test_check_engine(engine):
    outcomes = testing.check_engine(
        engine, prompt_ids=[504, 3575, 282], update=engine.adopt, timeout_s=120.0
    )
    assert set(outcomes.values()) == {"passed"}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_forward_pass(engine, model, temperature):
    async def sample():
        params = P(max_tokens=24, temperature=temperature)
        prompts = prompts_of(8)
        return prompts, await asyncio.gather(*(engine.generate(one, params) for one in prompts))

    prompts, answers = run(sample())
    for prompt, answer in zip(prompts, answers, strict=True):
        wanted = expected(model, prompt, answer.token_ids, temperature)
        np.testing.assert_allclose(answer.logprobs, wanted, atol=TOLERANCE)


def test_scores_are_those_of_a_forward_pass(engine, model):
    tokens = prompts_of(1, 40)[0]
    scores = run(engine.score(tokens))
    assert scores[0] == 0
    np.testing.assert_allclose(scores[1:], expected(model, tokens[:1], tokens[1:]), atol=TOLERANCE)


def test_the_probe_is_the_trainers(engine, model):
    (replies,) = engine.probe(prompts_of(2, 20), max_new_tokens=6).values()
    for tokens, reply in zip(prompts_of(2, 20), replies, strict=True):
        np.testing.assert_allclose(
            reply["scores"][1:], expected(model, tokens[:1], tokens[1:]), atol=TOLERANCE
        )
        wanted = expected(model, tokens, reply["token_ids"])
        np.testing.assert_allclose(reply["logprobs"], wanted, atol=TOLERANCE)


def test_the_end_of_text_ends_nothing_unless_it_is_asked_for(engine, model, smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    end = model.config.eos_token_id
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say hi."}], add_generation_prompt=True, return_dict=False
    )
    whole = run(engine.generate(prompt, P(max_tokens=100, temperature=0)))
    assert len(whole.token_ids) == 100
    assert end in whole.token_ids[:-1], "this prompt was to have a short answer"
    cut = run(engine.generate(prompt, P(max_tokens=100, temperature=0, stop_token_ids=[end])))
    place = whole.token_ids.tolist().index(end)
    assert cut.token_ids.tolist() == whole.token_ids.tolist()[: place + 1]
    assert cut.finish_reason == "stop"


def test_a_seed_repeats(engine):
    params = P(max_tokens=12, seed=5)
    first, second = [run(engine.generate([504, 3575], params)).token_ids.tolist() for _ in "ab"]
    assert first == second


def test_what_the_server_refuses(engine):
    with pytest.raises(ValueError, match="vocabulary"):
        run(engine.generate([10**6], P(max_tokens=1)))
    assert len(run(engine.generate([5], P(max_tokens=1))).token_ids) == 1


def running(engine):
    return sum(one["vllm:num_requests_running"] for one in engine.metrics().values())


def test_cancellation_is_seen_by_the_server(engine):
    async def scenario():
        requests = [
            asyncio.ensure_future(engine.generate([504, 9], P(max_tokens=900))) for _ in range(8)
        ]
        while await asyncio.to_thread(running, engine) < 8:
            await asyncio.sleep(0.05)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        began = time.monotonic()
        while await asyncio.to_thread(running, engine):
            await asyncio.sleep(0.05)
        return time.monotonic() - began

    assert run(scenario()) < 2.0  # 1 s, and what a busy computer adds


def test_a_key_that_is_wrong(server):
    with rollout.VLLMEngine(server.url, api_key="wrong", down_timeout_s=1.0) as engine:
        with pytest.raises(RuntimeError, match="401"):
            run(engine.generate([5], P(max_tokens=1)))


# ---- two servers ----


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model that starts in seconds, with a tokenizer, so that vLLM checks what it is asked."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = testing.character_tokenizer()
    model = testing.tiny_model(
        "qwen3",
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    weights.save_pretrained(model, folder, tokenizer=tokenizer)
    return model, str(folder)


@pytest.fixture(scope="module")
def pair(start_server, tiny):
    with start_server(tiny[1], api_key="pair") as first:
        with start_server(tiny[1], api_key="pair") as second:
            yield first, second


def kill(server):
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.alive)


def hits(engine):
    return sum(one["vllm:prefix_cache_hits_total"] for one in engine.metrics().values())


def test_sessions_stay_where_their_cache_is(pair):
    """Turns of conversations over two engines: with sessions the cache has what came before."""
    rng = np.random.default_rng(0)

    async def turns(engine, *, sessions):
        for turn in range(1, 4):
            await asyncio.gather(
                *(
                    engine.generate(
                        talk[: 128 * turn + 1],
                        P(max_tokens=1),
                        session=f"{n}" if sessions else None,
                    )
                    for n, talk in enumerate(talks)
                )
            )

    shares = {}
    with rollout.VLLMEngine(pair) as engine:
        engine.adopt(0)
        for sessions in (True, False):
            talks = rng.integers(3, 60, (7, 400)).tolist()
            before = hits(engine)
            run(turns(engine, sessions=sessions))
            shares[sessions] = (hits(engine) - before) / (7 * (128 + 256))
    assert shares[True] == 1.0, "each turn finds all blocks of the turns before"
    assert shares[False] < 0.9


def test_kill_one_restart_it_and_kill_both(pair, tiny, tmp_path):
    first, second = pair
    model, _ = tiny
    with rollout.VLLMEngine(pair, down_timeout_s=3.0) as engine:
        transport = weights.Disk(model, engine, folder=tmp_path / "publications")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        transport.publish(1)

        async def under_fire():
            params = P(max_tokens=400)
            requests = [asyncio.ensure_future(engine.generate([5, 6], params)) for _ in range(16)]
            while not all(row["in_flight"] for row in await asyncio.to_thread(engine.replicas)):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(kill, first)
            return await asyncio.gather(*requests)

        answers = run(under_fire())
        assert [len(one.token_ids) for one in answers] == [400] * 16
        assert {int(v) for one in answers for v in one.versions} == {1}
        assert [row["alive"] for row in engine.replicas()] == [False, True]

        first.restart()
        until(lambda: engine.replicas()[0]["serving"])
        assert engine.replicas()[0]["version"] == 1

        async def many():
            return await asyncio.gather(*(engine.generate([7], P(max_tokens=8)) for _ in range(8)))

        for one in run(many()):
            wanted = expected(model, [7], one.token_ids)
            np.testing.assert_allclose(one.logprobs, wanted, atol=TOLERANCE)
        (replies,) = {str(reply) for reply in engine.probe([[5, 6, 7, 8]]).values()}
        assert replies, "the one that returned answers as the other does"

        kill(first)
        kill(second)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=f"(?s){first.url} is down.*{second.url} is down"):
            run(engine.generate([5], P(max_tokens=1)))
        assert time.monotonic() - began < 3.0 + 2.0
