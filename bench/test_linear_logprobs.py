"""Logprobs over a large vocabulary, forward and backward: time and memory, compared with logits.

Each variant takes turns with its baseline in one process, and the ratio of their median times is
reported. The increase of peak memory is measured in a separate process. The benchmark uses a GPU if
there is one. Otherwise it uses one thread and CPU time, which other processes disturb least.
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
VOCABULARY, HIDDEN = 151_936, 1024
TOKENS = int(os.environ.get("BENCH_TOKENS", 1024 if DEVICE == "cpu" else 4096))
DOCUMENT = 256  # tokens per document: liger's loss requires documents of equal length
ROUNDS = 3 if DEVICE == "cpu" else 20
CLOCK = time.process_time if DEVICE == "cpu" else time.perf_counter


class Inputs:
    def __init__(self):
        torch.manual_seed(0)
        half = {"dtype": torch.bfloat16, "device": DEVICE}
        self.hidden = torch.empty(TOKENS, HIDDEN, **half).normal_().requires_grad_()
        self.weight = torch.empty(VOCABULARY, HIDDEN, **half).normal_(std=0.03).requires_grad_()
        self.labels = torch.randint(0, VOCABULARY, (TOKENS,), device=DEVICE)
        self.advantages = torch.randn(TOKENS, device=DEVICE)
        self.rows = torch.rand(TOKENS, device=DEVICE) < 0.25


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
    hidden = x.hidden.view(-1, DOCUMENT, HIDDEN)
    return grpo(hidden, x.weight, labels, torch.ones_like(labels), x.advantages[::DOCUMENT])[0]


VARIANTS = [
    # (variant, baseline)
    (ours, with_logits),
    (ours_and_entropy, with_logits_and_entropy),
    (ours_of_a_quarter, with_logits),
    (ours_of_a_quarter, with_logits_of_a_quarter),
    (liger, with_logits),
]


def seconds(variant, x):
    """Time one forward and backward pass."""
    x.hidden.grad = x.weight.grad = None
    synchronize()
    start = CLOCK()
    variant(x).backward()
    synchronize()
    return CLOCK() - start


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def extra_gibibytes(variant):
    """Return the peak memory in GiB beyond the inputs, including gradients."""
    x = Inputs()
    if DEVICE == "cuda":
        before = torch.cuda.memory_allocated()
        variant(x).backward()
        return (torch.cuda.max_memory_allocated() - before) / 2**30
    before = peak_kibibytes()
    variant(x).backward()
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


@pytest.fixture(scope="module")
def inputs():
    return Inputs()


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize(("variant", "baseline"), VARIANTS, ids=lambda x: x.__name__)
def test_forward_and_backward(benchmark, inputs, variant, baseline):
    if variant is liger and importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("liger-kernel is not installed: pip install --no-deps liger-kernel")
    extra = {each: measured_alone(each) for each in (variant, baseline)}
    of_baseline = []

    def run_baseline():
        of_baseline.append(seconds(baseline, inputs))

    seconds(variant, inputs)  # warm
    benchmark.group = f"{TOKENS} tokens, vocabulary {VOCABULARY}, bfloat16, {DEVICE}"
    benchmark.pedantic(lambda: seconds(variant, inputs), setup=run_baseline, rounds=ROUNDS)
    ratio = benchmark.stats.stats.median / statistics.median(of_baseline)
    benchmark.extra_info.update(ratio=ratio, extra_gibibytes=extra[variant])
    print(
        f"\n{variant.__name__}: {ratio:.2f} x the time of {baseline.__name__} "
        f"(median {statistics.median(of_baseline):.3g} s); extra peak {extra[variant]:.2f} GiB, "
        f"of {baseline.__name__} {extra[baseline]:.2f}"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(extra_gibibytes(globals()[sys.argv[1]]))
