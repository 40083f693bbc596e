"""Model FLOP utilization (MFU) of one packed RL step.

    python -m pytest bench/test_train_step.py -m "" --benchmark-only -s \
        -o addopts=--import-mode=importlib

A step is ``model_logprobs``, ``dppo``, backward, clipping and AdamW on one micro-batch. All tokens
but the first of each document are trained. The model has random weights: on a CPU it is a toy, on a
GPU it has the shape of Qwen3-0.6B, or of the layers of Qwen3-30B-A3B, in bfloat16.

    MFU = FLOPs / (seconds * peak)
    ours:      primerl.flops.training(config, lengths): three forward passes, causal pairs within
               each document, the real head size; recomputation is not counted
    prime-rl:  tokens (6 active + 12 layers heads (hidden // heads) t), where each token attends to
               all t of the micro-batch, and heads are taken to be hidden // heads wide
               (its trainer/perf.py, as read for this comparison)

The peak is 989 TFLOP/s on an H100 or H200 (bfloat16, dense, NVIDIA's data sheet). Elsewhere, it is
the speed of a matrix product in the same run. The environment variable STEP_RECOMPUTE is none, full
or selective. STEP_COMPILE=0 turns off compilation of the layers, which are compiled as in recipes
(``parallel.compile_layers``). The first step, which compiles them or finds them in the cache, is
timed by itself.

The second benchmark trains two equal models in turn, one with compiled layers, on the same
STEP_PACKS (default 50, on a GPU 6) packs of documents with lognormal lengths (sigma 1). It counts
compilations. The third runs ``recipes/sft.py`` in its own process, and compares its tokens per
second with those of a step here on an equal pack and with the recipe's precision: parameters in
float32, with which layers compute in bfloat16. The goal on a GPU is within 5%.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo
import transformers

from primerl import flops, loss, packing, parallel
from primerl.attention import choose_kernel, find_documents, lay_out
from primerl.types import NOT_SAMPLED, TrainingSample

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32
RECOMPUTE = os.environ.get("STEP_RECOMPUTE")
COMPILE = os.environ.get("STEP_COMPILE", "1" if GPU else "0") == "1"
ROUNDS = 10 if GPU else 5
SHAPES = {
    "toy": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 8192,
    },
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
    "Qwen3-30B-A3B-4-layers": {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151_936,
    },
    "toy-experts": {
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 2048,
    },
}
TOY = [("toy", [512]), ("toy", [230, 120, 64, 64, 20, 14]), ("toy-experts", [512])]
REAL = [
    ("Qwen3-0.6B", [16_384]),
    ("Qwen3-0.6B", [30_000, 16_000, 8_000, 6_000, 3_000, 2_536]),
    ("Qwen3-0.6B", [65_536]),
    ("Qwen3-30B-A3B-4-layers", [16_384]),
]
LONG = 32_768  # tokens of a pack from which on activations are recomputed, and two steps timed
# Bfloat16 without sparsity, from NVIDIA's data sheets.
PEAKS = {"H100": 989e12, "H200": 989e12}


PACKS = int(os.environ.get("STEP_PACKS", 6 if GPU else 50))


def build(shape, tokens, *, compiled=COMPILE, as_recipes=False):
    """Return a model with parameters in DTYPE, and how it recomputes activations.

    ``as_recipes``: with parameters in float32, and layers that compute in DTYPE.
    """
    family = "qwen3_moe" if "num_experts" in SHAPES[shape] else "qwen3"
    config = transformers.AutoConfig.for_model(
        family, **SHAPES[shape], max_position_embeddings=tokens, tie_word_embeddings=True
    )
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if as_recipes else DTYPE
        )
    how = RECOMPUTE or ("full" if tokens > LONG else "none")
    if how != "none":
        parallel.recompute(model, selective=how == "selective")
    if as_recipes:
        parallel.shard(model, dtype=DTYPE)
    if compiled:
        parallel.compile_layers(model)
    return model, how


def batch_of(lengths, vocabulary):
    rng = np.random.default_rng(0)
    samples = []
    for length in lengths:
        mask = np.arange(length) > 0
        samples.append(
            TrainingSample(
                token_ids=rng.integers(0, vocabulary, length),
                loss_mask=mask,
                behavior_logprobs=np.where(mask, -np.log(vocabulary), 0.0),
                versions=np.where(mask, 0, NOT_SAMPLED),
                advantages=np.where(mask, rng.standard_normal(length), 0.0),
            )
        )
    ((batch,),) = packing.pack(samples, max_tokens=sum(lengths), ranks=1)
    return batch.to(DEVICE)


def step(model, optimizer, b):
    trained = int(b.loss_mask.sum())
    logprobs = loss.model_logprobs(
        model, b.token_ids, b.position_ids, b.labels, temperature=b.temperature, rows=b.loss_mask
    )
    per_token, _ = loss.dppo(logprobs, b.behavior_logprobs, b.advantages)
    loss.token_mean(per_token, b.loss_mask, denom=trained).backward()
    norm = parallel.clip_gradients(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()  # waits for the device


def seconds_of(work, *args):
    """Return the seconds that a call takes, which waits for the device."""
    begin = time.perf_counter()
    work(*args)
    return time.perf_counter() - begin


def peak():
    """Return the peak FLOP/s, stated by the vendor or measured with a matrix product."""
    for name, stated in PEAKS.items():
        if GPU and name in torch.cuda.get_device_name():
            return stated, "stated"
    n = 8192 if GPU else 1024
    a = torch.randn(n, n, device=DEVICE, dtype=DTYPE)
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        (a @ a)[0, 0].item()
        seconds.append(time.perf_counter() - begin)
    return 2 * n**3 / min(seconds), "measured"


def theirs(config, tokens):
    heads = config.num_attention_heads
    per_pair = config.num_hidden_layers * heads * (config.hidden_size // heads)
    return tokens * (6 * flops.parameters(config).active + 12 * per_pair * tokens)


def attention_of(config, b):
    """The kernel of attention for a batch, and the reason."""
    rows = len(b.token_ids)
    query, value = (
        torch.empty(rows, heads, config.head_dim, dtype=DTYPE, device=DEVICE)
        for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    return choose_kernel(query, value, layout=lay_out(find_documents(b.position_ids.cpu())))


@pytest.mark.benchmark(group="train step", warmup=False)
@pytest.mark.parametrize(
    ("shape", "lengths"), REAL if GPU else TOY, ids=lambda x: str(x).replace(" ", "")
)
def test_model_flop_utilisation(benchmark, shape, lengths):
    tokens = sum(lengths)
    torch.compiler.reset()  # else layers of another shape would count as recompilations
    model, how = build(shape, tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    b = batch_of(lengths, SHAPES[shape]["vocab_size"])
    first_s = seconds_of(step, model, optimizer, b)
    if GPU:
        step(model, optimizer, b)
        torch.cuda.reset_peak_memory_stats()
    rounds = 2 if tokens > LONG else ROUNDS
    benchmark.pedantic(step, args=(model, optimizer, b), rounds=rounds, iterations=1)
    seconds = statistics.median(benchmark.stats.stats.data)
    per_second, source = peak()
    ours = float(flops.training(model.config, lengths).sum())
    row = {
        "tokens_per_s": round(tokens / seconds),
        "mfu": ours / (seconds * per_second),
        "mfu_by_prime_rl": theirs(model.config, tokens) / (seconds * per_second),
        "peak_tflops": per_second / 1e12,
        "peak": source,
        "recompute": how,
        "attention": attention_of(model.config, b),
        "compiled": COMPILE,
        "first_step_s": first_s,
        "gib": torch.cuda.max_memory_allocated() / 2**30 if GPU else None,
    }
    benchmark.extra_info.update(row)
    print(f"\n{shape} {lengths}: {seconds:.3f} s, {row}")
    assert 0 < row["mfu"] < 1
    if shape == "Qwen3-0.6B" and source == "stated":
        assert row["mfu"] >= (0.45 if len(lengths) == 1 else 0.40)


def lognormal_packs(count, tokens, vocabulary):
    """Yield packs of documents with lognormal lengths, as many as fit into ``tokens``."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        lengths = []
        while True:
            length = min(tokens, max(2, round(rng.lognormal(np.log(tokens / 8), 1.0))))
            if sum(lengths) + length > tokens:
                break
            lengths.append(length)
        yield batch_of(lengths, vocabulary)


