"""FP8 against bfloat16 matrix products in the same run: TFLOP/s of a layer, forward and backward.

    python -m pytest bench/test_fp8.py -m "" --benchmark-only -s

On a GPU, every supported backend is measured, with the shapes of an attention layer of
Qwen3-30B-A3B and of an MLP of an 8B model; goals against bfloat16 at the second shape, with the
backward pass, are 1.3 for DeepGEMM and 1.0 for torch's product. On a CPU, only the reference is
measured, with a small shape, which shows the cost of emulation. FLOPs are those of the products;
the time includes quantization. The last column is the ratio to bfloat16's speed with backward.
"""

import time
from functools import partial

import pytest
import torch

from primerl import fp8
from primerl.fp8.backends.choice import BACKENDS, require_backend
from primerl.fp8.linear import linear
from primerl.fp8.quantization import layouts, quantize_blocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = (
    {"attention, 8192 tokens": (8192, 2048, 4096), "MLP, 8192 tokens": (8192, 4096, 12288)}
    if DEVICE.type == "cuda"
    else {"256 tokens": (256, 512, 512)}
)
FORM = fp8.BLOCK_FP8
ROUNDS = 20 if DEVICE.type == "cuda" else 3


def timed(work):
    """Return the seconds that a call takes."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def variants(x, w):
    """Return the products to measure, by name; the first is the baseline, bfloat16."""
    found = {"bf16": lambda: x @ w.t()}
    for name in BACKENDS:
        if name == "reference" and DEVICE.type == "cuda":
            continue  # emulation
        for gradient in ("bf16", "fp8"):
            try:
                require_backend(name, FORM, DEVICE)
                if gradient == "fp8":
                    require_backend(name, FORM, DEVICE, "weight_gradient")
            except ValueError as error:
                print(f"\nweight gradient in {gradient}: {error}", end="")
                continue
            found[f"{name}, weight gradient in {gradient}"] = partial(
                linear, x, w, form=FORM, weight_gradient=gradient, backend=name
            )
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer(benchmark, shape):
    tokens, inputs, outputs = SHAPES[shape]
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    w = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    flops = 2 * tokens * inputs * outputs
    dy = torch.randn(tokens, outputs, dtype=torch.bfloat16, device=DEVICE)
    work = variants(x, w)
    seconds = {name: [] for name in work}
    for _ in range(ROUNDS + 1):  # in turn, so that a slow moment of the machine affects all
        for name, forward in work.items():
            both = timed(lambda forward=forward: torch.autograd.grad(forward(), (x, w), dy))
            seconds[name].append((timed(forward), both))
    medians = {
        name: [sorted(column)[len(times) // 2] for column in zip(*times[1:], strict=True)]
        for name, times in seconds.items()
    }
    for name, (ahead, both) in medians.items():
        rates = f"{flops / ahead / 1e12:.3f} forward, {3 * flops / both / 1e12:.3f} with backward"
        rates += f" TFLOP/s, {medians['bf16'][1] / both:.2f}x bf16"
        benchmark.extra_info[name] = rates
        print(f"\n{shape}, {name}: {rates}", end="")
    benchmark.pedantic(work["bf16"], rounds=1)


@pytest.mark.parametrize("which", ["reference", "one layout", "both layouts"])
@pytest.mark.parametrize("rows", [1, 128])
def test_quantizing(benchmark, rows, which):
    height, width = (8192, 12288) if DEVICE.type == "cuda" else (1024, 1024)
    x = torch.randn(height, width, dtype=torch.bfloat16, device=DEVICE)
    work = {
        "reference": lambda: quantize_blocks(x, rows=rows, block=128, scale="float32"),
        "one layout": lambda: layouts(x, rows, FORM),
        "both layouts": lambda: layouts(x, rows, FORM, transposed=True),
    }[which]
    benchmark.pedantic(lambda: timed(work), rounds=ROUNDS, warmup_rounds=2)
    passes = x.nbytes + x.numel() * (2 if which == "both layouts" else 1)
    rate = passes / benchmark.stats.stats.median / 1e9
    benchmark.extra_info["GB/s"] = rate
    print(f"\n{height} x {width}, {rows} rows, {which}: {rate:.0f} GB/s of one pass", end="")
