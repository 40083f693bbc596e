"""Run by test_late_ranks.py on three ranks: one rank works for longer than a collective waits.

late_ranks.py FOLDER late             each wait in turn, with another rank that is late
late_ranks.py FOLDER stopped|asleep|silent-load|never-loads     rank 1 hangs, as the name says
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
from publishing import Replicas

from primerl import checkpoint, models, parallel, testing, weights
from primerl._common import progress, ranks
from primerl.checkpoint import checkpoints, writing
from primerl.models import sharded_loading

COLLECTIVE_S = 3.0
LATE_S = 4.0


@attrs.frozen
class Batch:
    rows: torch.Tensor


def late(function, *, rank):
    """Return ``function``, but its first call on one rank takes longer than a collective waits."""
    left = [dist.get_rank() == rank]

    def called(*arguments, **named):
        if left.pop() if left else False:
            time.sleep(LATE_S)
        return function(*arguments, **named)

    return called


class LateReplicas(Replicas):
    """Servers that take longer to load than a collective waits."""

    def load_weights(self, *arguments, **named):
        time.sleep(LATE_S)
        return super().load_weights(*arguments, **named)


def rollouts_and_evaluation(world):
    found = []
    for step in range(2):
        batches = None
        if world.is_first:
            time.sleep(LATE_S * (1 - step))  # as the first rollouts
            batches = [[Batch(torch.full((2,), rank + step))] for rank in range(3)]
        (batch,) = parallel.scatter(batches, Batch)
        found.append(batch.rows.tolist())
        if world.is_first and step:
            time.sleep(LATE_S)  # as an evaluation
        assert not world.should_stop()
    return found


def loaded_model(world, folder):
    source = testing.tiny_model("llama")
    if world.is_first:
        source.save_pretrained(folder / "model")
    if world.rank == 1:
        time.sleep(LATE_S)  # as a slow disk
    parallel.shard(source)
    model = parallel.shard(models.empty_model(folder / "model"))
    sharded_loading._fill = late(sharded_loading._fill, rank=2)
    models.load_shards(model, folder / "model")
    pairs = zip(model.parameters(), source.parameters(), strict=True)
    assert all(torch.equal(one.to_local(), other.to_local()) for one, other in pairs)
    return model


def saves(model, folder):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return checkpoint.Checkpoints(folder, model, optimizer, timeout_s=COLLECTIVE_S)


def saved_and_loaded(world, model, folder):
    writing.write_pieces = late(writing.write_pieces, rank=1)
    with saves(model, folder) as saving:
        saving.save(1, wait=True)
    checkpoints.verify_share = late(checkpoints.verify_share, rank=2)
    checkpoints.load = late(checkpoints.load, rank=0)
    saved = checkpoint.last_good(folder, verify=False) if world.is_first else None
    with saves(model, folder) as saving:
        return saving.load(saved)


def published(world, model, folder):
    engines = [LateReplicas()] if world.is_first else []
    transport = weights.Disk(model, *engines, folder=folder / "weights")
    receipt = transport.publish(1)
    if world.is_first:
        engines[0].close()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_S))
    encode = late(lambda: world.rank, rank=1)
    return [receipt.version, *ranks.on_every_rank_gathering(encode, iter(()), group)]


def all_late(world, folder):
    found = {"batches": rollouts_and_evaluation(world)}
    model = loaded_model(world, folder)
    found["step"] = saved_and_loaded(world, model, folder)
    found["published"] = published(world, model, folder)
    if world.is_first:
        time.sleep(LATE_S)  # as a report
    return found


def hang(world, folder, kind):
    """Hang on rank 1, until the other ranks have failed."""
    dist.barrier()
    if world.rank == 1:
        (folder / "pid").write_text(str(os.getpid()))
        progress.report("training", "micro-batches: 7")
        time.sleep(2 * COLLECTIVE_S / 3)  # tell it to the other ranks
        if kind in ("stopped", "silent-load"):
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            time.sleep(60)
    if kind in ("stopped", "asleep"):
        dist.all_reduce(torch.zeros(1))
    else:
        parallel.wait_for_all("the end of loading on all ranks")


def main(folder, kind):
    torch.set_num_threads(1)
    limits = {"wait_timeout_s": 6.0} if kind == "never-loads" else {}
    world = parallel.process_group(timeout_s=COLLECTIVE_S, **limits)
    found = {}
    if kind == "late" and world.is_first:
        time.sleep(LATE_S)  # as servers that start
    try:
        with world:
            if kind == "late":
                found = all_late(world, folder)
            else:
                hang(world, folder, kind)
    except RuntimeError as error:
        found["error"] = str(error)
        raise
    finally:
        (folder / f"{kind}-{world.rank}.json").write_text(json.dumps(found))
        if kind != "late" and world.rank != 1:
            os.kill(int((folder / "pid").read_text()), signal.SIGCONT)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
