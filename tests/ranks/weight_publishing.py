"""Run by torchrun in tests/weights/transports/test_transports.py: a sharded trainer publishes."""

import json
import os
import sys
from pathlib import Path

import torch
from adapter_holder import Holder, adapted
from publishing import Replicas, same_bits, train
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef

from primerl import models, parallel, testing, weights
from primerl.weights.transports import publisher


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
    except (RuntimeError, OSError, ValueError) as error:
        return str(error)
    return ""


def family(kind, encoding, world, folder, found):
    model, alone = (testing.tiny_model(kind, seed=0) for _ in range(2))
    parallel.shard(model)
    servers = Replicas(2)
    engines = [servers] if world.is_first else []
    target = folder / f"{kind}-{encoding}" if world.is_first else None
    transport = weights.Disk(model, *engines, folder=target, encoding=encoding)
    for version in range(1, 2 if encoding == "full" else 3):
        if version == 2:
            nudge(model, alone)
        receipt = transport.publish(version)
        found["receipts"].append(receipt.kind)
        found["metrics"] = receipt.metrics
    if world.is_first:
        expected = dict(models.checkpoint_tensors(alone))
        held = [server.tensors for server in servers.workers.values()]
        found["same"][f"{kind} {encoding}"] = all(same_bits(h, expected) for h in held)
        if encoding == "delta":
            found["kinds"] = found["receipts"][-2:]
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
        family("qwen3_moe", "delta", world, folder, found)
        failing(world, folder, found)
        adapter(world, folder, found)
        model = testing.tiny_model("qwen3_moe", num_hidden_layers=6)
        found["layer"] = 4 * sum(p.numel() for p in model.model.layers[0].parameters())
        found["whole"] = 4 * sum(p.numel() for p in model.parameters())
        found["peak"] = peak_held(parallel.shard(model))
    (folder / f"found-{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
