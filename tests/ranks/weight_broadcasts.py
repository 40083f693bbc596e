"""Run by torchrun in tests/weights/transports/test_broadcasts.py: several ranks broadcast."""

import json
import sys
import threading
from pathlib import Path

import torch
from publishing import BroadcastReplicas, Replicas, StoreMeeting, same_bits
from weight_publishing import move, raised

from primerl import fp8, parallel, testing, weights

MATMUL = fp8.GroupedMatmul(form=fp8.Format.of_blocks(16))


class Recording(BroadcastReplicas):
    """Servers that keep the update, and may refuse it before anything is sent."""

    refuses = False
    hidden = ()

    def workers(self):
        return {url: count for url, count in self.counts.items() if url not in self.hidden}

    def join(self):
        self.counts = {**self.counts, "http://127.0.0.1/new": 1}

    def load_weights(self, update, *, version, timeout_s=600.0, send=None):
        if self.refuses:
            raise RuntimeError("the servers did not prepare the update")
        self.update = update
        return super().load_weights(update, version=version, timeout_s=timeout_s, send=send)


class Sender:
    """A transport of this rank, its stand-in for NCCL, and rank 0's servers."""

    def __init__(self, world, model, folder, **settings):
        self.world = world
        self.store = StoreMeeting(folder)
        self.connect = self.store.connect
        self.servers = Recording(1, 2) if world.is_first else None
        self.transport = weights.NCCL(
            model,
            *([self.servers] if world.is_first else []),
            connect=lambda place, device: self.connect(place, device),
            unique_id=self.store.unique_id,
            timeout_s=30.0,
            **settings,
        )


def model_of(kind, **sizes):
    model = testing.tiny_model(kind, seed=0, num_hidden_layers=6)
    return parallel.shard(model, parallel.mesh(**sizes))


def arrives(world, folder, model, **settings):
    """Publish two versions by ``NCCL`` and by ``Disk``, and compare them."""
    of_disk = {name: settings[name] for name in settings.keys() & {"dtype", "quantize"}}
    folder.mkdir(exist_ok=True)
    sender, replicas = Sender(world, model, folder, **settings), Replicas()
    disk = weights.Disk(
        model,
        *([replicas] if world.is_first else []),
        folder=folder / "w" if world.is_first else None,
        **of_disk,
    )
    same = []
    for version in (1, 2):
        move(model, version)
        receipt, expected = sender.transport.publish(version), disk.publish(version)
        same.append((receipt.digest, receipt.tensors) == (expected.digest, expected.tensors))
        if world.is_first:
            (replica,) = replicas.workers.values()
            same += [same_bits(one, replica.tensors) for one in sender.servers.tensors.values()]
    replicas.close()
    return {
        "same": all(same) and len(same) == (8 if world.is_first else 2),
        "bytes": receipt.bytes,
        "sent": sender.store.sent // 2,
        "groups": sender.store.groups,
        "order": sender.servers.update["groups"] if world.is_first else None,
        "names": sender.servers.update["names"] if world.is_first else None,
    }


# ---- failures ----


class Broken:
    """A communicator of which the third broadcast fails."""

    def __init__(self, communicator, fail):
        self.communicator, self.fail, self.left = communicator, fail, 2

    def broadcast(self, tensor, src):
        if not self.left:
            self.fail()
        self.left -= 1
        self.communicator.broadcast(tensor, src)

    def destroy(self):
        if self.communicator is not None:
            self.communicator.destroy()


def link_down():
    raise OSError("the link of rank 1 is down")


def fails(sender, spoil):
    """Return the error of a publication, and whether the next one arrives, in new groups."""
    workers, connect = sender.servers and sender.servers.counts, sender.connect
    spoil(sender)
    error = raised(lambda: sender.transport.publish(2))
    groups, sender.connect, sender.transport._timeout_s = sender.store.groups, connect, 30.0
    if sender.servers is not None:
        vars(sender.servers).update(counts=workers, hidden=(), refuses=False, tamper=untampered)
    after = sender.transport.publish(3)
    return {"error": error, "after": after.version == 3 and sender.store.groups == groups + 1}


def untampered(url, name, tensor):
    return tensor


def on_first_rank(spoil):
    """Return a function that changes rank 0's servers."""
    return lambda sender: spoil(sender.servers) if sender.world.is_first else None


def on_new_group(connect):
    """Return a function that changes how rank 1 connects, and has a server join."""

    def spoil(sender):
        if sender.world.rank == 1:
            own = sender.connect
            sender.connect = lambda place, device: connect(own(place, device))
        if sender.world.is_first:
            sender.servers.join()

    return spoil


@on_first_rank
def refuse(servers):
    servers.refuses = True


@on_first_rank
def damage(servers):
    servers.tamper = lambda url, name, tensor: (
        tensor + 1 if url.endswith("/1") and name == "model.norm.weight" else tensor
    )


def lose(sender):
    """A worker ends in the middle."""

    def tamper(url, name, tensor):
        if url.endswith("/1") and "layers.2" in name:
            raise RuntimeError("the worker is lost")
        return tensor

    sender.store.communicators[-1].timeout_s = 2.0
    if sender.world.is_first:
        sender.servers.tamper = tamper


@on_first_rank
def hide(servers):
    """Rank 0 does not know of a server, whose workers come late to the complete groups."""
    servers.hidden = ("http://127.0.0.1/1",)


break_link = on_new_group(lambda communicator: Broken(communicator, link_down))


def hang(sender):
    """Rank 1 never connects."""
    sender.transport._timeout_s = 2.0  # of this publication
    never = threading.Event() if sender.world.rank == 1 else None
    sender.connect = lambda *_: Broken(never and never.wait(600.0), link_down)
    if sender.world.is_first:
        sender.servers.join()


def failures(world, folder):
    model = model_of("llama")
    sender = Sender(world, model, folder)
    sender.transport.publish(1)
    faults = {
        "sender": break_link,
        "refused": refuse,
        "damaged": damage,
        "lost worker": lose,
        "late worker": hide,
        "no connection": hang,
    }
    found = {name: fails(sender, fault) for name, fault in faults.items()}
    elsewhere = "203.0.113.1" if world.rank else None  # rank 1 is told another host's address
    misplaced = Sender(world, model, folder, address=elsewhere)
    return found | {"no address": {"error": raised(lambda: misplaced.transport.publish(1))}}


def main(folder):
    found = {}
    with parallel.process_group(timeout_s=60.0) as world:
        path = folder / f"found-{world.rank}.json"
        dtype = torch.bfloat16
        moe = model_of("qwen3_moe")
        found["default"] = arrives(world, folder / "default", moe, dtype=dtype)
        found["one"] = arrives(world, folder / "one", moe, senders=1)
        found["two"] = arrives(world, folder / "two", model_of("llama"), senders=2)
        if world.world_size == 2:
            of_experts = model_of("qwen3_moe", ep=2)
            found["ep"] = arrives(world, folder / "ep", of_experts, dtype=dtype)
            quantized = quantized_model()
            quantize = fp8.CheckpointQuantizer(quantized, experts=MATMUL)
            found["fp8"] = arrives(world, folder / "fp8", quantized, quantize=quantize)
            found["refusal"] = raised(lambda: Sender(world, moe, folder, senders=3))
            found["failures"] = failures(world, folder)
        path.write_text(json.dumps(found))


def quantized_model():
    model = testing.tiny_model("qwen3_moe", seed=0).train()
    fp8.convert_linears(model, form=MATMUL.form, weight_gradient="bf16")
    return parallel.shard(model, parallel.mesh(ep=2), matmul=MATMUL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
