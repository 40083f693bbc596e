"""Activation recomputation: bytes kept for the backward pass, and the time of a step.

    python -m pytest bench/test_activations.py -m "" --benchmark-only -s

Bytes are counted, not measured, so they are the same on any machine. Each storage that the graph of
the forward pass or selective recomputation holds counts once. Parameters and storages that were
moved to host memory don't count. Each variant takes turns with one that keeps everything; the ratio
of the median times is reported. Selective recomputation also takes turns with full recomputation:
on a GPU, it must not be slower.
"""

import gc
import statistics
import time

import pytest
import torch
import transformers
from torch.autograd.graph import saved_tensors_hooks

from primerl import loss, parallel

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
TOKENS, ROUNDS = (16_384, 10) if GPU else (512, 3)
NOISE = 0.03  # allowed in a ratio of medians
SIZES = {
    "hidden_size": 1024 if GPU else 256,
    "intermediate_size": 3072 if GPU else 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 16 if GPU else 8,
    "num_key_value_heads": 8 if GPU else 4,
    "head_dim": 128 if GPU else 32,
    "vocab_size": 32_768 if GPU else 4096,
}
WAYS = {
    "full": {},
    "selective": {"selective": True},
    "every second layer": {"every": 2},
    "full, offloaded": {"offload": True},
}


def build(how):
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SIZES)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if GPU else torch.float32
        )
    return model if how is None else parallel.recompute(model, **how)


def forward(model):
    ids = torch.arange(TOKENS, device=DEVICE) % 4096
    positions = torch.arange(TOKENS, device=DEVICE) % (TOKENS // 4)
    return -loss.model_logprobs(model, ids, positions, ids.roll(-1)).mean()


def step(model):
    begin = time.perf_counter()
    forward(model).backward()
    model.zero_grad()
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def live():
    """Return the sizes of the storages that Python objects hold, by address."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        # Ask the type, since isinstance on the object would load lazy modules.
        if issubclass(type(thing), torch.Tensor) and thing.device.type == DEVICE.type:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def kept_bytes(model, *, offload):
    """Return the bytes kept by the graph, and in Python by selective recomputation."""
    before, graph = live(), {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        graph[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        value = forward(model)
    found = {place: size for place, (size, _) in graph.items()}
    if not offload:  # on a CPU, tensors offloaded to host memory would be counted too
        found |= live()
    total = sum(size for place, size in found.items() if place not in before)
    del value
    return total


def ratio_in_turns(benchmark, ours, other):
    """Return the ratio of the median times of two models' steps, which take turns."""
    times = [], []
    for model in (ours, other):
        step(model)

    def both():
        for taken, model in zip(times, (ours, other), strict=True):
            taken.append(step(model))

    benchmark.pedantic(both, rounds=ROUNDS, iterations=1)
    return statistics.median(times[0]) / statistics.median(times[1])


@pytest.mark.benchmark(group="recomputation", warmup=False)
@pytest.mark.parametrize("way", WAYS)
def test_recomputation(benchmark, way):
    how = WAYS[way]
    plain, model = build(None), build(how)
    kept = kept_bytes(plain, offload=False), kept_bytes(model, offload="offload" in how)
    row = {"mib": [round(size / 2**20, 1) for size in kept], "kept": kept[1] / kept[0]}
    row["time"] = ratio_in_turns(benchmark, model, plain)
    benchmark.extra_info.update(row)
    print(f"\n{way}: {row}")
    assert kept[1] < 0.75 * kept[0]


@pytest.mark.benchmark(group="recomputation", warmup=False)
def test_selective_is_not_slower_than_full(benchmark):
    selective, full = build(WAYS["selective"]), build(WAYS["full"])
    ratio = ratio_in_turns(benchmark, selective, full)
    benchmark.extra_info["ratio"] = ratio
    print(f"\nselective: {ratio:.3f} x the time of full")
    if GPU:
        assert ratio <= 1 + NOISE
