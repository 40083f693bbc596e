"""Run by bench/test_checkpoint.py on several ranks: save, verify and load a sharded state."""

import gc
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from primerl import checkpoint, parallel
from primerl.checkpoint import checkpoints

WIDTH = 2048
SAVES, RESUMES = 2, 3
STATE = 12 * WIDTH * WIDTH  # bytes of a layer: float32 values with two moments


class Layers(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def read_bytes():
    """Bytes that this process has made the disk read."""
    fields = dict(
        line.split(": ") for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    )
    return int(fields["read_bytes"])


def forget(folder):
    """Remove the files from the page cache."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def memory_mb(field):
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def reset_peak():
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def timed(found, phase, function):
    """Return ``function``, which notes its (CPU) seconds and what it makes the disk read."""

    def called(*arguments, **named):
        forget(arguments[0])
        began, cpu, read = time.perf_counter(), time.process_time(), read_bytes()
        result = function(*arguments, **named)
        found[f"{phase}_s"] = time.perf_counter() - began
        found[f"{phase}_cpu_s"] = time.process_time() - cpu
        found[f"{phase}_mb"] = (read_bytes() - read) / 1e6
        return result

    return called


def timed_together(work):
    """Return the seconds until all ranks have done their work."""
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    work()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - began


def least(rounds):
    """The least of each quantity: other processes of this machine only add to it."""
    return {name: min(one[name] for one in rounds) for name in rounds[0]}


def main(folder, gigabytes):
    torch.set_num_threads(1)
    with parallel.process_group(timeout_s=600.0) as world:
        with torch.device("meta"):
            model = Layers(max(4, round(gigabytes * 1e9 / STATE)))
        parallel.shard(model)
        model.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(world.rank)
        for parameter in model.parameters():
            with torch.no_grad():
                local(parameter).uniform_(generator=generator)
            parameter.grad = parameter.detach().clone()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.step()
        optimizer.zero_grad()
        before = [local(parameter).clone() for parameter in model.parameters()]
        rounds = []
        with checkpoint.Checkpoints(folder, model, optimizer, keep=1) as saves:
            for step in range(1, SAVES + 1):
                cpu = time.process_time()
                stall_s = timed_together(lambda step=step: saves.save(step))
                write_s = stall_s + timed_together(saves.close)
                cpu = time.process_time() - cpu
                rounds.append({"stall_s": stall_s, "write_s": write_s, "write_cpu_s": cpu})
        found = least(rounds)
        found["written_mb"] = (
            max(path.stat().st_size for path in folder.rglob(f"rank-{world.rank:05d}.*")) / 1e6
        )
        saved = None
        if world.is_first:
            began = time.perf_counter()
            saved = checkpoint.last_good(folder, verify=False)
            found["last_good_s"] = time.perf_counter() - began
            forget(folder)
            began = time.perf_counter()
            checkpoint.last_good(folder)
            found["alone_s"] = time.perf_counter() - began
        del saves
        gc.collect()  # the host memory of saving
        rounds = []
        verify, load = checkpoints.verify_share, checkpoints.load
        for _ in range(RESUMES):
            with torch.no_grad():
                for parameter in model.parameters():
                    local(parameter).zero_()
            one = {}
            checkpoints.verify_share = timed(one, "verify", verify)
            checkpoints.load = timed(one, "load", load)
            reset_peak()
            held = memory_mb("VmRSS")
            with checkpoint.Checkpoints(folder, model, optimizer, keep=1) as saves:
                one["resume_s"] = timed_together(lambda saves=saves: saves.load(saved))
            one["grown_mb"] = memory_mb("VmHWM") - held
            rounds.append(one)
            for parameter, was in zip(model.parameters(), before, strict=True):
                assert torch.equal(local(parameter), was)
        found |= least(rounds)
        told = [found] * world.world_size
        if dist.is_initialized():
            dist.all_gather_object(told, found)
        if world.is_first:
            (folder / "found.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
