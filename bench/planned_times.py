"""Seconds of the phases of a real run of two ranks, beside those predicted from rates.

    PYTHONPATH=tests/helpers OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 bench/planned_times.py

The rates are measured apart, on pieces: FLOP/s of both passes of one layer and of the head, with
fewer tokens than the run has and without FSDP; bytes/s of gloo's collectives on one buffer, of the
optimizer on one matrix, and of a checkpoint and a publication of a smaller model. Both ranks
measure at the same time, since they share memory and cores in the run, too. Sizes of the run are
those of ``primerl.planning`` and ``primerl.flops``. Medians.
"""

import statistics
import tempfile
import time
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
import transformers
from publishing import Replicas

from primerl import checkpoint, flops, loss, parallel, planning, weights
from primerl._common.forward_passes import recomputing

ROUNDS = 7
LAYERS, TOKENS, PIECE = 8, 1024, 768
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
}


def make(layers, **changed):
    config = transformers.Qwen3Config(num_hidden_layers=layers, **SHAPE | changed)
    return transformers.Qwen3ForCausalLM(config)


def prepare(model, mesh):
    parallel.shard(parallel.recompute(model.train()), mesh)
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


@attrs.define
class Timer:
    found: dict[str, list[float]] = attrs.field(factory=dict)

    def __call__(self, name, call):
        dist.barrier()
        begin = time.perf_counter()
        result = call()
        self.found.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    def medians(self):
        return {name: statistics.median(seconds[1:]) for name, seconds in self.found.items()}


def inputs(tokens):
    ids = torch.randint(2, SHAPE["vocab_size"], (tokens,))
    return ids, torch.arange(tokens), ids


def saved_and_published(model, optimizer, folder, timer, *, rounds=4):
    """Time checkpoints and publications."""
    servers = [Replicas()] if dist.get_rank() == 0 else []
    with (
        checkpoint.Checkpoints(folder / "run", model, optimizer) as checkpoints,
        weights.Disk(model, *servers, folder=folder / "weights") as transport,
    ):
        for step in range(rounds):
            timer("checkpoint", lambda step=step: checkpoints.save(step + 1, wait=True))
            timer("publication", lambda step=step: transport.publish(step))
    for one in servers:
        one.close()


def run(folder):
    """The run: seconds of its phases."""
    timer, again = Timer(), []
    model = make(LAYERS)
    optimizer = prepare(model, parallel.mesh())
    started = [0.0]

    def before(*_):
        started[0] = time.perf_counter()

    def after(*_):
        if recomputing():
            again[-1] += time.perf_counter() - started[0]

    for layer in model.model.layers:
        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after, always_call=True)  # recomputation stops early
    for _ in range(ROUNDS):
        logprobs = timer("forward", lambda: loss.model_logprobs(model, *inputs(TOKENS)))
        again.append(0.0)
        timer("backward", logprobs.sum().backward)
        timer("optimizer", optimizer.step)
        optimizer.zero_grad()
    saved_and_published(model, optimizer, folder, timer)
    found = timer.medians()
    found["recomputation"] = statistics.median(again[1:])
    found["backward"] -= found["recomputation"]
    return found


def passes(layers):
    """Seconds of both passes of a few layers and the head, without FSDP."""
    timer, model = Timer(), make(layers).train()
    for _ in range(ROUNDS):
        logprobs = timer("forward", lambda: loss.model_logprobs(model, *inputs(PIECE)))
        timer("backward", logprobs.sum().backward)
        model.zero_grad()
    return timer.medians()


def rates(folder):
    """Seconds per FLOP of layers and of the head, and seconds per byte."""
    one, three = passes(1), passes(3)
    config = make(1).config
    head = float(flops.breakdown(config, PIECE).head)
    layer = float(flops.forward(config, PIECE)) - head
    layers = {name: (three[name] - one[name]) / 2 for name in one}
    found = {f"layer {name}": layers[name] / layer for name in one}
    found |= {f"head {name}": (one[name] - layers[name]) / head for name in one}

    timer, size = Timer(), 2**21
    whole, part = torch.ones(size), torch.ones(size // 2)
    matrix = torch.nn.Parameter(torch.ones(1024, 1024))
    optimizer = torch.optim.AdamW([matrix], lr=1e-4)
    for _ in range(ROUNDS):
        timer("gather", lambda: dist.all_gather_into_tensor(whole, part))
        timer("reduce", lambda: dist.reduce_scatter_tensor(part, whole))
        matrix.grad = torch.ones_like(matrix)
        timer("optimizer", optimizer.step)
    model = make(3)
    optimizer = prepare(model, parallel.mesh())
    loss.model_logprobs(model, *inputs(64)).sum().backward()
    optimizer.step()
    saved_and_published(model, optimizer, folder, timer)
    seconds = timer.medians()
    own = sum(one.numel() * 4 for one in model.parameters())
    found |= {"gather": seconds["gather"] / (4 * size), "reduce": seconds["reduce"] / (4 * size)}
    found["optimizer"] = seconds["optimizer"] / matrix.nbytes
    found |= {name: seconds[name] / own for name in ("checkpoint", "publication")}
    return found


def predicted(rate):
    """Seconds of the run's phases, from the plan's bytes, its FLOPs, and the rates."""
    with torch.device("meta"):
        model = make(LAYERS)
    config = model.config
    head = float(flops.breakdown(config, TOKENS).head)
    layers = float(flops.forward(config, TOKENS)) - head
    whole = sum(one.numel() * 4 for one in model.parameters())
    outside = 2 * config.vocab_size * config.hidden_size * 4
    gathered = rate["gather"] * whole
    return {
        "forward": rate["layer forward"] * layers + rate["head forward"] * head + gathered,
        "recomputation": rate["layer forward"] * layers,
        # Parameters outside the layers stay gathered after the forward pass.
        "backward": rate["layer backward"] * layers
        + rate["head backward"] * head
        + rate["gather"] * (whole - outside)
        + rate["reduce"] * whole,
        "optimizer": rate["optimizer"] * whole / 2,
        "publication": rate["publication"] * whole,
        "checkpoint": rate["checkpoint"] * whole,
    }


def main():
    torch.set_num_threads(1)
    with parallel.process_group(seed=0) as world:
        where = [tempfile.mkdtemp() if world.is_first else ""]
        dist.broadcast_object_list(where)
        folder = Path(where[0])
        expected = predicted(rates(folder / "rates"))
        real = run(folder / "run")
        if world.is_first:
            for name, seconds in expected.items():
                ratio = seconds / real[name]
                print(
                    f"{name:14} predicted {seconds:7.3f}  measured {real[name]:7.3f}  {ratio:5.2f}"
                )
            print(planning.model_size(make(LAYERS)).total, "parameters")


if __name__ == "__main__":
    main()
