"""Logprobs over a large vocabulary, forward and backward: time and memory, compared with logits.

Each variant takes turns with its baseline in one process, and the ratio of their median times is
reported, with the increase of peak memory. The benchmark uses a GPU if there is one, for the head
of Qwen3-0.6B and for the shape that trl publishes figures for. Otherwise it uses one thread and CPU
time, which other processes disturb least, and measures memory in a separate process.
BENCH_TOKENS=4096 is the size of a real micro-batch, and takes half an hour on a CPU:

    BENCH_TOKENS=4096 python -m pytest bench/test_linear_logprobs.py -m "" --benchmark-only -s
"""

import importlib.util
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from primerl import loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 151_936
TOKENS = int(os.environ.get("BENCH_TOKENS", 1024 if DEVICE == "cpu" else 4096))
SHAPES = [(TOKENS, 1024)] if DEVICE == "cpu" else [(TOKENS, 1024), (8192, 4096)]
"""Tokens and hidden size."""
DOCUMENT = 256  # tokens per document: liger's loss requires documents of equal length
ROUNDS = 3 if DEVICE == "cpu" else 20
CLOCK = time.process_time if DEVICE == "cpu" else time.perf_counter


class Inputs:
    def __init__(self, tokens, size):
        torch.manual_seed(0)
        half = {"dtype": torch.bfloat16, "device": DEVICE}
        self.hidden = torch.empty(tokens, size, **half).normal_().requires_grad_()
        self.weight = torch.empty(VOCABULARY, size, **half).normal_(std=0.03).requires_grad_()
        self.labels = torch.randint(0, VOCABULARY, (tokens,), device=DEVICE)
        self.advantages = torch.randn(tokens, device=DEVICE)
        self.rows = torch.rand(tokens, device=DEVICE) < 0.25


def products(x):
    """The three products of any head: the logits, whose gradient is anything, and two gradients."""
    return x.hidden @ x.weight.T


def log_softmax(x, rows=slice(None)):
    logits = x.hidden[rows] @ x.weight.T
    return logits.float().log_softmax(-1)


def of_labels(x, log_p, rows=slice(None)):
    logprobs = log_p.gather(-1, x.labels[rows].unsqueeze(-1)).squeeze(-1)
    return (logprobs * x.advantages[rows]).sum()


def with_logits(x):
    return of_labels(x, log_softmax(x))


def with_logits_and_entropy(x):
    log_p = log_softmax(x)
    return of_labels(x, log_p) - (log_p.exp() * log_p).sum()


def with_logits_of_a_quarter(x):
    return of_labels(x, log_softmax(x, x.rows), x.rows)


def ours(x):
    logprobs, _ = loss.linear_logprobs(x.hidden, x.weight, x.labels)
    return (logprobs * x.advantages).sum()


def ours_and_entropy(x):
    logprobs, entropy = loss.linear_logprobs(x.hidden, x.weight, x.labels)
    return (logprobs * x.advantages).sum() + entropy.sum()


def ours_of_a_quarter(x):
    logprobs, _ = loss.linear_logprobs(x.hidden, x.weight, x.labels, rows=x.rows)
    return (logprobs * x.advantages).sum()


def liger(x):
    """Compute liger's GRPO loss without a reference model, with one advantage per document."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    compiled = DEVICE == "cuda"  # on a CPU, compilation alone takes minutes
    grpo = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=compiled, chunk_size=2)
    labels = x.labels.view(-1, DOCUMENT)
    hidden = x.hidden.view(-1, DOCUMENT, x.hidden.shape[1])
    return grpo(hidden, x.weight, labels, torch.ones_like(labels), x.advantages[::DOCUMENT])[0]


def quack(x):
    """Compute quack's cross entropy, which needs neither advantages nor logprobs."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(x.hidden, x.weight, x.labels, reduction="sum")


VARIANTS = [
    # (variant, baseline)
    (ours, with_logits),
    (ours_and_entropy, with_logits_and_entropy),
    (ours_of_a_quarter, with_logits),
    (ours_of_a_quarter, with_logits_of_a_quarter),
    (liger, with_logits),
]
if DEVICE == "cuda":
    VARIANTS += [(x, products) for x in (with_logits, ours, ours_and_entropy, quack)]
PACKAGES = {liger: ("liger_kernel", "liger-kernel"), quack: ("quack", "quack-kernels")}


def run(variant, x):
    """Run one forward and backward pass."""
    x.hidden.grad = x.weight.grad = None
    out = variant(x)
    out.backward(out.detach() if out.ndim else None)


def seconds(variant, x):
    """Time one forward and backward pass."""
    synchronize()
    start = CLOCK()
    run(variant, x)
    synchronize()
    return CLOCK() - start


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def extra_gibibytes(variant, x):
    """Return the peak memory in GiB beyond the inputs, including gradients."""
    x.hidden.grad = x.weight.grad = None
    if DEVICE == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(variant, x)
        return (torch.cuda.max_memory_allocated() - before) / 2**30
    before = peak_kibibytes()
    run(variant, x)
    return (peak_kibibytes() - before) / 2**20


def peak_kibibytes():
    """Return this program's peak memory. On Linux, getrusage would include the parent's peak."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text(encoding="utf-8"))[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # macOS: in bytes


@lru_cache
def measured_alone(variant):
    done = subprocess.run(
        [sys.executable, __file__, variant.__name__],
        capture_output=True,
        encoding="utf-8",
        check=True,
        env={**os.environ, "BENCH_TOKENS": str(TOKENS)},
    )
    return float(done.stdout.split()[-1])


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def inputs(request):
    return Inputs(*request.param)


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize(("variant", "baseline"), VARIANTS, ids=lambda x: x.__name__)
def test_forward_and_backward(benchmark, inputs, variant, baseline):
    module, package = PACKAGES.get(variant, ("torch", "torch"))
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{package} is not installed: pip install --no-deps {package}")
    of_baseline = []

    def run_baseline():
        of_baseline.append(seconds(baseline, inputs))

    seconds(variant, inputs)  # warm
    if DEVICE == "cuda":
        extra = {each: extra_gibibytes(each, inputs) for each in (variant, baseline)}
    else:
        extra = {each: measured_alone(each) for each in (variant, baseline)}
    tokens, size = inputs.hidden.shape
    shape = f"{tokens} tokens, hidden size {size}, vocabulary {VOCABULARY}, bfloat16, {DEVICE}"
    benchmark.group = shape
    benchmark.pedantic(lambda: seconds(variant, inputs), setup=run_baseline, rounds=ROUNDS)
    ratio = benchmark.stats.stats.median / statistics.median(of_baseline)
    benchmark.extra_info.update(ratio=ratio, extra_gibibytes=extra[variant])
    print(
        f"\n{shape}: {variant.__name__}: {ratio:.2f} x the time of {baseline.__name__} "
        f"(median {statistics.median(of_baseline):.3g} s); extra peak {extra[variant]:.2f} GiB, "
        f"of {baseline.__name__} {extra[baseline]:.2f}"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(extra_gibibytes(globals()[sys.argv[1]], Inputs(*SHAPES[0])))
