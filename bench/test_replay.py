"""Compression of expert routes: bytes per token relative to raw bytes, and the coding speed.

    python -m pytest bench/test_replay.py -m "" --benchmark-only -s \
        --benchmark-timer=time.process_time --benchmark-columns=median,iqr

On an idle machine, omit the timer option. Raw routes take one byte per expert: 384 bytes per token
for Qwen3-30B-A3B (48 layers, 8 of 128 experts), 600 for GLM-5 (75 layers, 8 of 256). The data are
4096 tokens, or 16 replies of 1024 tokens to a prompt of 2048. The routes of each token and layer
are the 8 largest of ``log w_e + Gumbel noise``, that is, sets drawn without replacement:

- uniform: all weights are 1. No code can take less than ``log2 C(n, 8)`` bits on average.
- skewed: the n-th most popular expert has the weight ``n ** -s``; each layer has its own order.
- repeated: skewed with s = 1/2, and normal noise (of the same variance) with a correlation of 0.6
  from token to token, so that successive tokens share about 3 of 8 experts.
- trained: routes of a real router. A Qwen3-MoE of 4 layers, with its own load-balancing loss, is
  trained for 400 steps on the bytes of this package's source (minutes). The routes are those of
  16384 bytes that it did not train on.

``test_a_step_of_the_demo`` runs a step of ``recipes/demo.py`` with 1024 samples of 12 tokens:
packing, forward and backward passes, and discarding routes. It alternates between steps without
replay (``plain_s``, in process time) and with replay. The extra time of replay is relative to
``plain_s``: ``forcing`` is for routes that were read before, ``all`` for the whole step.
``reading`` is the time of reading and discarding alone, which a busy machine changes less than that
difference. ``compared`` is the time that the demo spends in every 32nd step to report the effect of
replay. ``put_us`` and ``check_us`` are microseconds per sample on the sampler's side.
``test_rollouts_of_the_demo`` samples as many replies, alternately with and without recording.

``bound`` is the entropy of sets with these popularities (conditional Poisson), if tokens are
independent. The baseline ``plain`` compresses the raw bytes in their order with zstd at level 3.
The baseline ``sorted`` does the same with sorted sets in columns (layer, place, token).
"""

import asyncio
import importlib.util
import math
import time
from pathlib import Path
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
import zstandard

from primerl import loss, packing, replay, rollout, testing
from primerl.replay import RouteShape, codec
from primerl.replay.references import discard, read
from primerl.replay.store import Store
from primerl.types import Sample, SamplingParams, TrainingSample

TOKENS = 4096
PROMPT, REPLY, ROLLOUTS = 2048, 1024, 16
TURNS = 30
MODELS = {
    "Qwen3-30B-A3B": RouteShape(layers=range(48), decoder_layers=48, experts=128, k=8),
    "GLM-5": RouteShape(layers=range(3, 78), decoder_layers=78, experts=256, k=8),
}
KINDS = {
    "uniform": SimpleNamespace(skew=0.0, correlation=0.0),
    "skewed, s = 1/2": SimpleNamespace(skew=0.5, correlation=0.0),
    "skewed, s = 1": SimpleNamespace(skew=1.0, correlation=0.0),
    "repeated": SimpleNamespace(skew=0.5, correlation=0.6),
}


def routes(shape, tokens, *, skew, correlation=0.0, seed=0):
    """Draw routes, uint8 ``[tokens, layers, k]``. The popular experts don't depend on the seed."""
    ranks = np.arange(1, shape.experts + 1)
    order = np.random.default_rng(0)
    weights = [order.permutation(-skew * np.log(ranks)) for _ in shape.layers]
    weights = np.array(weights, np.float32)
    rng = np.random.default_rng([1, seed])
    rows = np.empty((tokens, len(shape.layers), shape.k), np.uint8)
    normal = rng.standard_normal(weights.shape, np.float32)
    for token in range(tokens):
        if correlation:
            fresh = rng.standard_normal(weights.shape, np.float32)
            normal = correlation * normal + math.sqrt(1 - correlation**2) * fresh
            noise = math.pi / math.sqrt(6) * normal
        else:
            noise = -np.log(rng.standard_exponential(weights.shape, np.float32) + 1e-30)
        rows[token] = np.argpartition(weights + noise, -shape.k)[:, -shape.k :]
    return rows


