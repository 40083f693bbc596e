"""Seconds of the phases of a real run of two ranks, beside those predicted from rates.

    TMPDIR=/dev/shm PYTHONPATH=tests/helpers OMP_NUM_THREADS=1 \
        torchrun --nproc-per-node 2 bench/planned_times.py

Checkpoints and publications go to TMPDIR. In memory, as here, the speed of a disk plays no part.

The rates are measured apart, on pieces. FLOP/s of layers and of the head: models of one and three
layers, with fewer tokens than the run has, and without FSDP. Bytes/s of FSDP's traffic, of the
optimizer, of checkpoints and of publications: sharded models of one and four layers, the traffic
with so few tokens that they hardly count. Sizes of the run are those of ``primerl.flops`` and of
its parameters. Rounds of pieces and of the run alternate, so that both see the same load of the
machine.

Medians of rank 0, in seconds of the clock and in seconds of its CPU. On a machine that also runs
other programs, only the latter mean anything; they leave out waiting for the other rank and for the
disk.
"""

import contextlib
import tempfile
import time
from pathlib import Path

import attrs
import numpy as np
import torch
import torch.distributed as dist
import transformers
from publishing import Replicas

from primerl import checkpoint, flops, loss, parallel, planning, weights
from primerl._common.forward_passes import recomputing

ROUNDS = 7
LAYERS, TOKENS, PIECE, FEW = 8, 1024, 768, 8
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
}
CLOCKS = (time.perf_counter, time.process_time)


def make(layers):
    config = transformers.Qwen3Config(num_hidden_layers=layers, **SHAPE)
    return transformers.Qwen3ForCausalLM(config)


def inputs(tokens):
    ids = torch.randint(2, SHAPE["vocab_size"], (tokens,))
    return ids, torch.arange(tokens), ids


def now():
    return np.array([clock() for clock in CLOCKS])


@attrs.define
class Timer:
    """Seconds of named calls, by both clocks."""

    found: dict[str, list[np.ndarray]] = attrs.field(factory=dict)

    def __call__(self, name, call):
        dist.barrier()
        begin = now()
        result = call()
        self.add(name, now() - begin)
        return result

    def add(self, name, seconds):
        self.found.setdefault(name, []).append(seconds)

    def medians(self):
        return {name: np.median(seconds[1:], axis=0) for name, seconds in self.found.items()}


class Passes:
    """Both passes of some layers and the head, with recomputation; seconds of its phases."""

    def __init__(self, layers, tokens):
        self.timer, self.tokens = Timer(), tokens
        self.model = parallel.recompute(make(layers).train())
        self.began, self.again = now(), 0.0

    def watch(self):
        """Time recomputation, by hooks that come after those of FSDP."""
        for layer in self.model.model.layers:
            layer.register_forward_pre_hook(self._before)
            layer.register_forward_hook(self._after, always_call=True)  # it stops early

    def _before(self, *_):
        self.began = now()

    def _after(self, *_):
        if recomputing():
            self.again = self.again + now() - self.began

    def measure(self, _step):
        timer, self.again = self.timer, 0.0
        logprobs = timer("forward", lambda: loss.model_logprobs(self.model, *inputs(self.tokens)))
        timer("backward", logprobs.sum().backward)
        timer.found["backward"][-1] -= self.again
        timer.add("recomputation", self.again)


class Run(Passes):
    """Steps of a sharded model, each with a checkpoint and a publication."""

    def __init__(self, stack, folder, layers, tokens):
        super().__init__(layers, tokens)
        parallel.shard(self.model, parallel.mesh())
        self.bytes = sum(one.numel() * 4 for one in self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        servers = [Replicas()] if dist.get_rank() == 0 else []
        for one in servers:
            stack.callback(one.close)
        self.checkpoints = stack.enter_context(
            checkpoint.Checkpoints(folder / f"run-{layers}", self.model, self.optimizer)
        )
        self.transport = stack.enter_context(
            weights.Disk(self.model, *servers, folder=folder / f"weights-{layers}")
        )

    def measure(self, step):
        super().measure(step)
        self.timer("optimizer", self.optimizer.step)
        self.timer("checkpoint", lambda: self.checkpoints.save(step + 1, wait=True))
        self.timer("publication", lambda: self.transport.publish(step))


def predicted(small, large, one, four, *, size):
    """Seconds of the run's phases from those of the pieces."""
    config = make(1).config
    of_layer, of_head = (
        new / old
        for new, old in zip(products(config, TOKENS), products(config, PIECE), strict=True)
    )
    slow, fast = large.timer.medians(), small.timer.medians()
    layers = {name: (slow[name] - fast[name]) / 2 for name in fast}
    most, least = four.timer.medians(), one.timer.medians()
    found = {
        name: most[name]
        + (most[name] - least[name]) * (size - four.bytes) / (four.bytes - one.bytes)
        for name in most
    }
    found["recomputation"] = 0.0  # of few tokens
    for name, seconds in layers.items():
        found[name] = found[name] + LAYERS * of_layer * seconds + of_head * (fast[name] - seconds)
    return found


def products(config, tokens):
    """FLOPs of a layer and of the head."""
    head = float(flops.breakdown(config, tokens).head)
    return float(flops.forward(config, tokens)) - head, head


def main():
    torch.set_num_threads(1)
    with parallel.process_group(seed=0) as world, contextlib.ExitStack() as stack:
        where = [stack.enter_context(tempfile.TemporaryDirectory()) if world.is_first else ""]
        dist.broadcast_object_list(where)
        folder = Path(where[0])
        run = Run(stack, folder, LAYERS, TOKENS)
        pieces = [
            Passes(1, PIECE),
            Passes(3, PIECE),
            Run(stack, folder, 1, FEW),
            Run(stack, folder, 4, FEW),
        ]
        for one in (*pieces, run):
            one.watch()
        for step in range(ROUNDS):
            for one in (*pieces, run):
                one.measure(step)
                one.model.zero_grad()
        dist.barrier()
        if world.is_first:
            real, expected = run.timer.medians(), predicted(*pieces, size=run.bytes)
            print("predicted / measured = ratio, by the clock and in CPU seconds")
            for name, seconds in real.items():
                columns = zip(expected[name], seconds, expected[name] / seconds, strict=True)
                print(f"{name:14}", *(f"{a:8.3f} /{b:7.3f} ={c:5.2f}" for a, b, c in columns))
            print(planning.model_size(make(LAYERS)).total, "parameters")


if __name__ == "__main__":
    main()
