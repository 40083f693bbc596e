"""VLLMEngine on real vLLM: the contract, its numbers, sessions. Issue 5, Shows 7 and 10."""

import asyncio
import time

import numpy as np
import pytest
import torch
from publishing import ROUNDING, check_logprobs, check_rounding, logprobs_of
from transformers import AutoTokenizer

from primerl import loss, models, rollout, serving, testing, weights
from primerl.serving.client.routing import RoutedRequest
from primerl.serving.client.servers import KnownServers
from primerl.types import SamplingParams, TrainingSample

P = SamplingParams


def run(coroutine, timeout_s=120):
    return asyncio.run(asyncio.wait_for(coroutine, timeout_s))


@pytest.fixture(scope="module")
def model(smollm2, server):
    """The checkpoint, which the server holds too, whatever was published before."""
    model, _ = models.load_pretrained(smollm2)
    with serving.VLLMEngine(server) as engine:
        weights.SharedMemory(model, engine).publish(0)
    return model.eval()


@pytest.fixture
def engine(server, model):
    with serving.VLLMEngine(server) as engine:
        engine.adopt(0)
        yield engine


def expected(model, prompt, completion, temperature=1.0):
    """Logprobs of a completion by a plain forward pass."""
    tokens = [*prompt, *completion]
    return logprobs_of(model, tokens, temperature=temperature)[len(prompt) :].numpy()


TEXT = (
    "The harbour was quiet in the morning. A few boats had come in during the night, and the fish "
    "lay in boxes on the wet stones, covered with ice and straw. An old man counted them, wrote "
    "the number on a slate, and lit his pipe. Later the buyers would come from the town, with "
    "their carts and their loud voices, and by noon everything would be sold or thrown away."
)


