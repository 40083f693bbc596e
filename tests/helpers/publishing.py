"""Fake vLLM servers: servers that read real publications, without vLLM."""

import threading
import time
import uuid
from pathlib import Path

import numpy as np
import torch
from torch.distributed import FileStore

from primerl._common.digests import digest_of, digest_of_all, raw_bytes
from primerl._common.threads import thread_count
from primerl.serving.worker.checked_loading import load_checked
from primerl.weights.transports.broadcasts.layers import receive
from primerl.weights.transports.broadcasts.rendezvous import join_group
from primerl.weights.transports.publications.folder_reader import FolderReader

ROUNDING = 5e-5  # rounding error of logprobs in float32, in nats


class Replica:
    """One worker that fetches, opens and stores tensors like a vLLM worker's receiver.

    It stores and hashes only the tensors whose names it ``needs``.
    """

    def __init__(self, needs=lambda name: True, *, timeout_s=5.0):
        self.needs = needs
        self.timeout_s = timeout_s
        self.tensors, self.version, self.reader, self.kinds = {}, None, None, []
        self.receipt = {"version": None}

    def prepare(self, update):
        if self.reader is None or self.reader.folder != Path(update["folder"]):
            self.reader = FolderReader(
                Path(update["folder"]),
                needs=lambda name: self.needs(name),
                timeout_s=self.timeout_s,
            )
        self.kinds.append(self.reader.fetch(update["version"]).kind)

    def load(self, update):
        started = time.perf_counter()
        manifest, tensors = self.reader.open(update["version"])
        try:
            loaded = load_checked(
                self.store,
                tensors.items(),
                expected=manifest.tensors,
                threads=thread_count(),
                needs=self.needs,
                hashed=self.reader.hashed,
            )
        finally:
            self.reader.release()
        self.version = manifest.version
        self.receipt = {
            "version": manifest.version,
            **loaded.compare(manifest.tensors),
            "unreached": [],
            "ignored": loaded.ignored,
            "seconds": {"load": time.perf_counter() - started},
        }

    def store(self, tensors):
        """Copy the tensors, like the loader of a model."""
        self.tensors = {name: tensor.clone() for name, tensor in tensors}

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
    """A communicator that broadcasts through a store in a file, whose path acts as NCCL's id.

    Unlike NCCL's, its broadcasts block until all members have the tensor.
    """

    def __init__(self, place):
        self._store = FileStore(place.unique_id.decode(), -1)
        self._rank, self._others = place.rank, place.world_size - 1
        self._done = self.sent = 0
        self._left = False
        self.timeout_s = 30.0

    def broadcast(self, tensor, src):
        assert tensor.dtype == torch.uint8, "NCCL does not know all others"
        key, self._done = str(self._done), self._done + 1
        if self._rank == src:
            self._store.set(key, raw_bytes(tensor).tobytes().hex())
            self.sent += tensor.numel()
            self._wait(f"{key}/taken")
        else:
            self._wait(key)
            if self._left:
                return
            data = bytearray.fromhex(self._store.get(key).decode())
            if data:
                raw_bytes(tensor)[:] = torch.frombuffer(data, dtype=torch.uint8).numpy()
            if self._store.add(f"{key}/members", 1) == self._others:
                self._store.set(f"{key}/taken", "")

    def _wait(self, key):
        deadline = time.monotonic() + self.timeout_s
        while not self._left and not self._store.check([key]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"Wait timeout after {self.timeout_s:g} s")
            time.sleep(0.001)

    def destroy(self):
        self._left = True


class StoreMeeting:
    """What ``weights.NCCL`` needs for one sender's ``StoreCommunicator``s, in a folder."""

    def __init__(self, folder):
        self._folder = folder
        self.communicators = []

    @property
    def groups(self):
        return len(self.communicators)

    @property
    def sent(self):
        """Bytes that this sender has broadcast."""
        return sum(one.sent for one in self.communicators)

    def unique_id(self):
        return f"{self._folder}/{uuid.uuid4().hex}".encode()

    def connect(self, place, device):
        self.communicators.append(StoreCommunicator(place))
        return self.communicators[-1]


class BroadcastReplicas:
    """Servers of several workers each that receive broadcasts like vLLM's receivers."""

    def __init__(self, *workers):
        self.counts = {f"http://127.0.0.1/{i}": count for i, count in enumerate(workers)}
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
        try:
            send()
        except BaseException:
            self.leave()
            raise
        finally:
            for thread in threads:
                thread.join(30)
        if errors:
            raise errors[0]
        return receipts

    def leave(self):
        """Leave all groups, so that no thread waits for a sender."""
        for _, communicators in self.members.values():
            for one in communicators:
                one.destroy()

    def _take(self, url, index, update):
        communicators = self._joined(url, index, update)
        taken = {}
        fields = ("names", "dtypes", "shapes", "groups")
        for name, tensor in receive(
            zip(*(update[field] for field in fields), strict=True),
            communicators,
            device=torch.device("cpu"),
            timeout_s=update["timeout_s"],
        ):
            taken[name] = self.tamper(url, name, tensor)
        self.tensors[url, index] = taken
        digests = {name: digest_of(tensor) for name, tensor in taken.items()}
        return {
            "version": update["version"],
            "digest": digest_of_all(digests),
            "tensors": len(digests),
            "unreached": [],
        }

    def _joined(self, url, index, update):
        key, communicators = self.members.get((url, index), (None, []))
        if key != update["key"]:
            places = [join_group(*store, timeout_s=30.0) for store in update["stores"]]
            communicators = [StoreCommunicator(place) for place in places]
            self.members[url, index] = (update["key"], communicators)
        return communicators
