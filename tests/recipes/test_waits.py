"""How often the host waits for the GPU in a training step of the recipes, on a pretended GPU."""

import contextlib
import functools
import importlib.util
from collections import Counter
from pathlib import Path

import attention_stand_ins as stand_ins
import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from primerl import loss, packing, parallel, testing
from primerl._common import host_memory
from primerl.attention import kernel_table, kernels, span_kernels
from primerl.attention.end_to_end import cudnn, flash4, operators, varlen
from primerl.types import TrainingSample
from tests.helpers.pretended_gpu import GPU, OnGPU, PretendedGPU

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


OPERATORS = {
    torch.ops.primerl.attend.default: span_kernels.attend_by_span,
    torch.ops.primerl.attend_backward.default: span_kernels.attend_by_span_gradients,
    torch.ops.primerl.attend_end_to_end.default: operators.attend_end_to_end,
    torch.ops.primerl.attend_end_to_end_backward.default: operators.attend_end_to_end_gradients,
}

# Copies and waits that torch has not divided into their parts where an operator calls them.
COMPOSED = {torch.ops.aten.to, torch.ops.aten.item, torch.ops.aten.pin_memory}


class OpenedOperators(PretendedGPU):
    """A pretended GPU that also sees what happens within the operators of attention."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        operator = OPERATORS.get(function)
        opened = function.decompose if operator is None else operator._init_fn
        if operator is None and function.overloadpacket not in COMPOSED:
            return super().__torch_dispatch__(function, types, args, kwargs)
        TorchDispatchMode.__enter__(self)
        try:
            return opened(*args, **(kwargs or {}))
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    def _touch(self, function, x, *others, **options):
        if x.numel():  # all tensors without values have the same address
            super()._touch(function, x, *others, **options)


def on_gpu(stand_in):
    """A stand-in of a kernel that takes tensors of the pretended GPU, and never waits."""

    @functools.wraps(stand_in)
    def called(*args, **kwargs):
        if not any(isinstance(x, OnGPU) for x in tree_leaves((args, kwargs))):
            return stand_in(*args, **kwargs)
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, OnGPU) else x, (args, kwargs))
        with _disable_current_modes():
            found = stand_in(*args, **kwargs)
            return tree_map(lambda x: OnGPU(x) if isinstance(x, torch.Tensor) else x, found)

    return called


class FlashAttention4:
    flash_attn_varlen_func = on_gpu(stand_ins.FlashAttention4.flash_attn_varlen_func)
    _flash_attn_bwd = on_gpu(stand_ins.FlashAttention4._flash_attn_bwd)


def take(name, monkeypatch):
    """Take a kernel of attention, on the CPU too, with a stand-in if it is for GPUs."""
    monkeypatch.setattr(kernels, "_kernel_for", lambda *_, **__: name)
    monkeypatch.setattr(operators, "kernel_for_pack", lambda *_, **__: name)
    monkeypatch.setattr(flash4, "_library", lambda: FlashAttention4)
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: contextlib.nullcontext())
    for module, function, stand_in in [
        (varlen, "_KERNEL", stand_ins.flash_attention_forward),
        (varlen, "_KERNEL_GRADIENT", stand_ins.flash_attention_backward),
        (cudnn, "_KERNEL", stand_ins.cudnn_attention),
        (cudnn, "_KERNEL_GRADIENT", stand_ins.cudnn_attention_backward),
    ]:
        monkeypatch.setattr(module, function, on_gpu(stand_in))
    monkeypatch.setattr(kernel_table, "DENSE_MULTIPLE", 8)
    monkeypatch.setattr(span_kernels, "_is_explicit", lambda *_: True)
    stand_ins.CALLS.clear()


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


@pytest.mark.parametrize(
    ("name", "step", "kernel"),
    [
        ("grpo", grpo_step, "varlen"),
        ("grpo", grpo_step, "cudnn"),
        ("sft", sft_step, "flash4"),
        ("sft", sft_step, "cudnn"),
        ("sft", sft_step, "spans"),
        ("sft", sft_step, "sdpa"),
    ],
)
@sdpa_kernel(SDPBackend.MATH)  # others are not for pretended GPUs
def test_the_host_waits_for_the_gpu_a_few_times_in_a_step(name, step, kernel, monkeypatch):
    """Once in a micro-batch, where transformers looks for several documents. Values are a CPU's."""
    take(kernel, monkeypatch)
    model, other = (testing.tiny_model("qwen3") for _ in range(2))
    packs = packing.pack(samples(), max_tokens=60, ranks=1, share_prefixes=kernel != "cudnn")
    micro_batches = len(packs[0])
    assert micro_batches > 1
    expected = step(other, packs, torch.device("cpu"), after=lambda _: None)
    waits, gpu = Counter(), OpenedOperators()
    computed = len(stand_ins.CALLS)

    def after(part):
        waits[part] += len(gpu.waits)
        gpu.waits.clear()

    with gpu:
        gpu.replace_streams(monkeypatch)
        model.to(GPU)
        gpu.waits.clear()
        found = step(model, packs, GPU, after=after)
        parameters = [one.detach().cpu() for one in model.parameters()]

    assert len(stand_ins.CALLS) == 2 * computed
    assert bool(computed) == (kernel in ("varlen", "cudnn", "flash4"))
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
