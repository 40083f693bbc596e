"""Fake vLLM servers: servers that read real publications, without vLLM."""

import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch.distributed import TCPStore

from primerl._common.digests import digest_of, digest_of_all, raw_bytes
from primerl.weights.transports.broadcast_group import join_group
from primerl.weights.transports.folder_reader import FolderReader

ROUNDING = 5e-5  # rounding error of logprobs in float32, in nats


class Replica:
    """One worker that fetches, opens and stores tensors like a vLLM worker's receiver."""

    def __init__(self):
        self.tensors, self.version, self.reader, self.kinds = {}, None, None, []
        self.receipt = {"version": None}

    def prepare(self, update):
        if self.reader is None or self.reader.folder != Path(update["folder"]):
            self.reader = FolderReader(Path(update["folder"]), timeout_s=5.0)
        self.kinds.append(self.reader.fetch(update["version"]).kind)

    def load(self, update):
        manifest, tensors = self.reader.open(update["version"])
        try:
            self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        finally:
            self.reader.release()
        digests = {name: digest_of(tensor) for name, tensor in self.tensors.items()}
        self.version = manifest.version
        self.receipt = {
            "version": manifest.version,
            "digest": digest_of_all(digests),
            "tensors": len(digests),
            "unreached": [],
        }

    def close(self):
        if self.reader is not None:
            self.reader.close()


class Replicas:
    """A ``weights.Fetcher`` over a few servers of one worker each."""

    def __init__(self, count=1):
        self.workers = {f"http://replica{i}": Replica() for i in range(count)}
        self.calls = 0

    def load_weights(self, update, *, version, timeout_s=600.0, send=None):
        self.calls += 1
        assert update["version"] == version
        try:
            for server in self.workers.values():
                server.prepare(update)
            for server in self.workers.values():
                server.load(update)
        except ValueError as error:
            raise RuntimeError(f"a server did not take version {version}: {error}") from error
        return {url: [server.receipt] for url, server in self.workers.items()}

    def close(self):
        for server in self.workers.values():
            server.close()


def train(model, *, scale=1e-3, fraction=0.01, seed=0):
    """Imitate a training step: change a few entries of each parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            some = torch.rand(parameter.shape, generator=generator) < fraction
            parameter += scale * some * torch.randn(parameter.shape, generator=generator)


def logprobs_of(model, token_ids, *, temperature=1.0):
    """Return each token's logprob given its prefix, from a plain forward pass; entry 0 is 0."""
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    rows = (logits / temperature).log_softmax(-1)
    return torch.cat([torch.zeros(1), rows[:-1].gather(-1, ids[0, 1:, None])[:, 0]])


def check_rounding(errors):
    """Check that differences of logprobs, in nats, are no more than float32 rounding.

    With SmolLM2 on a vLLM server whose weights never changed, 1 of 4,320 sampled tokens differed by
    more than 5e-5, namely by 1e-4, both from a forward pass in float64 and from one in float32.
    """
    errors = np.ravel(errors)
    assert errors.max() < 20 * ROUNDING
    assert (errors > ROUNDING).sum() <= max(1, len(errors) // 200)


def check_logprobs(found, expected):
    """Check that logprobs are equal up to float32 rounding."""
    check_rounding(np.abs(np.asarray(found) - np.asarray(expected)))


def same_bits(a, b):
    return a.keys() == b.keys() and all(digest_of(a[n]) == digest_of(b[n]) for n in a)


class StoreCommunicator:
    """A communicator that broadcasts through a torch store; its address acts as NCCL's id."""

    def __init__(self, place):
        host, port, self._group = place.unique_id.decode().split(":")
        self._store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=30))
        self._rank, self._sent = place.rank, 0

    def broadcast(self, tensor, src):
        key, self._sent = f"{self._group}/{self._sent}", self._sent + 1
        if self._rank == src:
            self._store.set(key, raw_bytes(tensor).tobytes().hex())
        else:
            data = bytearray.fromhex(self._store.get(key).decode())
            if data:
                raw_bytes(tensor)[:] = torch.frombuffer(data, dtype=torch.uint8).numpy()

    def destroy(self):
        self._store = None


class StoreMeeting:
    """The rendezvous that ``weights.NCCL`` needs for a ``StoreCommunicator``."""

    def __init__(self):
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.groups = 0

    def unique_id(self):
        self.groups += 1
        return f"127.0.0.1:{self._store.port}:{self.groups}".encode()

    def connect(self, place, device):
        return StoreCommunicator(place)


class BroadcastReplicas:
    """Servers of several workers each that receive broadcasts like vLLM's receivers."""

    def __init__(self, *workers):
        self.counts = {f"http://replica{i}": count for i, count in enumerate(workers)}
        self.members, self.tensors, self.tamper = {}, {}, lambda url, name, tensor: tensor

    def workers(self):
        return dict(self.counts)

    def load_weights(self, update, *, version, timeout_s=600.0, send=None):
        receipts, errors = {url: [None] * n for url, n in self.counts.items()}, []

        def work(url, index):
            try:
                receipts[url][index] = self._take(url, index, update)
            except RuntimeError as error:
                errors.append(error)

        threads = [
            threading.Thread(target=work, args=(url, index), daemon=True)
            for url, count in self.counts.items()
            for index in range(count)
        ]
        for thread in threads:
            thread.start()
        send()
        for thread in threads:
            thread.join(30)
        if errors:
            raise errors[0]
        return receipts

    def _take(self, url, index, update):
        if self.members.get((url, index), (None,))[0] != update["group"]:
            place = join_group(update["address"], update["port"], timeout_s=30.0)
            self.members[url, index] = (update["group"], StoreCommunicator(place))
        communicator = self.members[url, index][1]
        taken = {}
        for name, dtype, shape in zip(
            update["names"], update["dtypes"], update["shapes"], strict=True
        ):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            communicator.broadcast(tensor, src=0)
            taken[name] = self.tamper(url, name, tensor)
        self.tensors[url, index] = taken
        digests = {name: digest_of(tensor) for name, tensor in taken.items()}
        return {
            "version": update["version"],
            "digest": digest_of_all(digests),
            "tensors": len(digests),
            "unreached": [],
        }