@pytest.mark.filterwarnings("default")  # torch emits warnings while it traces
@pytest.mark.benchmark(group="compiled against eager", warmup=False)
def test_compiled_layers_over_varied_lengths(benchmark):
    shape, tokens = ("Qwen3-0.6B", 16_384) if GPU else ("toy", 512)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    sides = {}
    for name in ("eager", "compiled"):
        torch.manual_seed(0)
        model, how = build(shape, tokens, compiled=name == "compiled")
        sides[name] = model, torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    seconds = {name: [] for name in sides}
    packs = lognormal_packs(PACKS, tokens, SHAPES[shape]["vocab_size"])

    def both(b):
        norms = []
        for name, side in sides.items():
            begin = time.perf_counter()
            norms.append(step(*side, b))
            seconds[name].append(time.perf_counter() - begin)
        torch.testing.assert_close(*norms, rtol=2e-2 if GPU else 1e-3, atol=0)

    benchmark.pedantic(both, setup=lambda: ((next(packs),), {}), rounds=PACKS, iterations=1)
    compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    ratios = [e / c for e, c in zip(seconds["eager"], seconds["compiled"], strict=True)]
    row = {
        "compilations": compilations,
        "median_ratio": statistics.median(ratios),
        "median_s": {name: statistics.median(taken) for name, taken in seconds.items()},
        "wall_s": {name: sum(taken) for name, taken in seconds.items()},
        "recompute": how,
    }
    benchmark.extra_info.update(row)
    print(f"\n{shape}, {PACKS} packs of up to {tokens} tokens, eager over compiled: {row}")
    assert compilations <= 2


