"""The cost of token dispatch to experts, compared with the matrix products.

    python -m pytest bench/test_experts.py -m "" --benchmark-only --benchmark-columns=median,iqr -s

The benchmark runs one layer of experts, forward and backward, in float32 on CPUs with one thread
per rank. ``plain`` multiplies rows that are already sorted by expert (``grouped_mm``). ``dispatch``
sorts, multiplies and combines. ``4 ranks`` does the same with a quarter of the experts and of the
tokens on each of four gloo ranks, which share two cores here. It prints two medians: the time of a
step, and of a step without the products.
"""

import json
import os
import statistics
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from primerl import parallel
from primerl.parallel.expert_parallel.experts import grouped_matmul

TOKENS, HIDDEN, INNER, EXPERTS, CHOICES = 4096, 512, 256, 32, 4
RANKS, ROUNDS = 4, 9


def layer(tokens, experts):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, requires_grad=True)
    indices = torch.rand(tokens, EXPERTS, generator=generator).topk(CHOICES).indices
    mixing = torch.rand(tokens, CHOICES, generator=generator)
    up = torch.randn(experts, HIDDEN, INNER, generator=generator, requires_grad=True)
    down = torch.randn(experts, INNER, HIDDEN, generator=generator, requires_grad=True)

    def compute(x, counts):
        ends = counts.cumsum(0).to(torch.int32)
        return grouped_matmul(torch.relu(grouped_matmul(x, up, ends)), down, ends)

    return hidden, indices, mixing, compute


@pytest.mark.benchmark(group="experts of one layer, 4,096 tokens, forward and backward")
@pytest.mark.parametrize("kind", ["plain", "dispatch"])
def test_in_one_process(benchmark, kind):
    hidden, indices, mixing, compute = layer(TOKENS, EXPERTS)
    dispatch = parallel.AllToAll(EXPERTS)
    counts = torch.bincount(indices.reshape(-1))
    rows = hidden[indices.reshape(-1).argsort() // CHOICES].detach().requires_grad_()

    def step():
        y = compute(rows, counts) if kind == "plain" else dispatch(hidden, indices, mixing, compute)
        y.square().sum().backward()

    benchmark.pedantic(step, rounds=ROUNDS, iterations=1, warmup_rounds=2)


@pytest.mark.benchmark(group="experts of one layer, 4,096 tokens, forward and backward")
def test_on_four_ranks(benchmark):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def launch():
        done = subprocess.run(
            command, env=environment, capture_output=True, encoding="utf-8", timeout=300, check=True
        )
        return json.loads(done.stdout.splitlines()[-1])

    medians = benchmark.pedantic(launch, rounds=1, iterations=1)
    benchmark.extra_info.update(medians)
    print(f"\n{RANKS} ranks: {medians}")


def ranks():
    torch.set_num_threads(1)
    with parallel.process_group(timeout_s=120) as world:
        mesh = parallel.mesh(ep=RANKS)
        hidden, indices, mixing, compute = layer(TOKENS // RANKS, EXPERTS // RANKS)
        dispatch = parallel.AllToAll(EXPERTS, mesh.expert_group)

        def median(compute):
            seconds = []
            for _ in range(ROUNDS + 2):
                dist.barrier()
                begin = time.perf_counter()
                dispatch(hidden, indices, mixing, compute).square().sum().backward()
                dist.barrier()
                seconds.append(time.perf_counter() - begin)
            return statistics.median(seconds[2:])

        whole, sending = median(compute), median(lambda x, _: x * 1.0)
        if world.is_first:
            print(json.dumps({"step_ms": whole * 1e3, "without_products_ms": sending * 1e3}))


if __name__ == "__main__":
    ranks()
