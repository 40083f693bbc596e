"""Run by torchrun in tests/weights/transports/test_transports.py: a sharded trainer publishes."""

import json
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from adapter_holder import Holder, adapted
from copy_engine import CopyEngine
from publishing import Replicas, same_bits, train
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef

from primerl import models, parallel, testing, weights
from primerl.weights.transports.publications import publisher


def peak_held(model):
    """Bytes of whole tensors that are alive at once, as far as they are handed out."""
    seen, peak = {}, 0
    for _, tensor in models.checkpoint_tensors(model):
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        del tensor, storage
        peak = max(peak, sum(size for ref, size in seen.values() if not ref.expired()))
    return peak


def raised(call):
    try:
        call()
    except (RuntimeError, OSError, ValueError, IndexError) as error:
        return str(error)
    return ""


def family(kind, encoding, world, folder, found, *, ep=1, transport_class=weights.Disk):
    model, alone = (testing.tiny_model(kind, seed=0) for _ in range(2))
    parallel.shard(model, parallel.mesh(ep=ep))
    servers = Replicas(2)
    engines = [servers] if world.is_first else []
    named = f"{kind} {encoding}" + (" ep" if ep > 1 else "")
    named += " network" if transport_class is weights.Network else ""
    target = folder / named if world.is_first else None
    transport = transport_class(model, *engines, folder=target, encoding=encoding)
    for version in range(1, 2 if encoding == "full" else 3):
        if version == 2:
            nudge(model, alone)
        receipt = transport.publish(version)
        found["receipts"].append(receipt.kind)
        found["metrics"] = receipt.metrics
    if world.is_first:
        expected = dict(models.checkpoint_tensors(alone))
        held = [server.tensors for server in servers.workers.values()]
        found["same"][named] = all(same_bits(h, expected) for h in held)
        if encoding == "delta" and ep == 1:
            found["kinds"] = found["receipts"][-2:]
    servers.close()


def merged_adapters(world, folder, found):
    """Of a sharded model, merged into the weights."""
    servers = Replicas(1)
    transport = weights.Disk(
        parallel.shard(adapted()),
        *([servers] if world.is_first else []),
        folder=folder / "merged" if world.is_first else None,
    )
    transport.publish(1)
    if world.is_first:
        expected = dict(models.checkpoint_tensors(adapted()))
        found["same"]["merged"] = same_bits(servers.workers["http://replica0"].tensors, expected)
    servers.close()


def nudge(model, alone):
    """The same small change on the sharded model and on the whole one."""
    train(alone, seed=5)
    whole = alone.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            sharded = torch.distributed.tensor.distribute_tensor(
                whole[name], parameter.device_mesh, parameter.placements
            )
            parameter.copy_(sharded)


def failing(world, folder, found):
    """Rank 0 fails while loading, and in the middle of a gather."""

    class Truncating(Replicas):
        def load_weights(self, update, *, version, timeout_s=600.0, send=None):
            if version == 1:
                os.truncate(folder / "f" / "00000001.full.safetensors", 100)
            return super().load_weights(update, version=version)

    model = parallel.shard(testing.tiny_model("llama", seed=0))
    servers = Truncating()
    engines = [servers] if world.is_first else []
    transport = weights.Disk(model, *engines, folder=folder / "f" if world.is_first else None)
    found["failure"] = raised(lambda: transport.publish(1))

    real = publisher.write_tensors

    def full_disk(path, layout, tensors, *, spare=None):
        next(tensors)
        raise OSError("the disk is full")

    publisher.write_tensors = full_disk
    found["mid_gather"] = raised(lambda: transport.publish(2))
    publisher.write_tensors = real
    transport.publish(3)
    found["after"] = not world.is_first or servers.workers["http://replica0"].version == 3
    servers.close()


