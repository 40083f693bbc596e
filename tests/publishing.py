"""A stand-in for vLLM servers: replicas that really read publications, without vLLM."""

from pathlib import Path

import torch

from primerl.weights.digests import digest_of, digest_of_all
from primerl.weights.folder_reader import FolderReader


class Replica:
    """One worker: fetches, opens and keeps the tensors as a vLLM worker's receiver does."""

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
    """A ``weights.Fetcher`` over a few replicas of one worker each."""

    def __init__(self, count=1):
        self.workers = {f"http://replica{i}": Replica() for i in range(count)}
        self.calls = 0

    def load_weights(self, update, *, version, timeout_s=600.0, send=None):
        self.calls += 1
        assert update["version"] == version
        try:
            for replica in self.workers.values():
                replica.prepare(update)
            for replica in self.workers.values():
                replica.load(update)
        except ValueError as error:
            raise RuntimeError(f"a replica did not take version {version}: {error}") from error
        return {url: [replica.receipt] for url, replica in self.workers.items()}

    def close(self):
        for replica in self.workers.values():
            replica.close()


def train(model, *, scale=1e-3, fraction=0.01, seed=0):
    """A stand-in for a step: a few entries of each parameter move."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            some = torch.rand(parameter.shape, generator=generator) < fraction
            parameter += scale * some * torch.randn(parameter.shape, generator=generator)


def same_bits(a, b):
    return a.keys() == b.keys() and all(digest_of(a[n]) == digest_of(b[n]) for n in a)
