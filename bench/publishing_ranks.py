"""Run by bench/test_publication.py on several ranks: publish a sharded model to two servers."""

import json
import multiprocessing
import resource
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from publishing import Replica
from torch.distributed.tensor import DTensor

from primerl import parallel, testing, weights

ROUNDS = 3
WORKERS = 2  # of each server; each uses every second tensor


def serve(connection, place):
    """Prepare and load the publications that are named, until the connection is closed."""
    torch.set_num_threads(1)
    numbers = {}
    replica = Replica(
        lambda name: numbers.setdefault(name, len(numbers)) % WORKERS == place, timeout_s=600.0
    )
    while (update := connection.recv()) is not None:
        replica.prepare(update)
        connection.send("prepared")
        connection.recv()
        replica.load(update)
        connection.send(replica.receipt)
    replica.close()


class ServerProcesses:
    """A ``weights.Fetcher`` over servers whose workers are processes of their own."""

    def __init__(self, count):
        context = multiprocessing.get_context("spawn")
        self.connections, self.processes = [], []
        for worker in range(count * WORKERS):
            here, there = context.Pipe()
            place = worker % WORKERS
            process = context.Process(target=serve, args=[there, place], daemon=True)
            process.start()
            self.connections.append(here)
            self.processes.append(process)

    def load_weights(self, update, *, version, timeout_s=600.0, send=None):  # noqa: ARG002
        for connection in self.connections:
            connection.send(update)
        for connection in self.connections:
            connection.recv()
        for connection in self.connections:
            connection.send("load")
        receipts = [one.recv() for one in self.connections]
        servers = range(len(receipts) // WORKERS)
        return {f"http://{n}": receipts[n * WORKERS : (n + 1) * WORKERS] for n in servers}

    def close(self):
        for connection in self.connections:
            connection.send(None)
        for process in self.processes:
            process.join(30.0)


def changed(model, *, fraction, seed):
    """Change a few words of each shard, as a step at a small learning rate does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            flat = local.view(-1)
            count = max(1, int(len(flat) * fraction))
            places = torch.randint(len(flat), (count,), generator=generator)
            flat[places] += 0.5


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(folder, width, layers, encoding, transport_name):
    torch.set_num_threads(1)
    with parallel.process_group(timeout_s=600.0) as world:
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": width // 8}
        model = testing.tiny_model("llama", **sizes, **heads).to(torch.bfloat16)
        total = sum(p.numel() * 2 for p in model.parameters())
        parallel.shard(model)
        servers = ServerProcesses(2) if world.is_first else None
        transport = getattr(weights, transport_name)(
            model,
            *([servers] if world.is_first else []),
            folder=folder / "w" if world.is_first else None,
            encoding=encoding,
            snapshot_every=100,
        )
        transport.publish(0)
        before = peak_mb()
        receipts = []
        for version in range(1, ROUNDS + 1):
            changed(model, fraction=0.02, seed=version)
            receipts.append(transport.publish(version))
        beside = []
        for version in range(ROUNDS + 1, 2 * ROUNDS + 1):
            changed(model, fraction=0.02, seed=version)
            began = time.perf_counter()
            pending = transport.start(version)
            held = time.perf_counter() - began
            pending.wait()
            beside.append([held, time.perf_counter() - began])
        part = transport._parts.publisher.files
        written = sum(path.stat().st_size for path in part.glob("*.safetensors"))
        told = [None] * world.world_size
        own = {"written": written, "grown_mb": peak_mb() - before}
        dist.all_gather_object(told, own) if dist.is_initialized() else told.__setitem__(0, own)
        if world.is_first:
            phases = {
                phase: statistics.median(one.seconds[phase] for one in receipts)
                for phase in receipts[0].seconds
            }
            phases["pause"] = statistics.median(
                max(
                    worker["seconds"]["load"]
                    for server in one.servers.values()
                    for worker in server
                )
                for one in receipts
            )
            phases["held"], phases["beside"] = map(statistics.median, zip(*beside, strict=True))
            found = {"bytes": total, "seconds": phases, "ranks": told}
            (folder / "found.json").write_text(json.dumps(found))
        if world.is_first:
            servers.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