def bound(rows, shape):
    """Return bits per set, ``sum_e h(p_e) + log2 P(k experts are chosen)``, divided by ``8 k``."""
    bits = []
    for layer in range(rows.shape[1]):
        p = np.bincount(rows[:, layer].reshape(-1), minlength=shape.experts) / len(rows)
        chosen = np.zeros(shape.k + 1)
        chosen[0] = 1.0
        for share in p:
            chosen[1:] = chosen[1:] * (1 - share) + chosen[:-1] * share
            chosen[0] *= 1 - share
        inside = p[(p > 0) & (p < 1)]
        entropy = -(inside * np.log2(inside) + (1 - inside) * np.log2(1 - inside)).sum()
        bits.append(entropy + math.log2(chosen[-1]))
    return float(np.mean(bits)) / (8 * shape.k)


def compressed(rows):
    return len(zstandard.ZstdCompressor(level=3).compress(np.ascontiguousarray(rows).data))


def row(benchmark, name, size, **figures):
    benchmark.extra_info |= figures | {"GB/s": size / benchmark.stats.stats.median / 1e9}
    print("\n" + name, *(f"{key} {value:.3f}" for key, value in benchmark.extra_info.items()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_encode(benchmark, model, kind):
    shape = MODELS[model]
    rows = routes(shape, TOKENS, **vars(KINDS[kind]))
    encoded = benchmark.pedantic(
        codec.encode, args=(rows,), kwargs={"experts": shape.experts}, rounds=9, warmup_rounds=1
    )
    columns = np.sort(rows, axis=-1).transpose(1, 2, 0)
    row(
        benchmark,
        f"encode {model} {kind}:",
        rows.nbytes,
        bytes_per_token=len(encoded) / TOKENS,
        ratio=len(encoded) / rows.nbytes,
        bound=bound(rows, shape),
        plain=compressed(rows) / rows.nbytes,
        sorted=compressed(columns) / rows.nbytes,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_decode(benchmark, model, kind):
    shape = MODELS[model]
    rows = routes(shape, TOKENS, **vars(KINDS[kind]))
    encoded = codec.encode(rows, experts=shape.experts)
    decoded = benchmark.pedantic(codec.decode, args=(encoded,), rounds=9, warmup_rounds=1)
    assert (decoded == np.sort(rows, axis=-1)).all()
    row(benchmark, f"decode {model} {kind}:", rows.nbytes)


@pytest.mark.parametrize("experts", [128, 256])
def test_trained(benchmark, experts):
    shape, rows = trained_routes(experts)
    encoded = benchmark.pedantic(
        codec.encode, args=(rows,), kwargs={"experts": experts}, rounds=9, warmup_rounds=1
    )
    columns = np.sort(rows, axis=-1).transpose(1, 2, 0)
    row(
        benchmark,
        f"encode 8 of {experts}, trained:",
        rows.nbytes,
        ratio=len(encoded) / rows.nbytes,
        bound=bound(rows, shape),
        plain=compressed(rows) / rows.nbytes,
        sorted=compressed(columns) / rows.nbytes,
    )


def trained_routes(experts):
    """Train a small model; return the shape of its routes, and its routes, uint8 [16384, 4, 8]."""
    model = testing.tiny_model(
        "qwen3_moe",
        vocab_size=256,
        hidden_size=128,
        head_dim=32,
        num_hidden_layers=4,
        num_experts=experts,
        num_experts_per_tok=8,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    )
    sources = sorted(Path(replay.__file__).parents[1].rglob("*.py"))
    text = b"\n".join(path.read_bytes() for path in sources)
    token_ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    trained, held_out = token_ids[:-16384], token_ids[-16384:].view(32, 512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rng = np.random.default_rng(0)
    for _ in range(400):
        starts = rng.integers(0, len(trained) - 512, 4)
        batch = torch.stack([trained[start : start + 512] for start in starts])
        model(batch, labels=batch, output_router_logits=True).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), replay.capture(model) as routes:
        model(held_out)
    return replay.shape(model), routes.rows.numpy().astype(np.uint8)


@pytest.mark.parametrize("kind", ["uniform", "skewed, s = 1"])
@pytest.mark.parametrize("model", MODELS)
def test_group(benchmark, model, kind):
    """Put and read 16 rollouts with a common prompt; the ratio is over all of their rows."""
    shape = MODELS[model]
    prompt = routes(shape, PROMPT, **vars(KINDS[kind]))
    replies = [routes(shape, REPLY, **vars(KINDS[kind]), seed=1 + i) for i in range(ROLLOUTS)]
    rollouts = [np.concatenate([prompt, reply]) for reply in replies]
    versions = np.zeros(PROMPT + REPLY, np.int32)
    size = sum(rows.nbytes for rows in rollouts)
    with Store(shape, max_bytes=1 << 30) as store:

        def put_all():
            return [store.put(rows, start=0, versions=versions, shared=PROMPT) for rows in rollouts]

        references = benchmark.pedantic(put_all, rounds=1)
        files = {path.stat().st_ino: path.stat().st_size for path in store._path.iterdir()}
        found = [read(reference).rows for pair in references for reference in pair]
        assert sum(rows.size for rows in found) == size
        assert discard([sample_of(pair) for pair in references]) == 2 * ROLLOUTS
        row(benchmark, f"group {model} {kind}:", size, ratio=sum(files.values()) / size)


@pytest.mark.parametrize("kind", ["inline", "files"])
def test_a_step_of_the_demo(benchmark, kind, monkeypatch):
    if kind == "files":
        monkeypatch.setattr("primerl.replay.references.INLINE_BYTES", 0)
    demo = load_demo()
    model, _ = demo.build_policy(0)
    torch.set_num_threads(1)  # like the demo; waiting threads would count as process time
    rng = np.random.default_rng(0)
    times = []
    with Store(replay.shape(model), max_bytes=1 << 28) as store:
        for _ in range(TURNS + 1):
            captured = captured_samples(model, rng)
            put_s, references = seconds(put_all, store, captured)
            plain = [sample for sample, _ in captured]
            routed = [
                attrs.evolve(sample, routes=own)
                for sample, own in zip(plain, references, strict=True)
            ]
            rows = [own for _, own in replay.fetch(packed(routed))]
            before = seconds(demo_step, demo, model, plain)[0]
            forcing = seconds(forced_step, demo, model, plain, rows)[0]
            whole = seconds(demo_step, demo, model, routed)[0]
            after = seconds(demo_step, demo, model, plain)[0]
            times.append(
                {
                    "plain": (before + after) / 2,  # a machine that slows down affects both
                    "forcing": forcing,
                    "all": whole,
                    "reading": seconds(read_all, packed(routed))[0],
                    "compared": seconds(compare, demo, model, plain)[0],
                    "put": put_s,
                    "check": seconds(check_all, store, routed)[0],
                    "discard": seconds(replay.discard, routed)[0],
                }
            )
    benchmark.pedantic(lambda: None, rounds=1)  # this test measures time itself
    found = {name: np.array([turn[name] for turn in times[1:]]) for name in times[0]}
    for name in ("all", "reading"):
        found[name] += found["discard"]
    extra = {name: found[name] / found["plain"] - 1 for name in ("forcing", "all")}
    benchmark.extra_info |= {
        "plain_s": float(np.median(found["plain"])),
        "forcing": float(np.median(extra["forcing"])),
        "all": float(np.median(extra["all"])),
        "reading": float(np.median(found["reading"] / found["plain"])),
        "compared": float(np.median(found["compared"] / found["plain"])),
        "put_us": 1e6 * float(np.median(found["put"])) / len(routed),
        "check_us": 1e6 * float(np.median(found["check"])) / len(routed),
    }
    print(f"\n{kind}: {benchmark.extra_info}")


def test_rollouts_of_the_demo(benchmark):
    demo = load_demo()
    model, _ = demo.build_policy(0)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 28, 6).tolist() for _ in range(64)]
    turns = []
    with (
        Store(replay.shape(model), max_bytes=1 << 28) as store,
        rollout.TransformersEngine(model) as plain,
        rollout.TransformersEngine(model, routes=store, capture=replay.capture) as recording,
    ):
        for _ in range(TURNS + 1):
            before = seconds(sample_all, plain, prompts)[0]
            recorded = seconds(sample_all, recording, prompts)[0]
            after = seconds(sample_all, plain, prompts)[0]
            turns.append(((before + after) / 2, recorded))
    benchmark.pedantic(lambda: None, rounds=1)  # this test measures time itself
    plain_s, recorded_s = np.array(turns[1:]).T
    benchmark.extra_info |= {
        "plain_s": float(np.median(plain_s)),
        "recording": float(np.median(recorded_s / plain_s - 1)),
        "iqr": float(np.subtract(*np.percentile(recorded_s / plain_s, [75, 25]))),
    }
    print(f"\nrollouts: {benchmark.extra_info}")


def sample_all(engine, prompts):
    """Sample 16 replies to each prompt."""
    params = SamplingParams(max_tokens=6)

    async def main():
        await asyncio.gather(
            *(engine.generate(prompt, params) for prompt in prompts for _ in range(16))
        )

    asyncio.run(main())


def load_demo():
    path = Path(__file__).parents[1] / "recipes/demo.py"
    spec = importlib.util.spec_from_file_location("demo", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def captured_samples(model, rng):
    """Return the samples of a step, with the routes of their tokens."""
    samples = []
    for _ in range(64):
        prompt = rng.integers(2, 28, 6)
        for _ in range(16):
            mask = np.arange(12) >= 6
            samples.append(
                TrainingSample(
                    token_ids=np.concatenate([prompt, rng.integers(2, 28, 6)]),
                    loss_mask=mask,
                    behavior_logprobs=np.where(mask, -3.0, 0.0),
                    versions=np.where(mask, 0, -1),
                    advantages=np.where(mask, 1.0, 0.0),
                )
            )
    token_ids = torch.tensor(np.stack([sample.token_ids for sample in samples]))
    with torch.no_grad(), replay.capture(model) as routes:
        model(token_ids)
    rows = routes.rows.view(len(samples), 12, *routes.rows.shape[1:]).numpy()
    return list(zip(samples, rows, strict=True))


def put_all(store, captured):
    versions = np.zeros(11, np.int32)
    return [store.put(rows[:-1], start=0, versions=versions, shared=5) for _, rows in captured]


def check_all(store, samples):
    for sample in samples:
        store.check(sample)


def packed(samples):
    ((*batches,),) = packing.pack(samples, max_tokens=8192, ranks=1)
    return batches


def seconds(function, *args):
    """Return the process time of a call, and its result."""
    began = time.process_time()
    result = function(*args)
    return time.process_time() - began, result


def demo_step(demo, model, samples):
    gradients(demo, model, packed(samples))


def forced_step(demo, model, samples, rows):
    for batch, own in zip(packed(samples), rows, strict=True):
        with replay.forced(model, own):
            gradients(demo, model, [batch])


def read_all(batches):
    for _ in replay.fetch(batches):
        pass


def gradients(demo, model, batches):
    statistics, counts = loss.Statistics(version=0), replay.RouteCounts()
    demo.backward(model, batches, statistics=statistics, counts=counts)
    model.zero_grad()


def compare(demo, model, samples):
    demo.mismatch_of_own_routes(model, packed(samples), version=0)


def sample_of(references):
    return Sample(
        token_ids=[0, 0],
        loss_mask=[False, True],
        behavior_logprobs=[0.0, 0.0],
        versions=[-1, 0],
        routes=references,
    )