def parts(world, folder, found):
    """Each rank writes a part; a part is lost, torn, or fails; servers join late."""
    model = parallel.shard(testing.tiny_model("qwen3_moe", seed=0, num_hidden_layers=6))
    servers, late = Replicas(2), Replicas()
    target = folder / "parts"
    transport = weights.Disk(
        model,
        *([servers] if world.is_first else []),
        folder=target if world.is_first else None,
        encoding="delta",
        snapshot_every=4,
    )
    if world.is_first:
        (target / "part-0007").mkdir()  # of a run on more ranks
    kinds = [transport.publish(1).kind]
    found["stale"] = (target / "part-0007").exists()
    found["files"] = sorted(path.name for path in target.rglob("00000001.*"))
    found["sizes"] = [
        path.stat().st_size for path in sorted(target.rglob("00000001.full.safetensors"))
    ]
    move(model, 2)
    kinds.append(transport.publish(2).kind)

    if world.rank == 1:  # rank 1 fails in the middle
        real, publisher.write_tensors = publisher.write_tensors, broken
    move(model, 3)
    found["other_rank"] = raised(lambda: transport.publish(3))
    if world.rank == 1:
        publisher.write_tensors = real
    found["uncommitted"] = not (target / "00000003.json").exists()

    move(model, 4)
    transport.publish(4)
    move(model, 5)
    receipt = transport.publish(5)
    kinds.append(receipt.kind)
    found["part_kinds"] = kinds
    expected = {name: tensor.clone() for name, tensor in models.checkpoint_tensors(model)}
    if world.is_first:
        late.load_weights({"folder": str(target), "version": 5}, version=5)
        held = [server.tensors for server in (*servers.workers.values(), *late.workers.values())]
        found["parts_same"] = [same_bits(tensors, expected) for tensors in held]
        late.close()
    servers.close()


def broken(path, layout, tensors, *, spare=None):
    next(iter(tensors))
    raise OSError("the disk of rank 1 is full")


