"""Rollouts of many turns on real vLLM while weights are published: every token's version is right.

Each token's logprob is recomputed by a plain forward pass of the weights that it claims.

    python -m pytest -m slow tests/vllm/test_rollouts.py  # updates that drain, and Ray: minutes
"""

import functools
import importlib.util
import itertools
import os
import time

import attrs
import numpy as np
import pytest
import torch
from fake_ray import two_nodes
from publishing import ROUNDING, check_rounding, logprobs_of

from primerl import models, rollout, serving, weights
from primerl.serving.client.updates import ON_UPDATE
from primerl.types import SamplingParams

UPDATES = 3
# Each group continues until it sees this version, so that updates meet rollouts in flight however
# long they take. The first four groups are played at once, the others as versions are published.
UNTIL = [0, 1, 2, 3, 2, 3, 3]
GROUP = 4
OPENING = (  # longer than a block of the prefix cache
    "This is a diary of a long voyage, kept by the ship's cook, who had much to say about the "
    "weather, the crew, the bread, and the harbours where they bought fish.\nMonday:"
)
DAYS = ["Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "Monday"]


@pytest.fixture(scope="module")
def policy(smollm2):
    """SmolLM2, its tokenizer, and its weights after 0 to 3 AdamW steps at lr 1e-4."""
    model, tokenizer = models.load_pretrained(smollm2)
    tokenizer.chat_template = None  # a diary's days are plain text
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    texts = ["The sea was calm, and we ate well.", "A storm took the mast on that very day."]
    versions = [{name: tensor.clone() for name, tensor in model.state_dict().items()}]
    for step in range(UPDATES):
        rows = torch.tensor([tokenizer.encode(texts[step % 2])])
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        versions.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return model, tokenizer, versions


def make_environment(tokenizer):
    """A diary of at least two days, until the task's version is served."""
    opening, days = OPENING, DAYS

    async def diary(task, engine, params):
        # Turns of groups played at once end at different tokens, so that an update meets some.
        params = attrs.evolve(params, max_tokens=10 + 3 * (int(task["id"]) % 4))
        session = f"{task['id']}-{time.monotonic_ns()}"
        chat = rollout.Conversation(engine, tokenizer, params, session=session)
        await chat.turn(opening)
        turns = 1
        while turns < 2 or (engine.version < task["until"] and turns < 50):
            await chat.turn(f"\n{days[turns % 7]}:")
            turns += 1
        metrics = {"turns": turns, "node": float(os.environ.get("NODE", "0"))}
        return chat.rollout(reward=1.0, metrics=metrics)

    return diary


def play(server, policy, on_update, place):
    """All groups of a run of seven steps, the worker's totals, and what the server counted."""
    model, tokenizer, versions = policy
    tasks = [{"id": str(n), "until": version} for n, version in enumerate(UNTIL)]
    model.load_state_dict(versions[0])
    with serving.VLLMEngine(server, on_update=on_update) as engine:
        transport = weights.SharedMemory(model, engine)
        transport.publish(0)
        before = counters(engine)
        plan = {"group_size": GROUP, "groups_per_step": 1, "max_staleness": UPDATES}
        plan["on_stale"] = "wait"
        params = SamplingParams(max_tokens=10)
        environment = place(make_environment(tokenizer))
        groups, busy = [], []
        with rollout.worker(engine, environment, tasks, params=params, **plan) as rollouts:
            for step in range(len(UNTIL)):
                groups += rollouts.take(version=step)
                if step < UPDATES:
                    busy.append(rollouts.stats()["in_flight"])
                    model.load_state_dict(versions[step + 1])
                    transport.publish(step + 1)
            stats = rollouts.stats()
        after = counters(engine)
    assert min(busy) >= 2, "updates were to meet rollouts in flight"
    return groups, stats, {name: after[name] - before[name] for name in after}


def counters(engine):
    (values,) = engine.metrics().values()
    names = ("request_success", "generation_tokens", "prefix_cache_hits")
    return {name: values[f"vllm:{name}_total"] for name in names}


def completions(sample):
    """The spans of tokens that one request sampled: (begin, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask, [0]]).astype(int)))
    return edges.reshape(-1, 2).tolist()


def recomputed(policy, samples):
    """For each sample, the logprobs of its tokens under each version that it names."""
    model, _, versions = policy
    found = [{} for _ in samples]
    for version, state in enumerate(versions):
        model.load_state_dict(state)
        for sample, row in zip(samples, found, strict=True):
            if version in sample.versions:
                row[version] = logprobs_of(model, sample.token_ids.tolist()).numpy()
    return found


@pytest.mark.parametrize(
    "on_update",
    [pytest.param(one, marks=pytest.mark.slow) if one == "drain" else one for one in ON_UPDATE],
)
def test_every_token_was_sampled_by_its_version(server, policy, on_update):
    """Issue 5, Shows 1: 16 rollouts at once, three updates, each pause policy."""
    played = play(server, policy, on_update, place=lambda environment: environment)

    check(policy, on_update, *played)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_every_token_of_actors_on_two_nodes_was_sampled_by_its_version(server, policy):
    with two_nodes() as cluster:
        on_ray = functools.partial(rollout.on_ray, actors=2, address=cluster.address)
        groups, stats, counted = play(server, policy, "recompute", place=on_ray)

    check(policy, "recompute", groups, stats, counted)
    nodes = {one.metrics["node"] for group in groups for one in group.rollouts}
    assert nodes == {1.0, 2.0}


def check(policy, on_update, groups, stats, counted):
    """Check that nothing was lost, and that each token has the logprob of its version."""
    # No request is lost, and none is counted twice.
    rollouts = [one for group in groups for one in group.rollouts]
    samples = [sample for one in rollouts for sample in one.samples]
    spans = [(sample, *span) for sample in samples for span in completions(sample)]
    tokens = sum(end - begin for _, begin, end in spans)
    assert [len(completions(*one.samples)) for one in rollouts] == [
        one.metrics["turns"] for one in rollouts
    ]
    assert sorted(group.task_id for group in groups) == [str(n) for n in range(len(UNTIL))]
    assert len(rollouts) == GROUP * len(groups)
    assert stats["started"] == stats["trained"] == len(groups)
    rest = ("dropped", "in_flight", "buffered", "retried")
    assert [stats[name] for name in rest] == [0, 0, 0, 0]
    assert stats["rollout_tokens"] == tokens
    if on_update != "keep":  # there, what an update overtook is sent again
        assert counted["request_success"] == len(spans)
        assert counted["generation_tokens"] == tokens
    assert counted["prefix_cache_hits"] > 0, "turns were to find the turns before in the cache"

    # Versions never go back; updates met requests in flight, which drain let end.
    for sample in samples:
        assert (np.diff(sample.versions[sample.loss_mask]) >= 0).all()
    pairs = {
        (int(old), int(new))
        for sample, begin, end in spans
        for old, new in itertools.pairwise(sample.versions[begin:end])
        if old != new
    }
    met = {(n, n + 1) for n in range(UPDATES)}
    assert pairs == (set() if on_update == "drain" else met), "updates that requests in flight met"
    assert {int(v) for sample in samples for v in sample.versions[sample.loss_mask]} == {0, 1, 2, 3}

    # The logprob of each token is that of the version it names.
    exact, later, wrong = [], [], []
    for sample, row in zip(samples, recomputed(policy, samples), strict=True):
        for begin, end in completions(sample):
            for t in range(begin, end):
                version = int(sample.versions[t])
                error = abs(row[version][t] - sample.behavior_logprobs[t])
                # With keep, what comes after an update attends to keys of the weights before.
                kept = on_update == "keep" and version != sample.versions[begin]
                (later if kept else exact).append(error)
                wrong += [abs(row[v][t] - sample.behavior_logprobs[t]) for v in row if v != version]
    print(
        f"{on_update}: {len(exact)} tokens within {max(exact):.2g}", f"others {np.mean(wrong):.2g}"
    )
    check_rounding(exact)
    assert np.mean(wrong) > 100 * ROUNDING, "another version was to be told apart"
    if on_update == "keep":
        assert np.mean(later) > ROUNDING
