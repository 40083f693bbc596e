"""Run by torchrun in test_wiring.py: canary and wiring test of a sharded model."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from copy_engine import CopyEngine

from primerl import parallel, testing, weights

SIZES = {"count": 2, "length": 40, "new_tokens": 4}


def step(model, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(2, 60, (2, 32), generator=generator)
    logprobs = model(rows).logits[:, :-1].log_softmax(-1).gather(2, rows[:, 1:, None])
    (logprobs[..., 0] * torch.randn(2, 31, generator=generator)).mean().backward()
    torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0).step()
    model.zero_grad()


def too_long(*_, **__):
    raise ValueError("the sequence exceeds the context")


def local_parts(model):
    return [parameter.to_local().clone() for parameter in model.parameters()]


def main():
    torch.set_num_threads(1)
    found = {}
    with parallel.process_group() as world:
        plain = testing.tiny_model("qwen3_moe")
        first = world.rank == 0
        engine = CopyEngine(plain, servers=2) if first else None
        engines = [engine] if first else []
        model = parallel.shard(testing.tiny_model("qwen3_moe"))
        transport = weights.SharedMemory(model, *engines)
        watch = weights.Canary(model, engine, **SIZES)
        before = local_parts(model)
        report = weights.wiring_test(model, transport, watch, version=0)
        found["missing"], found["unseen"] = report.missing, report.unseen
        same = [torch.equal(a, b) for a, b in zip(before, local_parts(model), strict=True)]
        found["restored"] = all(same)
        verdicts = [watch.check(0)]
        step(model, 1)
        transport.publish(1)
        verdicts.append(watch.check(1))
        step(model, 2)
        verdicts.append(watch.check(2))  # nothing was published
        found["passed"] = [verdict.passed for verdict in verdicts]
        told = [None] * world.world_size
        dist.all_gather_object(told, repr(verdicts))
        found["same on all ranks"] = told[0] == told[1]
        transport.publish(2)
        if first:
            engine.skip = lambda name: "q_proj" in name
        try:
            weights.wiring_test(model, transport, watch, version=2)
            lost = ""
        except RuntimeError as error:
            lost = str(error).splitlines()[0]
        dist.all_gather_object(told, lost)
        found["lost"] = told
        if first:
            engine.probe = too_long
        try:
            watch.check(2)
        except (RuntimeError, ValueError) as error:
            lost = f"{type(error).__name__}: {error}"
        found["refused"] = [None] * world.world_size
        dist.all_gather_object(found["refused"], lost)
        if first:
            Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