def move(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()
            local += 1e-3 * (torch.rand(local.shape, generator=generator) < 0.01)


def torn(world, folder, found):
    """A delta of which one rank's part arrives torn: all ranks publish the version in full."""
    model = parallel.shard(testing.tiny_model("llama", seed=0, num_hidden_layers=4))
    target = folder / "torn"

    class Tearing(Replicas):
        def load_weights(self, update, *, version, timeout_s=600.0, send=None):
            part = target / "part-0001" / f"{version:08d}.delta.safetensors"
            if part.exists():
                os.truncate(part, part.stat().st_size - 1)
            return super().load_weights(update, version=version)

    servers = Tearing(2)
    transport = weights.Disk(
        model,
        *([servers] if world.is_first else []),
        folder=target if world.is_first else None,
        encoding="delta",
    )
    transport.publish(1)
    move(model, 2)
    receipt = transport.publish(2)
    found["fallback"] = [receipt.kind, receipt.fallback]
    move(model, 3)
    expected = {name: tensor.clone() for name, tensor in models.checkpoint_tensors(model)}
    transport.publish(3)
    if world.is_first:
        held = [server.tensors for server in servers.workers.values()]
        found["torn_same"] = [same_bits(tensors, expected) for tensors in held]
    servers.close()


def beside_training(world, folder, found):
    """Weights that change, and collectives of the default group, while a version is sent."""
    model = parallel.shard(testing.tiny_model("qwen3_moe", seed=0, num_hidden_layers=4))
    let_go = threading.Event()

    class Slow(Replicas):
        def load_weights(self, update, *, version, timeout_s=600.0, send=None):
            assert let_go.wait(60.0)
            return super().load_weights(update, version=version)

    servers = Slow(2)
    with weights.Disk(
        model,
        *([servers] if world.is_first else []),
        folder=folder / "beside" if world.is_first else None,
        encoding="delta",
    ) as transport:
        same, kinds = [], []
        for version in range(1, 4):
            move(model, version)
            expected = {name: tensor.clone() for name, tensor in models.checkpoint_tensors(model)}
            let_go.clear()
            pending = transport.start(version)
            found["busy"] = raised(lambda: transport.publish(9))
            move(model, 10 + version)
            dist.all_reduce(torch.ones(1))
            let_go.set()
            receipt = pending.wait()
            kinds.append(receipt.kind)
            if world.is_first:
                held = [server.tensors for server in servers.workers.values()]
                same.append(all(same_bits(tensors, expected) for tensors in held))
        found["beside"] = [kinds, same, pending.wait() is receipt]

        # The copies in host memory are broken on one rank: no rank waits for ever.
        real = transport._host_memory.copied
        if world.rank == 1:
            transport._host_memory.copied = lambda layer: [][0]
        found["uncopied"] = raised(lambda: transport.start(4))
        transport._host_memory.copied = real
        transport.publish(5)
        found["copied_again"] = not world.is_first or servers.workers["http://replica0"].version
    servers.close()


def agreeing(world, folder, found):
    """What only one rank sees is raised on all, and no rank waits for ever."""
    model = parallel.shard(testing.tiny_model("llama", seed=0))
    let_go = threading.Event()

    class Slow(Replicas):
        def load_weights(self, update, *, version, timeout_s=600.0, send=None):
            assert let_go.wait(60.0)
            return super().load_weights(update, version=version)

    servers = Slow()
    engine = CopyEngine(testing.tiny_model("llama", seed=0)) if world.is_first else None
    transport = weights.Disk(
        model,
        *([servers] if world.is_first else []),
        folder=folder / "agreeing" if world.is_first else None,
        encoding="delta",
    )
    verified = weights.VerifiedTransport(transport, weights.Canary(model, engine), worker=None)
    let_go.set()
    pending = verified.start(1)
    if world.rank == 1:
        model.model.norm.weight.data.to_local()[0] += 1
    found["changed"] = raised(pending.wait)
    found["versions"] = raised(lambda: transport.publish(2 + world.rank))

    let_go.clear()
    pending = transport.start(4)
    limit_s = transport._limit_s
    if world.rank == 1:
        transport._limit_s = 0.01
    else:
        threading.Timer(1.0, let_go.set).start()
    found["late"] = raised(pending.wait)
    transport._limit_s = limit_s
    pending.abandon(60.0)

    same = []
    for version in (5, 6):
        model.register_buffer("extra", torch.arange(float(version)))
        transport.publish(version)
        expected = {name: tensor.clone() for name, tensor in models.checkpoint_tensors(model)}
        if world.is_first:
            same.append(same_bits(servers.workers["http://replica0"].tensors, expected))
        move(model, version)
    found["other_tensors"] = same
    servers.close()


def unfinished(world, folder):
    """The ranks leave while a version is sent: they wait for the thread that sends it."""
    servers = Replicas()
    transport = weights.Disk(
        parallel.shard(testing.tiny_model("llama", seed=0)),
        *([servers] if world.is_first else []),
        folder=folder / "unfinished" if world.is_first else None,
    )
    return transport.start(1)


def adapter(world, folder, found):
    """Of a sharded model; the holder compares its digest with that of its files."""
    holder = Holder()
    transport = weights.Adapter(
        parallel.shard(adapted()),
        *([holder] if world.is_first else []),
        folder=folder / "adapter" if world.is_first else None,
    )
    receipt = transport.publish(1)
    models.save_adapters(adapted(), folder / "alone")
    found["unsaved"] = raised(lambda: models.save_adapters(adapted(), None))
    found["adapter"] = [receipt.kind, receipt.digest, receipt.tensors]
    if world.is_first:
        expected = load_file(folder / "alone" / "adapter_model.safetensors")
        found["same"]["adapter"] = same_bits(holder.tensors, expected)


def main(folder):
    found = {"same": {}, "receipts": []}
    with parallel.process_group(timeout_s=60.0) as world:
        family("llama", "full", world, folder, found)
        family("qwen3_moe", "full", world, folder, found)
        network = {"transport_class": weights.Network}
        family("qwen3_moe", "delta", world, folder, found, **network)
        family("qwen3_moe", "delta", world, folder, found)
        family("qwen3_moe", "full", world, folder, found, ep=2)
        merged_adapters(world, folder, found)
        failing(world, folder, found)
        parts(world, folder, found)
        torn(world, folder, found)
        beside_training(world, folder, found)
        agreeing(world, folder, found)
        adapter(world, folder, found)
        model = testing.tiny_model("qwen3_moe", num_hidden_layers=6)
        found["layer"] = 4 * sum(p.numel() for p in model.model.layers[0].parameters())
        found["whole"] = 4 * sum(p.numel() for p in model.parameters())
        found["peak"] = peak_held(parallel.shard(model))
        pending = unfinished(world, folder)
    found["unfinished"] = "done" if pending.work.done() else "cut"
    (folder / f"found-{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
