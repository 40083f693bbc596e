"""How often the host waits for the GPU in a training step of the recipes, on a pretended GPU."""

import functools
import importlib.util
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from primerl import loss, packing, parallel, testing
from primerl._common import host_memory
from primerl.attention import packed
from primerl.attention.span_kernels import attend_by_span
from primerl.types import TrainingSample
from tests.helpers.pretended_gpu import GPU, PretendedGPU

ROOT = Path(__file__).parents[2]


@functools.cache
def recipe(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def samples():
    random = np.random.default_rng(0)
    return [
        TrainingSample(
            token_ids=random.integers(2, 60, length),
            loss_mask=(mask := np.arange(length) >= 3),
            behavior_logprobs=np.where(mask, -1.0, 0.0),
            versions=np.where(mask, 0, -1),
            advantages=np.where(mask, random.normal(), 0.0),
        )
        for length in random.integers(8, 30, 8).tolist()
    ]


def attend(q, k, v, layout, *, scaling, **_):
    """Attention of packed documents by an operator that runs on the pretended GPU."""
    return attend_by_span(q, k, v, None, layout.plan, scaling, 0, 0, 0.0)[0]


def grpo_step(model, packs, device, *, after):
    """The body of ``async_grpo.py``'s loop, with ``after(part)`` after each part."""
    mesh, guard = parallel.mesh(), parallel.UpdateGuard()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    statistics = loss.Statistics(version=0)
    batches = parallel.scatter(packs, packing.PackedBatch, mesh, device=device)
    after("scatter")
    total = 0.0
    for batch in batches:
        total += recipe("async_grpo").backward(
            model, [batch], mesh, sequences=parallel.all_sum(8), statistics=statistics
        )
        after("micro-batch")
    norm = parallel.clip_gradients(model.parameters(), 1.0)
    assert guard.allows(total, norm)
    optimizer.step()
    optimizer.zero_grad()
    after("update")
    rows = parallel.gather(statistics.end_minibatch(), mesh)
    packing.unpack(packs, rows, samples())
    after("gather")
    metrics = statistics.summary(parallel.all_sum)
    after("summary")
    return {**metrics, "norm": float(norm)}


def sft_step(model, packs, device, *, after):
    """The body of ``sft.py``'s loop."""
    mesh, guard = parallel.mesh(), parallel.UpdateGuard()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = parallel.scatter(packs, packing.PackedBatch, mesh, device=device)
    total = torch.zeros((), device=device)
    after("scatter")
    for batch in batches:
        part = recipe("sft").objective(model, batch, tokens=parallel.all_sum(100))
        part.backward()
        total += part.detach()
        after("micro-batch")
    norm = parallel.clip_gradients(model.parameters(), 1.0)
    assert guard.allows(total, norm)
    optimizer.step()
    optimizer.zero_grad()
    after("update")
    return {"loss": float(parallel.all_sum(total)), "norm": float(norm)}


EXPECTED = {
    "grpo": {"micro-batch": 1, "update": 1, "gather": 1, "summary": 1},
    "sft": {"micro-batch": 1, "update": 1},
}


@pytest.mark.parametrize(("name", "step"), [("grpo", grpo_step), ("sft", sft_step)])
def test_the_host_waits_for_the_gpu_a_few_times_in_a_step(name, step, monkeypatch):
    """Once in a micro-batch, where transformers looks for several documents. Values are a CPU's."""
    monkeypatch.setattr(packed, "attend", attend)
    model, other = (testing.tiny_model("qwen3") for _ in range(2))
    packs = packing.pack(samples(), max_tokens=60, ranks=1, share_prefixes=True)
    micro_batches = len(packs[0])
    assert micro_batches > 1
    expected = step(other, packs, torch.device("cpu"), after=lambda _: None)
    waits, gpu = Counter(), PretendedGPU()

    def after(part):
        waits[part] += len(gpu.waits)
        gpu.waits.clear()

    with gpu:
        gpu.replace_streams(monkeypatch)
        model.to(GPU)
        gpu.waits.clear()
        found = step(model, packs, GPU, after=after)
        parameters = [one.detach().cpu() for one in model.parameters()]

    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(parameters, other.parameters(), strict=True))
    waits["micro-batch"] /= micro_batches
    assert +waits == EXPECTED[name]


@pytest.mark.parametrize("changed", ["nothing", "copy", "source"])
def test_values_that_were_changed_in_place_are_read_from_the_gpu(changed):
    source, gpu = torch.arange(3), PretendedGPU()
    with gpu:
        copy = host_memory.to_device(source, GPU)
        if changed != "nothing":
            {"copy": copy, "source": source}[changed].add_(10)
        gpu.waits.clear()
        found = host_memory.on_host(copy)

    assert found.tolist() == ([10, 11, 12] if changed == "copy" else [0, 1, 2])
    assert len(gpu.waits) == (changed != "nothing")
