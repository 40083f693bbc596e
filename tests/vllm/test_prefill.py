"""Prefill and decode on two real servers: routes and versions of both, updates, deaths.

vLLM's Model Runner V2 runs on the CPU here with interpreted kernels, which is no supported
configuration.
"""

import asyncio
import contextlib
import os
import signal
import threading
import time

import attrs
import numpy as np
import pytest
import torch
from expected_routes import expected
from waiting import until

from primerl import replay, serving, weights
from primerl.types import SamplingParams

pytestmark = pytest.mark.slow  # two servers with interpreted kernels: several minutes
CLOSE = 5e-5  # of logprobs in float32
AGENTS, TURNS, TOKENS, HEARD = 20, 6, 6, 60
EXTERNAL = "vllm:external_prefix_cache_hits_total"


@attrs.frozen
class Turn:
    prompt: list
    routes_start: int
    completion: object


async def play(engine, *, agents, turns=TURNS, done=None):
    """The turns of each of several agents: what they hear is long, what they say short."""
    shared = np.random.default_rng(0).integers(2, 512, 100).tolist()

    async def rollout(agent):
        heard = np.random.default_rng(agent)
        prompt, start, played = [*shared, *heard.integers(2, 512, 50).tolist()], 0, []
        for _ in range(turns):
            params = SamplingParams(max_tokens=TOKENS, routes_start=start)
            completion = await engine.generate(list(prompt), params, session=f"agent {agent}")
            played.append(Turn(list(prompt), start, completion))
            if done is not None:
                done.append(agent)
            prompt += completion.token_ids.tolist()
            start = len(prompt) - 1
            prompt += heard.integers(2, 512, HEARD).tolist()
        return played

    return await asyncio.gather(*(rollout(agent) for agent in agents))


def misaligned(played, model, states):
    """Of all turns: the number of rows and of tokens, the wrong ones, and the versions."""
    rows = wrong_rows = tokens = wrong_tokens = 0
    versions = set()
    for turn in played:
        completion, start = turn.completion, turn.routes_start
        token_ids = [*turn.prompt, *completion.token_ids.tolist()]
        found = [replay.read(one) for one in completion.routes]
        assert found[0].start == start
        routes = np.concatenate([one.rows for one in found])
        claimed = np.concatenate([one.versions for one in found])
        assert len(routes) == len(token_ids) - 1 - start
        for version in np.unique(claimed):
            model.load_state_dict(states[version])
            experts, near_tie, _ = expected(model, token_ids)
            here = claimed == version
            differs = (experts[start:-1] != np.sort(routes)) & ~near_tie[start:-1][..., None]
            wrong_rows += int(differs.any((-2, -1))[here].sum())
            with torch.no_grad():
                logits = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
            own = logits[len(turn.prompt) - 1 : -1].gather(
                1, torch.tensor(token_ids[len(turn.prompt) :])[:, None]
            )[:, 0]
            sampled = completion.versions == version
            off = (own.numpy() - completion.logprobs)[sampled]
            wrong_tokens += int((abs(off) > CLOSE).sum())
            tokens += int(sampled.sum())
        rows += len(routes)
        versions |= set(completion.versions.tolist())
    assert tokens == sum(len(turn.completion.token_ids) for turn in played)
    return rows, wrong_rows, tokens, wrong_tokens, versions


@pytest.fixture(scope="module")
def fleet(serve_routes, tmp_path_factory):
    """A prefill server and a decode server that share a folder."""
    folder = tmp_path_factory.mktemp("keys") / "store"
    servers = [
        serve_routes(
            api_key="of both",
            kv_transfer_config=serving.kv_folder(folder, role=role, chunk_tokens=32),
        )
        for role in ("prefill", "decode")
    ]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
        threads = [threading.Thread(target=server.start) for server in servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield *servers, folder


def counter(engine, url, name=EXTERNAL):
    return engine.metrics()[url].get(name, 0)


def test_agents_under_updates_and_deaths(fleet, routed_model, tmp_path):
    prefill, decode, folder = fleet
    states = [routed_model(seed=seed).state_dict() for seed in range(5)]
    model = routed_model(seed=0)
    with (
        replay.Store(replay.shape(model)) as store,
        serving.VLLMEngine(decode, prefill=prefill, routes=store, down_timeout_s=300) as engine,
    ):
        transport = weights.SharedMemory(model, engine)
        done = []

        def publish(version):
            model.load_state_dict(states[version])
            transport.publish(version)

        def publish_meanwhile():
            for version, turns in ((1, AGENTS), (2, 3 * AGENTS)):
                while len(done) < turns:
                    time.sleep(0.02)
                publish(version)

        publish(0)
        updates = threading.Thread(target=publish_meanwhile)
        updates.start()
        rollouts = asyncio.run(play(engine, agents=range(AGENTS), done=done))
        updates.join()
        played = [turn for rollout in rollouts for turn in rollout]
        assert len(played) == AGENTS * TURNS
        found = misaligned(played, model, states)
        print(f"rows, wrong, tokens, wrong, versions: {found}")
        assert found[1] == found[3] == 0
        assert found[4] == {0, 1, 2}
        assert counter(engine, decode.url) > 0
        assert counter(engine, prefill.url) == 0, "it computes what it is asked for"

        # The canary's second look finds its prompts in both caches and in the folder.
        canary = weights.Canary(model, engine)
        for _ in range(2):
            canary.check(2)
        publish(3)
        canary.check(3)
        assert len(list(folder.iterdir())) <= 2, "stores of older versions are removed"

        for victim in (prefill, decode):
            rollouts = asyncio.run(under_fire(engine, victim))
            assert [len(rollout) for rollout in rollouts] == [3] * 8, "none lost, none twice"
            until(lambda: all(row["serving"] for row in engine.servers()), within_s=300)
            finished = [turn for rollout in rollouts for turn in rollout]
            assert {v for turn in finished for v in turn.completion.versions.tolist()} == {3}
            known = [turn for turn in finished if has_all_rows(turn)]
            found = misaligned(known, model, states)
            print(f"{len(known)} of {len(finished)} turns have all rows: {found}")
            assert found[1] == found[3] == 0
            assert len(known) >= 4


async def under_fire(engine, victim):
    """Rollouts of which a server is killed, and started again."""
    done = []
    rollouts = asyncio.ensure_future(play(engine, agents=range(40, 48), turns=3, done=done))
    while len(done) < 4:
        await asyncio.sleep(0.02)
    os.kill(victim.pid, signal.SIGKILL)
    await asyncio.to_thread(until, lambda: not victim.alive)
    await asyncio.to_thread(victim.restart)
    return await rollouts


def has_all_rows(turn):
    """Whether the prompt was computed by a prefill server, which knows its routes."""
    return replay.read(turn.completion.routes[0]).start == turn.routes_start
