"""Expert routes that real vLLM returns: whose weights' they are, and which it can't know.

They are compared with those of a plain forward pass of the weights that each row claims. vLLM's
Model Runner V2 runs on the CPU here with interpreted kernels, which is no supported configuration.
"""

import asyncio
import base64
import io
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import httpx
import numpy as np
import pytest
import torch
from expected_routes import expected

from primerl import replay, serving, weights
from primerl.replay import fetching
from primerl.serving.names import (
    COLLECTIVE_RPC,
    GENERATE,
    LABEL_SHARED_KEYS,
    METRICS,
    PAUSE,
    SERVED_ROUTES,
)
from primerl.types import Sample, SamplingParams

LAYERS, K, BLOCK = 4, 2, 32
CHATS, TOKENS = 3, 24
CLOSE, VISIBLY_WRONG = 5e-5, 0.05  # of logprobs in float32


@attrs.frozen
class Reply:
    token_ids: list
    """Of the prompt and the completion."""
    prompt: int
    start: int
    """The token of the first row of ``routes``."""
    routes: np.ndarray
    spans: list
    cached: int


class Client:
    """Plain HTTP, so that nothing here depends on how primerl reads responses."""

    def __init__(self, server):
        headers = {"Authorization": f"Bearer {server.api_key}"}
        self._http = httpx.Client(
            base_url=server.url, headers=headers, timeout=120, trust_env=False
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._http.close()

    def generate(self, prompt, *, start, tokens=TOKENS, salt=None):
        sampling = {"max_tokens": tokens, "ignore_eos": True, "routed_experts_prompt_start": start}
        body = {"token_ids": prompt, "sampling_params": sampling, "cache_salt": salt}
        answer = self._http.post(GENERATE, json=body).raise_for_status().json()
        [choice] = answer["choices"]
        return Reply(
            token_ids=prompt + choice["token_ids"],
            prompt=len(prompt),
            start=start,
            routes=np.load(io.BytesIO(base64.b64decode(choice["routed_experts"]))),
            spans=choice["weight_versions"],
            cached=answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        )

    def post(self, path, **body):
        return self._http.post(path, json=body).raise_for_status().json()

    def served_routes(self):
        [found] = self.post(COLLECTIVE_RPC, method=SERVED_ROUTES)["results"]
        return found

    def counter(self, name):
        lines = self._http.get(METRICS).text.splitlines()
        return sum(float(one.rpartition(" ")[2]) for one in lines if one.startswith(f"{name}{{"))


def random_tokens(count, *, seed):
    return np.random.default_rng(seed).integers(2, 512, count).tolist()


def claimed_versions(reply):
    """Of each token but the last, the version whose forward pass its row claims to record.

    That is the pass which sampled the next token. Earlier tokens of the prompt were computed by the
    weights that sampled the first one.
    """
    versions = np.empty(len(reply.token_ids) - 1, int)
    for span in reply.spans:
        version = int(span["version"].rpartition("-")[2])
        first = reply.prompt - 1 + span["start"]
        versions[first : reply.prompt - 1 + span["end"]] = version
        if span["start"] == 0:
            versions[:first] = version
    return versions[reply.start :]


def misaligned(reply, model, states):
    """How many rows there are, and which of them are not of the version that they claim."""
    claimed = claimed_versions(reply)
    assert reply.routes.shape == (len(claimed), LAYERS, K)
    assert reply.routes.dtype == np.uint8
    wrong = np.zeros(len(claimed), bool)
    for version in np.unique(claimed):
        model.load_state_dict(states[version])
        experts, near_tie, layers = expected(model, reply.token_ids)
        differs = (experts[reply.start : -1] != np.sort(reply.routes[:, layers])).any(-1)
        differs &= ~near_tie[reply.start : -1]
        wrong |= differs.any(-1) & (claimed == version)
    return len(claimed), np.flatnonzero(wrong).tolist()


def pause_in_flight(client, before):
    """Pause once each of the requests is likely to have sampled tokens: none may be lost."""
    deadline = time.monotonic() + 60
    while client.counter("vllm:generation_tokens_total") < before + 2 * CHATS:
        assert time.monotonic() < deadline, "nothing was sampled"
        time.sleep(0.01)
    client.post(f"{PAUSE}?mode=keep&clear_cache=false")


def play(server, model, states):
    """The replies of each turn of a few chats: updates come in mid-completion and between turns."""
    chats = [random_tokens(40 + 13 * n, seed=n) for n in range(CHATS)]
    known = [0] * CHATS
    turns = []

    def publish(version):
        model.load_state_dict(states[version])
        transport.publish(version)

    with (
        Client(server) as client,
        ThreadPoolExecutor(CHATS) as threads,
        serving.VLLMEngine(server) as engine,
    ):
        assert not client.served_routes()["loaded"]
        transport = weights.SharedMemory(model, engine)
        publish(0)
        for turn, in_flight, between in [(0, 1, None), (1, None, None), (2, None, 2), (3, 3, None)]:
            # From the beginning, from somewhere in between, and from what is not known yet.
            starts = [0, known[1] // 2, known[2]]
            before = client.counter("vllm:generation_tokens_total")
            asked = [
                threads.submit(client.generate, chat, start=start)
                for chat, start in zip(chats, starts, strict=True)
            ]
            if in_flight is not None:
                pause_in_flight(client, before)
                publish(in_flight)
            turns.append([one.result() for one in asked])
            if between is not None:
                publish(between)
            known = [len(reply.token_ids) - 1 for reply in turns[-1]]
            chats = [
                reply.token_ids + random_tokens(9, seed=[turn, n])
                for n, reply in enumerate(turns[-1])
            ]
    return turns


def test_each_row_is_of_the_version_that_it_claims(routes_server, routed_model):
    states = [routed_model(seed=seed).state_dict() for seed in range(4)]
    model = routed_model(seed=0)
    turns = play(routes_server, model, states)

    for replies, versions in zip(turns, [{0, 1}, {1}, {1}, {2, 3}], strict=True):
        assert {v for reply in replies for v in claimed_versions(reply)} == versions
    for replies, hit in zip(turns, [False, True, True, False], strict=True):
        assert [reply.cached > 0 for reply in replies] == [hit] * CHATS
    found = [misaligned(reply, model, states) for replies in turns for reply in replies]
    print(f"{sum(rows for rows, _ in found)} rows")
    assert [wrong for _, wrong in found] == [[]] * len(found)
    # Other weights choose other experts, so a row of the wrong version would be noticed.
    swapped = [states[1], states[0], states[3], states[2]]
    rows, wrong = misaligned(turns[0][0], model, swapped)
    assert len(wrong) > 0.9 * rows


def test_rows_of_what_was_loaded_are_not_asked_for(loading_server, routed_model):
    """From the last token of a prompt on, rows are known however the prompt came to be cached.

    A request for a row that was computed elsewhere ends vLLM 0.32.
    """
    model, states = routed_model(seed=0), [routed_model(seed=0).state_dict()]
    prompt = random_tokens(3 * BLOCK + 14, seed=0)
    hits = "vllm:external_prefix_cache_hits_total"
    with Client(loading_server) as client, serving.VLLMEngine(loading_server, run="own") as engine:
        weights.SharedMemory(model, engine).publish(0)
        assert client.served_routes()["loaded"]
        prefilled = client.generate(prompt, start=0, tokens=1, salt="own-0")
        client.post("/reset_prefix_cache")  # now as a server whose prompts others prefill
        before = client.counter(hits)
        decoded = client.generate(prompt, start=len(prompt) - 1, tokens=5, salt="own-0")
        assert client.counter(hits) - before == decoded.cached == 3 * BLOCK
        again = client.generate(prompt, start=len(prompt) - 1, tokens=5, salt="own-0")
        assert again.cached == 3 * BLOCK
        assert client.counter(hits) - before == 3 * BLOCK, "these were its own by now"

    assert [len(reply.routes) for reply in (prefilled, decoded, again)] == [len(prompt), 5, 5]
    for reply in (prefilled, decoded, again):
        [span] = reply.spans
        assert span["version"] == "own-0"
        assert misaligned(reply, model, states)[1] == []


def test_keys_that_older_weights_stored_are_not_loaded(loading_server, routed_model):
    """And the prompt's logprobs show it, if the folder did not change with the weights."""
    prompt = np.random.default_rng(3).integers(2, 512, 5 * BLOCK + 1).tolist()
    hits = "vllm:external_prefix_cache_hits_total"
    model = routed_model(seed=1)

    def error(engine):
        params = SamplingParams(max_tokens=2, temperature=0.0, routes_start=len(prompt) - 1)
        completion = asyncio.run(engine.generate(prompt, params))
        token_ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logprobs = model(token_ids).logits[0, -3:-1].log_softmax(-1)
        own = logprobs.gather(1, token_ids[0, -2:, None])[:, 0].numpy()
        return abs(own - completion.logprobs).max()

    def loaded(engine):
        (found,) = engine.metrics().values()
        return found[hits]

    store = replay.Store(replay.shape(model))
    with store, serving.VLLMEngine(loading_server, routes=store, run="keys") as engine:
        transport = weights.SharedMemory(model, engine)
        transport.publish(0)
        assert error(engine) < CLOSE
        engine.call("/reset_prefix_cache")
        before = loaded(engine)
        assert error(engine) < CLOSE
        assert loaded(engine) - before == 5 * BLOCK, "stored, and loaded"

        model.load_state_dict(routed_model(seed=2).state_dict())
        before = loaded(engine)
        transport.publish(1)
        assert error(engine) < CLOSE
        assert loaded(engine) == before, "nothing of version 0"
        weights.Canary(model, engine).check(1)

        # The same without a new folder.
        (place,) = [place for place in places(loading_server) if place.endswith("-1")]
        kept = {"label": "keys-2", "place": place}
        model.load_state_dict(routed_model(seed=3).state_dict())
        transport.publish(2)
        engine.call(COLLECTIVE_RPC, {"method": LABEL_SHARED_KEYS, "kwargs": kept})
        assert error(engine) > VISIBLY_WRONG
        assert loaded(engine) - before == 5 * BLOCK


def places(server):
    """The folders of weights in the store of a server."""
    with Client(server) as client:
        return [one.name for one in Path(client.served_routes()["folder"]).iterdir()]


def two_turns(server, model):
    """What is read from the store for a sample of two turns, and whether it is the model's."""
    prompt = random_tokens(50, seed=7)

    async def turns(engine):
        first = await engine.generate(prompt, SamplingParams(max_tokens=8))
        spoken = [*prompt, *first.token_ids.tolist()]
        heard = [*spoken, *random_tokens(9, seed=8)]
        params = SamplingParams(max_tokens=8, routes_start=len(spoken) - 1)
        second = await engine.generate(heard, params)
        return first, second, [*heard, *second.token_ids.tolist()]

    with (
        replay.Store(replay.shape(model)) as store,
        serving.VLLMEngine(server, routes=store) as engine,
    ):
        weights.SharedMemory(model, engine).publish(5)
        first, second, token_ids = asyncio.run(turns(engine))
        sample = sample_of(token_ids, [(50, first), (50 + 8 + 9, second)])
        store.check(sample)
        found = np.full((len(token_ids), len(store.shape.layers), K), -1, np.int16)
        parts = fetching.recorded_routes(sample.routes, span=(0, len(token_ids)))
        fetching.fill_rows(found, parts, start=0)
        assert all((replay.read(one).versions == 5).all() for one in sample.routes)
        stored = [one for one in sample.routes if not one.startswith("inline:")]
        assert replay.discard([sample]) == len(stored)

    experts, near_tie, _ = expected(model, token_ids)
    return found, ((found == experts) | near_tie[..., None]).all((-2, -1))


@pytest.mark.parametrize("inline_bytes", [0, 1 << 14])
def test_the_routes_of_two_turns_are_in_the_store(
    routes_server, routed_model, inline_bytes, monkeypatch
):
    monkeypatch.setattr("primerl.replay.references.INLINE_BYTES", inline_bytes)
    found, right = two_turns(routes_server, routed_model(seed=5))

    assert right[:-1].all()
    assert (found[-1] == -1).all()


def test_rows_that_a_server_can_not_know_are_not_made_up(loading_server, routed_model):
    found, right = two_turns(loading_server, routed_model(seed=5))

    computed = np.array([49 <= token < 57 or 66 <= token < 74 for token in range(75)])
    assert right[computed].all()
    assert (found[~computed] == -1).all()


def sample_of(token_ids, replies):
    """As an environment makes it of its replies, by the length of each one's prompt."""
    mask = np.zeros(len(token_ids), bool)
    logprobs = np.zeros(len(token_ids), np.float32)
    versions = np.full(len(token_ids), -1, np.int32)
    routes = []
    for prompt, reply in replies:
        own = slice(prompt, prompt + len(reply.token_ids))
        mask[own], logprobs[own], versions[own] = True, reply.logprobs, reply.versions
        routes += reply.routes
    return Sample(
        token_ids=token_ids,
        loss_mask=mask,
        behavior_logprobs=logprobs,
        versions=versions,
        routes=routes,
    )
