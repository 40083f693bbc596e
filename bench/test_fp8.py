"""FP8 against bfloat16 matrix products in the same run: TFLOP/s of a layer, forward and backward.

    python -m pytest bench/test_fp8.py -m "" --benchmark-only -s

On a GPU, every supported backend is measured, with the shapes of an attention layer of
Qwen3-30B-A3B and of an MLP of an 8B model. On a CPU, only the reference is measured, with a small
shape, which shows the cost of emulation. FLOPs are those of the products; the time includes
quantization.
"""

import time

import pytest
import torch

from primerl import fp8
from primerl.fp8.backends.choice import BACKENDS
from primerl.fp8.linear import linear
from primerl.fp8.quantization import quantize_blocks

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
    for name, backend in BACKENDS.items():
        if backend.refusal(FORM, DEVICE) is None:
            found[name] = lambda name=name: linear(
                x, w, form=FORM, weight_gradient="bf16", backend=name
            )
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer(benchmark, shape):
    tokens, inputs, outputs = SHAPES[shape]
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    w = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    flops = 2 * tokens * inputs * outputs
    work = variants(x, w)
    seconds = {name: [] for name in work}
    for _ in range(ROUNDS + 1):  # in turn, so that a slow moment of the machine affects all
        for name, forward in work.items():
            both = timed(lambda forward=forward: forward().sum().backward())
            seconds[name].append((timed(forward), both))
    for name, times in seconds.items():
        ahead, both = (sorted(column)[len(times) // 2] for column in zip(*times[1:], strict=True))
        rates = f"{flops / ahead / 1e12:.3f} forward, {3 * flops / both / 1e12:.3f} with backward"
        benchmark.extra_info[name] = rates
        print(f"\n{shape}, {name}: {rates} TFLOP/s", end="")
    benchmark.pedantic(work["bf16"], rounds=1)


@pytest.mark.parametrize("rows", [1, 128])
def test_quantizing(benchmark, rows):
    size = 4096 if DEVICE.type == "cuda" else 1024
    x = torch.randn(size, size, dtype=torch.bfloat16, device=DEVICE)
    benchmark(lambda: timed(lambda: quantize_blocks(x, rows=rows, block=128, scale="float32")))