@pytest.fixture(scope="module")
def prompts_of(smollm2):
    """Prompts of a text: of random tokens, logprobs of -12 differ by more than the tolerance."""
    tokens = AutoTokenizer.from_pretrained(smollm2).encode(TEXT)
    return lambda count, length=12: [tokens[3 * n : 3 * n + length] for n in range(count)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_forward_pass(engine, model, prompts_of, temperature):
    async def sample():
        params = P(max_tokens=24, temperature=temperature)
        prompts = prompts_of(8)
        return prompts, await asyncio.gather(*(engine.generate(one, params) for one in prompts))

    prompts, answers = run(sample())
    differences = [
        answer.logprobs - expected(model, prompt, answer.token_ids, temperature)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    check_rounding(np.abs(np.concatenate(differences)))
    assert engine.vocab_size == model.config.vocab_size


def test_turns_that_send_what_is_new_are_those_of_the_whole_prompt(engine, model, prompts_of):
    """Through the middleware that keeps prompts, until the server has forgotten them."""
    sent = []
    prompt = prompts_of(1, 40)[0]

    async def play():
        tokens = list(prompt)
        for turn in range(4):
            dispatcher = engine._connected().dispatcher
            answer = await engine.generate(tokens, P(max_tokens=8), session="turns")
            check_logprobs(answer.logprobs, expected(model, tokens, answer.token_ids))
            (known,) = dispatcher._prompts._known["turns"]
            sent.append(known.held == len(known.text))
            if turn == 1:
                known.name = "never kept"  # the server answers 409
            tokens += [*answer.token_ids.tolist(), *prompt[turn : turn + 3]]

    run(play())
    assert sent == [True] * 4  # confirmed each time


def test_scores_are_those_of_a_forward_pass(engine, model, prompts_of):
    tokens = prompts_of(1, 40)[0]
    scores = run(engine.score(tokens))
    assert scores[0] == 0
    check_logprobs(scores[1:], expected(model, tokens[:1], tokens[1:]))


def test_the_likeliest_tokens_are_those_of_a_forward_pass(engine, model, prompts_of):
    """What a teacher on a server says, as one in this process would."""
    tokens = torch.tensor(prompts_of(1, 40)[0])
    scores, ids, logprobs = run(engine.score_top_k(tokens.tolist(), k=20))

    rows = {"token_ids": tokens, "position_ids": torch.arange(40), "labels": tokens.roll(-1)}
    wanted, _, top = loss.model_top_k_logprobs(model, **rows, k=20)
    candidates = torch.tensor(ids[1:]).long()
    rows = {"token_ids": tokens[:-1], "position_ids": torch.arange(39), "candidates": candidates}
    by_id = loss.model_candidate_logprobs(model, **rows).detach()

    assert (scores[0], ids[0].any(), logprobs[0].any()) == (0, False, False)
    check_logprobs(scores[1:], wanted[:-1])
    check_logprobs(logprobs[1:], top[:-1])
    check_logprobs(logprobs[1:], by_id)


def test_more_of_the_likeliest_tokens_than_the_server_gives_are_refused(engine):
    with pytest.raises(ValueError, match="prompt logprobs of 21, .*greater than max allowed: 20"):
        run(engine.score_top_k([504, 3575], k=21))


def test_the_servers_tokenizer_is_compared(engine, smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    engine.refuse_other_tokenizer(tokenizer)
    tokenizer.add_tokens(["<a new token>"])
    with pytest.raises((ValueError, RuntimeError), match="detokenize|another tokenizer"):
        engine.refuse_other_tokenizer(tokenizer)
    with pytest.raises(ValueError, match="another tokenizer"):
        engine.refuse_other_tokenizer(testing.character_tokenizer("abc"))


def test_a_server_teaches(server, model, smollm2, prompts_of):
    """Another client, of a run of its own, scores samples: one of them is too long."""
    samples = [
        TrainingSample(
            token_ids=tokens,
            loss_mask=np.arange(len(tokens)) > 3,
            behavior_logprobs=np.zeros(len(tokens)),
            versions=np.zeros(len(tokens)),
            advantages=np.zeros(len(tokens)),
        )
        for tokens in [*prompts_of(6), [504] * 2000]
    ]
    with serving.VLLMEngine(server, run="teacher") as teacher:
        teacher.adopt(0)
        scores = rollout.score_samples(teacher, samples, top_k=5)
    scored, missing = rollout.with_scores(samples, scores, top_k=5)

    assert [one.reason for one in missing] == ["refused"]
    assert "2000 tokens" in missing[0].error
    for one in scored[:-1]:
        wanted = expected(model, one.token_ids[:1].tolist(), one.token_ids[1:].tolist())
        check_logprobs(one.ref_logprobs[1:], wanted)
        assert (one.ref_top_logprobs[1:, 0] >= one.ref_logprobs[1:] - 20 * ROUNDING).all()


def test_the_canary_is_a_little_longer_than_two_cache_blocks(engine, model):
    assert engine.cache_block == 32
    assert {len(one) for one in weights.Canary(model, engine).sequences} == {2 * 32 + 8}


def test_the_probe_matches_the_trainer(engine, model, prompts_of):
    (replies,) = engine.probe(prompts_of(2, 20), max_new_tokens=6).values()
    for tokens, reply in zip(prompts_of(2, 20), replies, strict=True):
        check_logprobs(reply["scores"][1:], expected(model, tokens[:1], tokens[1:]))
        wanted = expected(model, tokens, reply["token_ids"])
        check_logprobs(reply["logprobs"], wanted)


def test_end_of_text_ends_a_completion_only_if_requested(engine, model, smollm2):
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


def test_requests_that_the_server_refuses(engine):
    with pytest.raises(ValueError, match="vocabulary"):
        run(engine.generate([10**6], P(max_tokens=1)))
    assert len(run(engine.generate([5], P(max_tokens=1))).token_ids) == 1


def running(engine):
    return sum(one["vllm:num_requests_running"] for one in engine.metrics().values())


def test_cancellation_reaches_the_server(engine):
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


def test_a_wrong_key(server):
    with serving.VLLMEngine(server.url, api_key="wrong", down_timeout_s=1.0) as engine:
        with pytest.raises(RuntimeError, match="401"):
            run(engine.generate([5], P(max_tokens=1)))


# ---- two servers of a tiny model ----


def test_a_probe_does_not_queue_behind_rollouts(engine, prompts_of):
    """Half of the requests wait until another has ended; the probe goes first, twice."""
    ended = []

    async def scenario():
        async def one(number, prompt):
            await engine.generate(prompt, P(max_tokens=8 + number % 32))
            ended.append(number)

        requests = asyncio.gather(*(one(*each) for each in enumerate(prompts_of(24) * 3)))
        while len(ended) < 2:
            await asyncio.sleep(0.01)
        before = len(ended)
        await asyncio.to_thread(engine.probe, [[3, 4, 5]], max_new_tokens=2)
        found = len(ended) - before
        await requests
        return found

    assert run(scenario()) <= 16, "it waited for rollouts that came before it"


def test_check_engine(pair):
    with serving.VLLMEngine(pair[1]) as engine:
        engine.adopt(0)
        outcomes = testing.check_engine(
            engine, prompt_ids=[50, 35, 28], update=engine.adopt, timeout_s=120.0
        )
    assert set(outcomes.values()) == {"passed"}


def hits(engine):
    return sum(one["vllm:prefix_cache_hits_total"] for one in engine.metrics().values())


def session_names(urls, counts):
    """Names of ``counts[i]`` sessions of server i; their hashes depend on the random ports."""
    servers = KnownServers(urls)
    for one in servers:
        servers.reported(one, "run-0", 0)
    names = {url: [] for url in urls}
    for n in range(1000):
        server, _ = servers.choose(RoutedRequest(tokens=0, session=str(n)))
        names[server.url].append(str(n))
    return [name for url, count in zip(urls, counts, strict=True) for name in names[url][:count]]


def test_sessions_stay_on_the_server_that_has_them_cached(pair):
    """Turns of conversations over two engines: with sessions the cache has what came before."""
    rng = np.random.default_rng(0)

    async def turns(engine, *, sessions):
        for turn in range(1, 4):
            requests = []
            for n in rng.permutation(7):  # the order in which tools answer, say
                prompt, session = talks[n][: 128 * turn + 1], names[n] if sessions else None
                requests.append(engine.generate(prompt, P(max_tokens=1), session=session))
            await asyncio.gather(*requests)

    shares = {}
    with serving.VLLMEngine(pair) as engine:
        engine.adopt(0)
        names = session_names([server.url for server in pair], (4, 3))
        for sessions in (True, False):
            talks = rng.integers(3, 60, (7, 400)).tolist()
            before = hits(engine)
            run(turns(engine, sessions=sessions))
            shares[sessions] = (hits(engine) - before) / (7 * (128 + 256))
    assert shares[True] == 1.0, "each turn finds all blocks of the turns before"
    assert shares[False] < 0.9


def test_prompts_go_where_their_prefix_is_cached_without_sessions(pair):
    """Also: vLLM's counters, as usage, have exactly the tokens of these prompts."""
    talks = np.random.default_rng(1).integers(3, 60, (7, 400)).tolist()
    order = np.random.default_rng(2)

    async def scenario(engine):
        before = await engine.poll_metrics()
        for turn in range(1, 4):
            prompts = [talks[n][: 128 * turn + 1] for n in order.permutation(7)]
            params = P(max_tokens=1)
            await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        after = await engine.poll_metrics()
        return serving.usage_together(
            serving.engine_usage(before[url][0], after[url][0], seconds=1.0) for url in before
        )

    with serving.VLLMEngine(pair, routing=serving.prefix_aware) as engine:
        engine.adopt(0)
        usage = run(scenario(engine))
    assert usage.generated_tokens == 7 * 3
    assert usage.prompt_tokens == usage.queried_tokens == 7 * (129 + 257 + 385)
    assert usage.cached_tokens == 7 * (128 + 256), "each turn finds all blocks of those before"
    assert usage.external_tokens == usage.preemptions == 0
