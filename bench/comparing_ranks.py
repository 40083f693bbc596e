"""Run by bench/test_comparison.py on several ranks: compare a sharded model's tensors."""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import whole_comparison

from primerl import models, parallel, testing
from primerl._common.ranks import on_first_rank_gathering
from primerl.weights.verification import comparison
from primerl.weights.verification.comparison import TensorComparer
from primerl.weights.verification.served_tensors import TensorSlice, reading_of

ROUNDS = 3
WIRE = torch.bfloat16


def memory_mb(field):
    """Return a field of /proc/self/status: VmRSS, or VmHWM, the peak since ``clear_refs``."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def on_rank_0(model, servers):
    """The comparison as it was: every tensor on every rank, compared by rank 0."""
    tensors = models.checkpoint_tensors(model)
    return on_first_rank_gathering(
        lambda: whole_comparison.compare(tensors, servers, wire=WIRE), tensors
    )


def count_bytes(counted):
    """Add the bytes of the tensors that ``examine`` compares to ``counted``."""
    real = comparison.examine

    def examine(tensors, readings, *, wire):
        def noted():
            for name, tensor in tensors:
                counted.append(tensor.nbytes)
                yield name, tensor

        return real(noted(), readings, wire=wire)

    comparison.examine = examine


def main(folder, width, layers, by):
    torch.set_num_threads(1)
    with parallel.process_group(timeout_s=600.0) as world:
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": width // 8}
        model = testing.tiny_model("llama", **sizes, **heads).to(torch.bfloat16)
        total = sum(p.numel() * 2 for p in model.parameters())
        parallel.shard(model)
        readings = [
            reading_of(tensor, TensorSlice(name=name))
            for name, tensor in models.checkpoint_tensors(model)
        ]
        servers = {"http://0": readings, "http://1": list(readings)} if world.is_first else {}
        counted = [total * ROUNDS] if by == "rank 0" and world.is_first else []
        count_bytes(counted)
        comparer = TensorComparer(model, wire=WIRE)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before, seconds = memory_mb("VmRSS"), []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            found = on_rank_0(model, servers) if by == "rank 0" else comparer.compare(servers)
            seconds.append(time.perf_counter() - started)
            assert not any(one.wrong or not one.compared for one in (found or {}).values())
        told = [None] * world.world_size
        mine = sum(counted) / ROUNDS
        dist.all_gather_object(told, mine) if dist.is_initialized() else told.__setitem__(0, mine)
        if world.is_first:
            row = {
                "bytes": total,
                "seconds": statistics.median(seconds),
                "busiest": max(told),
                "grown_mb": memory_mb("VmHWM") - before,
            }
            (folder / "found.json").write_text(json.dumps(row))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