def model_folder(folder, shape):
    """Write a model of a shape and a tokenizer for chats."""
    from primerl import testing

    with torch.device(DEVICE):
        model = testing.tiny_model(
            "qwen3", **SHAPES[shape], max_position_embeddings=8192, tie_word_embeddings=True
        )
    return testing.save_once(
        model.to(torch.bfloat16), folder / "model", tokenizer=testing.chat_tokenizer()
    )


def recipe_step_s(folder, model, *, length, steps):
    """Return the median time of a step of ``recipes/sft.py`` after the first three, and its tokens.

    A step is one pack of four conversations of ``length`` tokens each. The recipe is killed after
    its last step, before it writes a checkpoint.
    """
    reply = {"role": "assistant", "content": "a b c d " * length}
    conversation = {"messages": [{"role": "user", "content": "?"}, reply]}
    (folder / "chats.jsonl").write_text((json.dumps(conversation) + "\n") * 8, encoding="utf-8")
    recipe = Path(__file__).parents[1] / "recipes/sft.py"
    command = [sys.executable, recipe, "--model", model, "--data", folder / "chats.jsonl"]
    command += ["--run-dir", folder / "run", "--steps", 1000, "--warmup", 0, "--lr", 1e-6]
    command += ["--batch-size", 4, "--max-tokens", length, "--too-long", "cut"]
    command += ["--pack-tokens", 4 * length, "--eval-every", 0, "--save-every", 0]
    command += ["--dtype", str(DTYPE).removeprefix("torch."), *(["--compile"] if COMPILE else [])]
    metrics, log = folder / "run/metrics.jsonl", folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen([*map(str, command)], stdout=output, stderr=output)
    try:
        lines = []
        deadline = time.monotonic() + 600
        while len(lines) < steps:
            said = log.read_text(encoding="utf-8", errors="replace")[-3000:]
            assert process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.1)
            if metrics.exists():
                lines = [
                    one for one in metrics.read_text().splitlines(keepends=True) if one[-1:] == "\n"
                ]
    finally:
        process.kill()
        process.wait(60)
    found = [json.loads(line) for line in lines[3:]]
    return statistics.median(one["step_s"] for one in found), found[0]["tokens"]


@pytest.mark.filterwarnings("default")  # torch emits warnings while it traces
@pytest.mark.benchmark(group="recipes/sft.py and its step alone", warmup=False)
def test_the_recipe_trains_as_fast(benchmark, tmp_path):
    shape, length, steps = ("Qwen3-0.6B", 4096, 12) if GPU else ("toy", 128, 8)
    recipe_s, tokens = recipe_step_s(
        tmp_path, model_folder(tmp_path, shape), length=length, steps=steps
    )
    assert tokens == 4 * length
    torch.compiler.reset()
    model, _ = build(shape, 4 * length, as_recipes=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    b = batch_of([length] * 4, SHAPES[shape]["vocab_size"])
    for _ in range(2):
        step(model, optimizer, b)
    benchmark.pedantic(step, args=(model, optimizer, b), rounds=ROUNDS, iterations=1)
    seconds = statistics.median(benchmark.stats.stats.data)
    row = {"recipe_speed": seconds / recipe_s, "recipe_tokens_per_s": round(tokens / recipe_s)}
    row["step_mfu"] = float(flops.training(model.config, [length] * 4).sum()) / seconds / peak()[0]
    benchmark.extra_info.update(row)
    print(f"\n{shape}, 4 conversations of {length} tokens: {seconds:.3f} s alone, {row}")
    if GPU:
        assert row["recipe_speed"] >= 0.95
