"""A host's copy holds what its receivers need; receivers of other tensors join, fail and die."""

import errno
import json
import multiprocessing
import os
import signal

import pytest
import torch
from publishing import same_bits

from primerl._common import tensor_files
from primerl._common.checkpoint_tensors import TensorLayout
from primerl.weights.transports.publications import host_copy
from primerl.weights.transports.publications.folder_reader import FolderReader
from primerl.weights.transports.publications.manifests import read_manifest
from primerl.weights.transports.publications.publisher import Publisher

SIZE = 1 << 20  # bytes of each of four tensors


def tensors_of(version):
    tensors = {name: torch.full((SIZE,), n, dtype=torch.uint8) for n, name in enumerate("abcd")}
    for tensor in tensors.values():
        tensor[:version] = 100 + version
    return tensors


def publish(publisher, *versions):
    for version in versions:
        tensors = tensors_of(version)
        layout = {name: TensorLayout(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
        publisher.prepare(version, layout, tensors.items())
        publisher.commit()


@pytest.fixture
def publisher(tmp_path):
    one = Publisher(tmp_path, encoding="delta", snapshot_every=4)
    publish(one, 1)
    return one


@pytest.fixture
def readers(tmp_path):
    made = []

    def reader(names, timeout_s=10.0):
        made.append(FolderReader(tmp_path, needs=lambda name: name in names, timeout_s=timeout_s))
        return made[-1]

    yield reader
    for one in made:
        one.close()


def read(reader, version):
    """Fetch a version; return copies of the tensors that are not on the meta device."""
    reader.fetch(version)
    _, tensors = reader.open(version)
    assert set(tensors) == set("abcd")
    copies = {name: tensor.clone() for name, tensor in tensors.items() if not tensor.is_meta}
    reader.release()
    return copies


def expected(names, version):
    tensors = tensors_of(version)
    return {name: tensors[name] for name in names}


def part_of(reader):
    (part,) = reader._copy._parts.values()
    return part


def noted(reader):
    """The digest of the copy's version, or None if the copy is dirty; and the names it holds."""
    folder = part_of(reader).path.parent
    digest = json.loads((folder / "state.json").read_text())["digest"]
    return {"digest": digest, "names": json.loads((folder / "names.json").read_text())}


def test_a_copy_has_only_what_the_receivers_of_its_host_need(publisher, readers):
    first, second = readers("a"), readers("ab")
    assert same_bits(read(first, 1), expected("a", 1))
    assert noted(first)["names"] == ["a"]
    status = part_of(first).path.stat()
    assert status.st_size > 4 * SIZE
    assert status.st_blocks * 512 < 1.5 * SIZE
    assert same_bits(read(second, 1), expected("ab", 1))
    assert part_of(first).path.stat().st_blocks * 512 < 2.5 * SIZE


def test_a_late_receiver_of_other_tensors_gets_them_from_the_full_version(publisher, readers):
    """Deltas before it were applied only to what was held; those after it, to all."""
    first = readers("a")
    read(first, 1)
    publish(publisher, 2, 3)
    read(first, 3)
    late = readers("bc")
    assert same_bits(read(late, 3), expected("bc", 3))
    assert noted(first)["names"] == ["a", "b", "c"]
    publish(publisher, 4, 5)
    assert [publisher.snapshot, noted(first)["names"]] == [5, ["a", "b", "c"]]
    assert same_bits(read(first, 4), expected("a", 4))
    assert same_bits(read(late, 5), expected("bc", 5))
    assert same_bits(read(first, 5), expected("a", 5))


def test_a_receiver_that_returns_after_several_versions_with_other_needs(publisher, readers):
    first = readers("ab")
    read(first, 1)
    publish(publisher, 2, 3)
    restarted = readers("bd")
    assert same_bits(read(restarted, 3), expected("bd", 3))
    first.close()
    publish(publisher, 4)
    assert same_bits(read(restarted, 4), expected("bd", 4))
    assert noted(restarted)["names"] == ["a", "b", "d"]


def test_tensors_are_added_while_others_have_the_version_open(publisher, readers):
    """A restarted server fetches in the pause: its first workers wait there for the last one."""
    publish(publisher, 2)
    first, second = readers("a"), readers("d", timeout_s=0.5)
    first.fetch(2)
    _, opened = first.open(2)
    assert same_bits(read(second, 2), expected("d", 2))
    assert same_bits({"a": opened["a"]}, expected("a", 2))


def test_a_copy_that_is_distrusted_while_tensors_are_added_stays_dirty(
    publisher, readers, monkeypatch
):
    first, second = readers("a"), readers("b")
    first.fetch(1)
    first.open(1)
    verify = host_copy.CopiedPart._verify

    def verified_after_distrust(part, manifest, names):
        monkeypatch.undo()
        first.release(distrust=True)
        verify(part, manifest, names)

    monkeypatch.setattr(host_copy.CopiedPart, "_verify", verified_after_distrust)
    with pytest.raises(ValueError, match="no longer holds version 1"):
        second.fetch(1)
    assert same_bits(read(second, 1), expected("b", 1))
    assert noted(second)["names"] == ["a", "b"]


def damage(folder, version, name, kind="full"):
    path = folder / f"{version:08d}.{kind}.safetensors"
    tensor_files.map_tensors(path, writable=True)[name][-1] += 1


def test_a_damaged_tensor_stops_only_the_receivers_that_need_it(tmp_path, publisher, readers):
    damage(tmp_path, 1, "b")
    first, late = readers("a"), readers("ab")
    assert same_bits(read(first, 1), expected("a", 1))
    for _ in range(2):
        with pytest.raises(ValueError, match="copy of version 1 is wrong: b differ"):
            late.fetch(1)
        assert noted(first)["digest"] is not None
        assert noted(first)["names"] == ["a"]
    assert same_bits(read(first, 1), expected("a", 1))
    damage(tmp_path, 1, "b")  # adds 1 again
    tensor_files.map_tensors(tmp_path / "00000001.full.safetensors", writable=True)["b"][-1] -= 2
    assert same_bits(read(late, 1), expected("ab", 1))


def test_a_torn_full_version_leaves_the_copy_as_it_is(tmp_path, publisher, readers):
    first = readers("a")
    read(first, 1)
    publish(publisher, 2, 3, 4, 5)
    assert publisher.snapshot == 5
    path = tmp_path / "00000005.full.safetensors"
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(ValueError, match="00000005.full.safetensors in .* is truncated"):
        first.fetch(5)
    assert same_bits(read(first, 4), expected("a", 4))


def fetch_and_die(folder):
    real = host_copy.CopiedPart._verify

    def verify(part, manifest, names):
        real(part, manifest, names)
        os.kill(os.getpid(), signal.SIGKILL)

    host_copy.CopiedPart._verify = verify
    FolderReader(folder).fetch(1)


def test_a_receiver_that_is_killed_while_it_adds_tensors(tmp_path, publisher, readers, monkeypatch):
    """What was held stays valid, and what was added counts as missing."""
    first = readers("a")
    read(first, 1)
    killed = multiprocessing.get_context("fork").Process(target=fetch_and_die, args=(tmp_path,))
    killed.start()
    killed.join(30.0)
    assert killed.exitcode == -signal.SIGKILL
    assert noted(first)["names"] == ["a"]
    copied, real = [], host_copy.CopiedPart._copy

    def copy(part, step, path, names):
        copied.append(set(names))
        real(part, step, path, names)

    monkeypatch.setattr(host_copy.CopiedPart, "_copy", copy)
    assert same_bits(read(first, 1), expected("a", 1))
    assert same_bits(read(readers("abcd"), 1), expected("abcd", 1))
    assert copied == [{"b", "c", "d"}]


def test_a_copy_that_is_made_anew_has_again_what_all_receivers_need(publisher, readers):
    first, second = readers("a"), readers("b")
    read(first, 1)
    read(second, 1)
    first.fetch(1)
    first.open(1)
    first.release(distrust=True)
    assert noted(first) == {"digest": None, "names": ["a", "b"]}
    assert same_bits(read(second, 1), expected("b", 1))
    assert noted(first)["names"] == ["a", "b"]


def test_a_host_without_room_says_so(publisher, readers, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    one = readers("ab")
    monkeypatch.setattr(os, "sendfile", full)
    with pytest.raises(RuntimeError, match=r"2 tensors of .* could not be copied into .*No space"):
        one.fetch(1)
    monkeypatch.undo()
    assert same_bits(read(one, 1), expected("ab", 1))


def test_receivers_begin_with_different_parts(publisher, tmp_path, monkeypatch):
    """Also in pods, whose processes have the same ids: else all would read from one host first."""
    copy = host_copy.HostCopy(
        tmp_path, needs=lambda _: True, room=0, size=0, timeout_s=1.0, threads=1
    )
    parts = {tmp_path / f"part-{n:04d}": read_manifest(tmp_path, 1) for n in range(16)}
    taken = []

    def done(part, manifest):
        taken.append(part.path.parent.name)
        return True

    monkeypatch.setattr(host_copy.CopiedPart, "try_to_bring_to", done)
    for _ in range(16):
        copy.bring_to(parts)
    copy.close()
    assert len(taken) == 16 * 16
    assert len(set(taken[::16])) > 1
    assert len(set(taken[:16])) == 16
