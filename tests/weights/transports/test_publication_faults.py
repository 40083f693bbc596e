"""Faults of publications in parts: what readers see, and what the ranks of a trainer do."""

import json
import multiprocessing
import os
import re
import shutil
import signal

import pytest
import torch
from forked_ranks import forked_ranks
from publishing import same_bits

from primerl._common.checkpoint_tensors import TensorLayout
from primerl.weights.transports.publications import host_copy, manifests
from primerl.weights.transports.publications.folder_reader import FolderReader
from primerl.weights.transports.publications.publisher import Publisher


class Ranks:
    """The publishers of three ranks, each with a tensor of its own."""

    def __init__(self, folder, **settings):
        names = ["", "part-0001", "part-0002"]
        self.parts = {name: Publisher(folder / name, **settings) for name in names}

    def write(self, version):
        """Write all parts, and commit those of ranks other than 0; return the digests of these."""
        digests = {}
        for name, publisher in reversed(self.parts.items()):
            tensors = tensors_of_part(name, version)
            layout = {n: TensorLayout(t.dtype, tuple(t.shape)) for n, t in tensors.items()}
            manifest = publisher.prepare(version, layout, tensors.items())
            if name:
                publisher.commit()
                digests[name] = manifest.digest
        return digests

    def publish(self, *versions):
        for version in versions:
            self.parts[""].commit(parts=self.write(version))

    def forget(self):
        for publisher in self.parts.values():
            publisher.forget_before_snapshot()


def tensors_of_part(name, version):
    tensor = torch.arange(2000, dtype=torch.float32).bfloat16()
    tensor[version] = -1.0
    return {f"table{name[-1:]}": tensor}


def tensors_of(version):
    names = ("", "part-0001", "part-0002")
    return {n: t for name in names for n, t in tensors_of_part(name, version).items()}


@pytest.fixture
def readers(tmp_path):
    made = []

    def reader(timeout_s=10.0):
        made.append(FolderReader(tmp_path, timeout_s=timeout_s))
        return made[-1]

    yield reader
    for one in made:
        one.close()


def read(reader, version):
    reader.fetch(version)
    _, tensors = reader.open(version)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    reader.release()
    return copies


# ---- readers ----


def test_a_reader_that_joins_after_three_deltas(tmp_path, readers):
    """No process of its host has a copy: each part begins with the full version."""
    ranks = Ranks(tmp_path, encoding="delta", snapshot_every=8)
    ranks.publish(1, 2, 3, 4)
    ranks.forget()

    assert same_bits(read(readers(), 4), tensors_of(4))


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_a_reader_that_joins_during_a_publication_sees_the_committed_version(
    tmp_path, readers, encoding
):
    """All parts of version 3 are there; only rank 0's manifest is missing."""
    ranks = Ranks(tmp_path, encoding=encoding)
    ranks.publish(1, 2)
    digests = ranks.write(3)
    reader = readers()

    with pytest.raises(ValueError, match="there is no publication of version 3: 00000003.json"):
        reader.fetch(3)
    assert same_bits(read(reader, 2), tensors_of(2))
    ranks.parts[""].commit(parts=digests)
    assert same_bits(read(reader, 3), tensors_of(3))


@pytest.mark.parametrize("in_memory", [False, True])
def test_an_open_version_stays_as_it_was_while_later_ones_are_committed(
    tmp_path, readers, in_memory
):
    ranks = Ranks(tmp_path, encoding="full", in_memory=in_memory)
    slow, quick = readers(), readers()
    ranks.publish(1)
    slow.fetch(1)
    _, held = slow.open(1)
    for version in (2, 3, 4):
        ranks.publish(version)
        ranks.forget()
        assert same_bits(read(quick, version), tensors_of(version))

    assert same_bits(held, tensors_of(1))
    slow.release()
    assert same_bits(read(slow, 4), tensors_of(4))


def test_an_open_copy_is_not_patched_and_the_wait_says_what_it_allows(tmp_path, readers):
    """Deltas are applied in place: a reader of version 3 waits for the reader of version 1."""
    ranks = Ranks(tmp_path, encoding="delta")
    ranks.publish(1)
    slow, quick = readers(), readers(timeout_s=0.1)
    slow.fetch(1)
    _, held = slow.open(1)
    ranks.publish(2, 3)

    with pytest.raises(TimeoutError, match=r"lock was locked by others for 0.1 s: 0.0 GB have 0 s"):
        quick.fetch(3)
    assert same_bits(held, tensors_of(1))
    slow.release()
    assert same_bits(read(quick, 3), tensors_of(3))


def test_the_time_limit_of_a_copy_follows_from_the_bytes_of_all_parts(
    tmp_path, readers, monkeypatch
):
    ranks = Ranks(tmp_path, encoding="delta")
    ranks.publish(1)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    monkeypatch.setattr(manifests, "LEAST_BYTES_PER_S", size / 400.0)
    allowed = []

    def expired(path, *, exclusive, timeout_s):
        allowed.append(timeout_s)
        raise TimeoutError(f"{path} was locked by others for {timeout_s:g} s")

    monkeypatch.setattr(host_copy, "acquire", expired)
    with pytest.raises(TimeoutError, match=r"for 400 s: 0.0 GB have 400 s"):
        readers(timeout_s=None).fetch(1)
    assert allowed == [0.0, 0.0, 0.0, pytest.approx(400.0)]


