"""Servers that are killed and restarted during rollouts. Issue 5, Shows 6.

The last file to run: it leaves the two servers dead.

    python -m pytest -m slow tests/vllm/test_deaths.py  # four minutes
"""

import asyncio
import importlib.util
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch
from publishing import logprobs_of
from waiting import until

from primerl import models, serving, track, weights
from primerl.types import SamplingParams

TOLERANCE = 5e-5  # of logprobs in float32
DOWN_S = 3.0


def run(coroutine, timeout_s=120):
    return asyncio.run(asyncio.wait_for(coroutine, timeout_s))


def kill(server):
    """Kill the server's supervisor, or the process that started it; its other processes end too."""
    holder = psutil.Process(server.pid)
    tree = [holder, *holder.children(recursive=True)]
    assert any("EngineCore" in " ".join(one.cmdline()) for one in tree)
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.alive)
    left = psutil.wait_procs(tree, timeout=20)[1]
    assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]


async def under_fire(engine, victim):
    """Sixteen requests over both servers, of which one dies meanwhile."""
    params = SamplingParams(max_tokens=400)
    requests = [asyncio.ensure_future(engine.generate([5, 6], params)) for _ in range(16)]
    while not all(row["in_flight"] for row in await asyncio.to_thread(engine.servers)):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    await asyncio.to_thread(kill, victim)
    return await asyncio.gather(*requests)


@pytest.mark.slow
def test_an_evaluation_goes_on_when_its_server_was_killed_and_restarted(
    pair, tied_experts, root, tmp_path, monkeypatch
):
    """The recipe's rollouts wait; none is lost, repeated or counted as an error."""
    spec = importlib.util.spec_from_file_location("evaluate", root / "recipes/evaluate.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    server, _ = pair
    kill(server)
    server.restart()  # with its own weights, which it has again after another restart
    monkeypatch.setenv("PRIMERL_API_KEY", server.api_key)
    args = recipe.Args(
        env=("reverse-words",),
        model=tied_experts,
        engine_urls=(server.url,),
        tasks=8,
        samples=2,
        max_tokens=400,
        concurrency=4,
        outage_s=180.0,
        run_dir=str(tmp_path / "run"),
    )
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(recipe.main, args)
        until(lambda: (tmp_path / "run/rollouts.jsonl").exists(), within_s=120.0)
        until(lambda: len(track.read_evaluation(tmp_path / "run")) >= 2, within_s=120.0)
        kill(server)
        played = len(track.read_evaluation(tmp_path / "run"))
        assert played < 16
        server.restart()
        running.result(timeout=300)

    records = track.read_evaluation(tmp_path / "run")
    assert len({(play["task"], play["index"]) for play in records}) == len(records) == 16
    assert [play["error"] for play in records] == [None] * 16


def test_kill_one_restart_it_and_kill_both(pair, tied_experts, tmp_path):
    first, second = pair
    model, _ = models.load_pretrained(tied_experts)
    with serving.VLLMEngine(pair, down_timeout_s=DOWN_S) as engine:
        transport = weights.Disk(model, engine, folder=tmp_path / "publications")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        transport.publish(1)

        answers = run(under_fire(engine, first))
        assert [len(one.token_ids) for one in answers] == [400] * 16
        assert {int(v) for one in answers for v in one.versions} == {1}
        assert [row["alive"] for row in engine.servers()] == [False, True]

        url = first.url
        first.restart()
        assert first.url == url
        until(lambda: engine.servers()[0]["serving"])
        assert engine.servers()[0]["version"] == 1

        async def many():
            params = SamplingParams(max_tokens=8)
            return await asyncio.gather(*(engine.generate([7], params) for _ in range(8)))

        for one in run(many()):
            wanted = logprobs_of(model, [7, *one.token_ids.tolist()])[1:].numpy()
            np.testing.assert_allclose(one.logprobs, wanted, atol=TOLERANCE)
        (replies,) = {str(reply) for reply in engine.probe([[5, 6, 7, 8]]).values()}
        assert replies, "the one that returned answers as the other does"

        kill(first)
        kill(second)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=f"(?s){first.url} is down.*{second.url} is down"):
            run(engine.generate([5], SamplingParams(max_tokens=1)))
        assert time.monotonic() - began < DOWN_S + 20.0
