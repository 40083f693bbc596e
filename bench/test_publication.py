"""Time to publish a sharded model to two servers of two workers each, by transport and ranks.

    python -m pytest bench/test_publication.py -m "" -s -o addopts=--import-mode=importlib

Ranks exchange shards through gloo, and servers are processes that fetch, patch, check
and copy real publications. Each worker uses half of the tensors. Each row prints the seconds of
each phase (median of three), the pause of the slowest worker (a part of ``load``), for how long
``start`` held up training (``held``) of all that a publication beside it took (``beside``), the
bytes that a rank writes, and how much rank 0's peak memory grew after the first version. A step
changes 2% of the words. With ``Network``, all bytes go through this machine's loopback interface;
``test_reading`` measures that alone. Ranks share this machine's cores, so that the seconds of
``encode`` and ``write`` fall only as far as there are cores; the bytes per rank are what a cluster
divides by. PUBLICATION_GB sets the size of the larger model.
"""

import contextlib
import json
import multiprocessing
import os
import statistics
import time
from pathlib import Path

import pytest
import torch
from forked_ranks import forked_ranks
from publishing import Replica

from primerl._common.checkpoint_tensors import TensorLayout
from primerl._common.shared_folder import SharedFolder
from primerl.weights.transports.publications.manifests import read_manifest
from primerl.weights.transports.publications.publisher import Publisher
from primerl.weights.transports.publications.remote_file import RemoteFile
from primerl.weights.transports.publications.server import PublicationServer

WIDTH = 1024
LAYER = 2 * (4 * WIDTH * WIDTH + 3 * 4 * WIDTH * WIDTH)  # bytes in bfloat16
LARGE = float(os.environ.get("PUBLICATION_GB", "1.5"))


@pytest.mark.parametrize("encoding", ["full", "delta"])
@pytest.mark.parametrize("gigabytes", [LARGE / 2, LARGE])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("transport", ["Disk", "Network"])
def test_publication(tmp_path, encoding, gigabytes, ranks, transport):
    layers = max(4, round(gigabytes * 1e9 / LAYER))
    program = Path(__file__).with_name("publishing_ranks.py")
    arguments = tmp_path, WIDTH, layers, encoding, transport
    done = forked_ranks(program, *arguments, ranks=ranks, cwd=tmp_path, timeout_s=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    seconds = "  ".join(f"{phase} {value:6.2f}" for phase, value in found["seconds"].items())
    written = max(one["written"] for one in found["ranks"]) / 1e6
    print(
        f"\n{transport:7} {encoding:5} {found['bytes'] / 1e9:.2f} GB, {ranks} ranks: {seconds}  s;"
        f"  largest part {written:7.1f} MB, rank 0 grew {found['ranks'][0]['grown_mb']:.0f} MB"
    )


TENSOR = 4 << 20  # bytes


def send(connection, folder, tensors):
    """Publish tensors from this process's memory, until the connection is closed."""
    with contextlib.closing(SharedFolder("publications-bench")) as place:
        server = PublicationServer(place.path, "127.0.0.1")
        publisher = Publisher(folder, files=place.path, source=server.source)
        layout = {name: TensorLayout(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
        publisher.prepare(1, layout, tensors.items())
        publisher.commit()
        connection.send("published")
        with contextlib.suppress(EOFError):
            connection.recv()
        server.close()


@pytest.mark.parametrize("streams", [1, 2, 4, 8])
def test_reading(tmp_path, streams):
    """The time to read a full version from another process's memory into a new file."""
    tensors = {
        f"layers.{i}": torch.full((TENSOR // 2,), i, dtype=torch.int16)
        for i in range(round(LARGE * 1e9 / TENSOR))
    }
    here, there = multiprocessing.get_context("spawn").Pipe()
    sender = multiprocessing.get_context("spawn").Process(
        target=send, args=[there, tmp_path, tensors], daemon=True
    )
    sender.start()
    there.close()
    here.recv()
    manifest = read_manifest(tmp_path, 1)
    seconds, busy = [], []
    with contextlib.closing(SharedFolder("copy-bench")) as place:
        for n in range(5):
            file = RemoteFile(tmp_path, manifest, threads=streams)
            began, worked = time.perf_counter(), time.process_time()
            file.copy(place.path / f"{n}")
            seconds.append(time.perf_counter() - began)
            busy.append(time.process_time() - worked)
            (place.path / f"{n}").unlink()
    here.close()
    sender.join(60.0)
    size = manifest.file_size / 1e9
    print(
        f"\n{size:.2f} GB, {streams} streams: {statistics.median(seconds) / size:.2f} s per GB, "
        f"{statistics.median(busy) / size:.2f} CPU seconds per GB for the reader"
    )


SHARES = {"all": 1, "half": 2, "a 16th": 16}


class InPlace(Replica):
    """A worker that copies tensors to where the old ones are, like a model."""

    def store(self, tensors):
        for name, tensor in tensors:
            self.tensors.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


class HashesInPause(InPlace):
    """A worker that hashes the tensors that it uses in the pause, instead of before it."""

    def load(self, update):
        self.reader.hashed.clear()
        super().load(update)


@pytest.mark.parametrize("gigabytes", [LARGE / 2, LARGE])
def test_pause(tmp_path, gigabytes):
    """The pause of a worker that uses all tensors, half or few, and that of ``HashesInPause``."""
    count = round(gigabytes * 1e9 / TENSOR)
    tensors = {
        f"layers.{i}": torch.full((TENSOR // 2,), i, dtype=torch.int16) for i in range(count)
    }
    layout = {name: TensorLayout(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    publisher = Publisher(tmp_path)
    digest = publisher.prepare(1, layout, tensors.items()).digest
    publisher.commit()
    update, used = {"folder": str(tmp_path), "version": 1}, {}
    numbers = {name: number for number, name in enumerate(tensors)}
    workers = {
        (share, kind): kind(lambda name, step=step: numbers[name] % step == 0)
        for share, step in SHARES.items()
        for kind in (HashesInPause, InPlace)
    }
    seconds, busy = ({key: [] for key in workers} for _ in range(2))
    for _ in range(5):
        for key, worker in workers.items():
            worker.prepare(update)
            began = time.process_time()
            worker.load(update)
            busy[key].append(time.process_time() - began)
            assert worker.receipt["digest"] == digest
            seconds[key].append(worker.receipt["seconds"]["load"])
            used[key] = sum(tensor.nbytes for tensor in worker.tensors.values()) / 1e9
    for share in SHARES:
        before, now = (statistics.median(seconds[share, kind]) for kind in (HashesInPause, InPlace))
        cpu = [statistics.median(busy[share, kind]) for kind in (HashesInPause, InPlace)]
        size = used[share, InPlace]
        print(
            f"\n{gigabytes:.2f} GB, {share:6} used: before {before:.2f} s, now {now:.2f} s, "
            f"{before / now:.1f} times less; {now / size:.3f} s per GB used; CPU seconds "
            f"{cpu[0]:.2f} and {cpu[1]:.2f}"
        )
