"""Run by test_served_tensors.py: ranks of a sharded trainer compare the layers that they own."""

import json
import sys
from pathlib import Path

import attrs
import torch
import whole_comparison
from adapter_holder import adapted
from torch.multiprocessing.reductions import StorageWeakRef

from primerl import models, parallel, testing
from primerl.weights.verification import comparison
from primerl.weights.verification.comparison import TensorComparer
from primerl.weights.verification.served_tensors import (
    TensorSlice,
    reading_of,
    rearranged_reading,
)


def readings_of(tensors, *, wrong):
    """All tensors but one, one of them off by a bit; and layers' tensors merged, two of them."""
    whole = {name: TensorSlice(name=name) for name in tensors}
    norms = [name for name in tensors if name.endswith("input_layernorm.weight")]
    readings = [
        rearranged_reading(
            torch.cat([tensors[n].flatten() for n in names]), [whole[n] for n in names]
        )
        for names in (norms[:2], norms[1:])
    ]
    for name in list(tensors)[1:]:
        held = tensors[name].clone()
        if name == wrong:
            held.view(torch.int32).view(-1)[-1] += 1
        readings.append(reading_of(held, whole[name]))
    return readings


def check(model, alone, *, merged, found):
    """Compare a sharded model's tensors with readings of the same model on one rank."""
    tensors = dict(models.checkpoint_tensors(alone, merge_adapters=merged))
    wrong = list(tensors)[-2]
    servers = {
        "right": readings_of(tensors, wrong=None),
        "wrong": readings_of(tensors, wrong=wrong),
    }
    expected = whole_comparison.compare(
        models.checkpoint_tensors(model, merge_adapters=merged), servers, wire=torch.float32
    )
    comparer = TensorComparer(model, wire=torch.float32)
    got = [comparer.compare(servers, merge_adapters=merged) for _ in range(2)]
    found["expected"].append({server: attrs.asdict(one) for server, one in expected.items()})
    for one in got:
        found["got"].append({server: attrs.asdict(result) for server, result in one.items()})
    found["wrong"].append(wrong)


def watched(found):
    """Have ``examine`` record the bytes that this rank compares, and the most that are alive."""
    real = comparison.examine

    def examine(tensors, readings, *, wire):
        alive = {}

        def noted():
            for name, tensor in tensors:
                storage = tensor.untyped_storage()
                alive[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
                found["examined"] += tensor.nbytes
                del storage
                yield name, tensor
                del tensor
                held = sum(size for ref, size in alive.values() if not ref.expired())
                found["peak"] = max(found["peak"], held)

        return real(noted(), readings, wire=wire)

    comparison.examine = examine
    return real


def main(folder):
    torch.set_num_threads(1)
    found = {"expected": [], "got": [], "wrong": [], "examined": 0, "peak": 0}
    with parallel.process_group(timeout_s=60.0) as world:
        alone, model = (testing.tiny_model("qwen3_moe", num_hidden_layers=6) for _ in range(2))
        parallel.shard(model)
        check(model, alone, merged=True, found=found)
        sharded = parallel.shard(adapted())
        for merged in (True, False):
            check(sharded, adapted(), merged=merged, found=found)
        real = watched(found)
        TensorComparer(model, wire=torch.float32).compare({"server": []})
        comparison.examine = real
        found["whole"] = sum(t.nbytes for _, t in models.checkpoint_tensors(alone))
        found["layer"] = sum(p.nbytes for p in alone.model.layers[0].parameters())
        try:  # rank 1 fails in the middle
            if world.rank == 1:
                comparison.content_of = None
            check(model, alone, merged=True, found=found)
        except (RuntimeError, TypeError) as error:
            found["failure"] = str(error)
    (folder / f"found-{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