def take_and_die(folder, part):
    """Fetch version 2, and be killed in the middle of a patch of one part."""
    real = host_copy.CopiedPart._patch

    def patch(copied, step, path, names):
        real(copied, step, path, names)
        if path.parent.name == part:
            os.kill(os.getpid(), signal.SIGKILL)

    host_copy.CopiedPart._patch = patch
    FolderReader(folder).fetch(2)


@pytest.mark.parametrize("part", ["part-0001", "part-0002"])
def test_a_receiver_that_is_killed_with_the_lock_of_a_part(tmp_path, readers, part, monkeypatch):
    """Another takes over: it makes this part again from the full version, and patches the rest."""
    ranks = Ranks(tmp_path, encoding="delta")
    ranks.publish(1)
    survivor = readers()
    read(survivor, 1)
    ranks.publish(2)
    killed = multiprocessing.get_context("fork").Process(target=take_and_die, args=(tmp_path, part))
    killed.start()
    killed.join(30.0)
    assert killed.exitcode == -signal.SIGKILL
    taken = []
    copy, real = host_copy.CopiedPart._copy, host_copy.CopiedPart._patch

    def copied(part, step, path, names):
        taken.append((path.parent.name, "full"))
        copy(part, step, path, names)

    def patched(part, step, path, names):
        taken.append((path.parent.name, step.kind))
        real(part, step, path, names)

    monkeypatch.setattr(host_copy.CopiedPart, "_copy", copied)
    monkeypatch.setattr(host_copy.CopiedPart, "_patch", patched)

    assert same_bits(read(survivor, 2), tensors_of(2))
    assert [kind for name, kind in taken if name == part] == ["full", "delta"]
    assert {kind for name, kind in taken if name != part} <= {"delta"}


# ---- ranks ----


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    """What the ranks of three runs in one folder found, and the files after each run."""
    folder = tmp_path_factory.mktemp("killed")
    program = root / "tests/ranks/killed_publishers.py"
    found = {}
    for name, ranks in (("writing", 3), ("manifest", 2), ("parts", 2)):
        done = forked_ranks(program, name, folder, ranks=ranks, cwd=folder, timeout_s=120)
        told = {
            rank: json.loads(path.read_text())
            for rank in range(ranks)
            if (path := folder / f"{name}-{rank}.json").exists()
        }
        assert told, done.stderr[-5000:]
        copies = shutil.copytree(folder / "weights", folder / f"after {name}")
        found[name] = told, copies
    return found


def test_a_rank_that_is_killed_while_it_writes_is_named_and_nothing_is_committed(runs):
    ranks, folder = runs["writing"]

    assert sorted(ranks) == [0, 2]
    for rank, found in ranks.items():
        assert found["ended"].startswith(f"rank {rank} stopped: rank 1 died without an error")
        assert found["seconds"][0] < 60, "the timeout of the process group"
    assert ranks[0]["kept"] == [True], "the servers keep version 1"
    assert list((folder / "part-0001").glob(".00000002.*.partial"))
    assert sorted(path.name for path in folder.rglob("*.json")) == ["00000001.json"] * 3
    with_version_1 = FolderReader(folder)
    assert len(read(with_version_1, 1)) > 10
    with pytest.raises(ValueError, match="there is no publication of version 2"):
        with_version_1.fetch(2)
    with_version_1.close()


def test_a_new_run_publishes_in_full_and_removes_what_killed_ranks_left(runs):
    """Also the part of a rank that the new run does not have."""
    for name, version in (("manifest", 2), ("parts", 3)):
        ranks, _ = runs[name]
        own = [f"{version:08d}.full.safetensors", f"{version:08d}.json"]
        expected = [f"weights/{one}" for one in own] + [f"weights/part-0001/{one}" for one in own]
        for found in ranks.values():
            assert found["kind"] == "full"
            assert found["files"] == expected


def test_rank_0_that_is_killed_before_its_manifest_has_published_nothing(runs):
    ranks, folder = runs["manifest"]

    assert sorted(ranks) == [1]
    assert ranks[1]["ended"].startswith("rank 1 stopped: rank 0 died without an error")
    assert ranks[1]["seconds"][0] < 60
    assert (folder / "part-0001" / "00000003.json").exists()
    late = FolderReader(folder)
    with pytest.raises(ValueError, match="there is no publication of version 3"):
        late.fetch(3)
    assert len(read(late, 2)) > 10
    late.close()


def test_a_part_that_is_torn_or_another_publications_is_refused_and_named(runs):
    ranks, folder = runs["parts"]
    first, second = ranks[0], ranks[1]

    assert first["kept"] == [True, True], "the servers keep version 3"
    torn, replaced = first["errors"]
    assert re.search(r"version 4: 00000004.full.safetensors in .*part-0001 is truncated", torn)
    assert re.search(r"00000005.json in .*part-0001 is of another publication", replaced)
    assert second["errors"] == [f"rank 0 failed: RuntimeError: {one}" for one in (torn, replaced)]
    assert first["after"], "the next version arrives"
    assert {path.name[:8] for path in folder.rglob("*.*")} == {"00000006"}
