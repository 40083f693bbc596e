"""Run by test_publication_faults.py: ranks that are killed while they publish, and later runs.

Each run is a launch of its own in the same folder. The first argument is the run's name.
"""

import functools
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from publishing import Replicas, same_bits

from primerl import models, parallel, testing, weights
from primerl.weights.transports.publications import publisher


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def model_of(version):
    """The sharded model, and its tensors, as they are published."""
    model = parallel.shard(testing.tiny_model("llama", seed=version, num_hidden_layers=6))
    return model, {name: tensor.clone() for name, tensor in models.checkpoint_tensors(model)}


def follow(model, version):
    """Change the model to what it is at ``version``."""
    other = parallel.shard(testing.tiny_model("llama", seed=version, num_hidden_layers=6))
    with torch.no_grad():
        for own, new in zip(model.parameters(), other.parameters(), strict=True):
            own.copy_(new)


def transport_of(model, servers, folder, world):
    engines = [servers] if world.is_first else []
    target = folder / "weights" if world.is_first else None
    return weights.Disk(model, *engines, folder=target, encoding="delta")


def killed_while_writing(folder, world, found):
    """Rank 1 of three is killed when it has written a tensor of its part of version 2."""
    model, expected = model_of(1)
    servers = Replicas(2)
    transport = transport_of(model, servers, folder, world)
    transport.publish(1)
    follow(model, 2)
    real = publisher.write_tensors

    def write_tensors(path, layout, tensors, *, spare=None):
        def killed():
            iterator = iter(tensors)
            yield next(iterator)
            die()

        real(path, layout, killed() if world.rank == 1 else tensors, spare=spare)

    publisher.write_tensors = write_tensors
    failing(lambda: transport.publish(2), servers, expected, found)


def killed_before_the_manifest(folder, world, found):
    """Two ranks publish version 2 again; rank 0 is killed before its manifest of version 3.

    It publishes version 3 beside training.
    """
    model, expected = model_of(2)
    servers = Replicas(2)
    transport = transport_of(model, servers, folder, world)
    receipt = transport.publish(2)
    found["kind"] = receipt.kind
    found["files"] = files(folder)
    follow(model, 3)
    real = publisher.Publisher.commit

    def commit(own, *, parts=None):
        if world.is_first:
            die()
        return real(own, parts=parts)

    publisher.Publisher.commit = commit
    failing(lambda: transport.start(3).wait(), servers, expected, found)


def faults_of_a_part(folder, world, found):
    """A new run publishes version 3; later versions have a part that is torn, or another's."""
    model, expected = model_of(3)
    servers = Replicas(2)
    transport = transport_of(model, servers, folder, world)
    found["kind"] = transport.publish(3).kind
    found["files"] = files(folder)
    real = Replicas.load_weights
    for version, damage in ((4, truncate), (5, replace)):
        follow(model, version)

        def load_weights(own, update, *, version, timeout_s=600.0, send=None, damage=damage):
            damage(folder / "weights" / "part-0001", version)
            return real(own, update, version=version)

        Replicas.load_weights = load_weights
        failing(functools.partial(transport.publish, version), servers, expected, found)
    Replicas.load_weights = real
    follow(model, 6)
    transport.publish(6)
    now = {name: tensor.clone() for name, tensor in models.checkpoint_tensors(model)}
    found["after"] = not world.is_first or serves(servers, now)
    servers.close()


def truncate(part, version):
    for path in part.glob(f"{version:08d}.*.safetensors"):
        os.truncate(path, path.stat().st_size // 2)


def replace(part, version):
    """Put the manifest of version 3 in the place of this version's."""
    manifest = json.loads((part / "00000003.json").read_text(encoding="utf-8"))
    text = json.dumps(manifest | {"version": version})
    (part / f"{version:08d}.json").write_text(text, encoding="utf-8")


def serves(servers, expected):
    return all(same_bits(one.tensors, expected) for one in servers.workers.values())


def failing(publish, servers, expected, found):
    """Publish, which must fail; note the error, and whether the servers keep what they had."""
    started = time.monotonic()
    try:
        publish()
    except (RuntimeError, OSError, ValueError) as error:
        found["errors"].append(str(error))
        if "onnection" in str(error):  # the process group ends, and says why
            raise
    finally:  # also if this rank is told to stop before it has noticed that another died
        found["seconds"].append(time.monotonic() - started)
        found["kept"].append(not dist.get_rank() and serves(servers, expected))


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in (folder / "weights").rglob("*.*"))


RUNS = {
    "writing": killed_while_writing,
    "manifest": killed_before_the_manifest,
    "parts": faults_of_a_part,
}


def main(name, folder):
    torch.set_num_threads(1)
    found = {"errors": [], "seconds": [], "kept": []}
    try:
        with parallel.process_group(timeout_s=60.0) as world:
            RUNS[name](folder, world, found)
    except (RuntimeError, OSError) as error:
        found["ended"] = str(error)
    (folder / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
