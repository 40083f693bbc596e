import fcntl
import json
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from publishing import same_bits
from resident_pages import resident_pages
from safetensors.torch import load_file

from primerl._common import shared_folder, tensor_files
from primerl._common.checkpoint_tensors import TensorLayout
from primerl._common.shared_folder import SharedFolder, acquire, shared_memory
from primerl._common.tensor_files import map_tensors, write_tensors
from primerl.weights.transports.publications import folder_reader, host_copy, manifests
from primerl.weights.transports.publications.folder_reader import FolderReader
from primerl.weights.transports.publications.publisher import Publisher


def tensors_of(version):
    """Few bytes differ from one version to the next; all the awkward shapes and types."""
    table = torch.arange(3000, dtype=torch.float32).reshape(30, 100).bfloat16()
    table[version % 30, 5] = -0.0
    return {
        "table": table,
        "fp32": torch.linspace(0, 1, 7).mul(version + 1),
        "bytes": torch.full((5,), version, dtype=torch.uint8),
        "flag": torch.tensor(version % 2 == 0),
        "scalar": torch.tensor(float("nan") if version % 2 else 1.5),
        "none": torch.zeros(0, 4, dtype=torch.int64),
        "fixed": torch.randn(64, generator=torch.Generator().manual_seed(0)).half(),
    }


LAYOUT = {name: TensorLayout(t.dtype, tuple(t.shape)) for name, t in tensors_of(0).items()}


def written(publisher, version, layout, tensors):
    """Publish a version, as a rank alone."""
    manifest = publisher.prepare(version, layout, tensors)
    publisher.commit()
    return manifest


def publish(publisher, version):
    return written(publisher, version, LAYOUT, iter(tensors_of(version).items()))


def versions_in(folder):
    return sorted(int(path.stem) for path in folder.glob("*.json"))


@pytest.fixture
def deltas(tmp_path):
    """A folder with version 1 in full, and 2 to 4 as deltas."""
    publisher = Publisher(tmp_path, encoding="delta", snapshot_every=4)
    published = [publish(publisher, version) for version in range(1, 5)]
    assert [one.kind for one in published] == ["full", "delta", "delta", "delta"]
    return publisher


@pytest.fixture
def reader(tmp_path):
    reader = FolderReader(tmp_path, timeout_s=2.0)
    yield reader
    reader.close()


def read(reader, version):
    reader.fetch(version)
    _, tensors = reader.open(version)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    reader.release()
    return copies


def state_file(reader):
    return reader._copy._place.path / "state.json"


def test_a_shared_folder_that_is_removed_while_it_is_opened(monkeypatch):
    real, removed = Path.lstat, []

    def lstat(path):
        if not removed and path.name.endswith("vanishing"):
            removed.append(path.rmdir())  # by its last user, just now
        return real(path)

    monkeypatch.setattr(Path, "lstat", lstat)
    place = SharedFolder("vanishing")
    assert removed
    assert place.path.is_dir()
    place.close()


def test_the_files_are_safetensors_and_aligned(tmp_path):
    path = tmp_path / "t.safetensors"
    write_tensors(path, LAYOUT, tensors_of(3).items())
    assert same_bits(load_file(path), tensors_of(3))
    mapped = map_tensors(path)
    assert same_bits(mapped, tensors_of(3))
    assert all(t.data_ptr() % t.element_size() == 0 for t in mapped.values())


def test_writing_into_mapped_tensors_reaches_the_file_only_if_asked(tmp_path):
    path = tmp_path / "t.safetensors"
    write_tensors(path, LAYOUT, tensors_of(3).items())
    map_tensors(path)["fp32"].zero_()
    assert same_bits(load_file(path), tensors_of(3))
    map_tensors(path, writable=True)["fp32"].zero_()
    assert load_file(path)["fp32"].eq(0).all()


def test_the_time_for_which_tensors_are_awaited_counts_as_gathering(deltas):
    def late():
        for item in tensors_of(5).items():
            time.sleep(0.01)
            yield item

    for kind in ("full", "delta"):
        assert written(deltas, {"full": 5, "delta": 6}[kind], LAYOUT, late()).kind == kind
        assert deltas.seconds.keys() == {"gather", "encode", "write"}
        assert deltas.seconds["gather"] >= 0.01 * len(LAYOUT)
        assert min(deltas.seconds.values()) >= 0.0


def test_a_stream_that_is_not_what_was_announced_leaves_no_file(tmp_path):
    path = tmp_path / "t.safetensors"
    good = tensors_of(0)
    for broken, why in [
        ({n: t for n, t in good.items() if n != "fp32"}, "tensors are missing: fp32"),
        ({**good, "fp32": good["fp32"].double()}, "fp32 is .*float64.*, not .*float32"),
        ({**good, "new": good["fp32"]}, "new is not in the model's layout"),
    ]:
        with pytest.raises(ValueError, match=why):
            write_tensors(path, LAYOUT, broken.items())
    with pytest.raises(ValueError, match="table was given twice"):
        write_tensors(path, LAYOUT, [*good.items(), ("table", good["table"])])
    assert list(tmp_path.iterdir()) == []


def test_full_publications_are_read_from_their_files(tmp_path, reader):
    publisher = Publisher(tmp_path)
    for version in (1, 2):
        assert publish(publisher, version).kind == "full"
        assert same_bits(read(reader, version), tensors_of(version))
    assert reader._copy is None, "no host needs a copy when every version is whole"


def test_full_versions_in_memory_are_written_over_the_last_but_one(tmp_path, reader):
    publisher = Publisher(tmp_path, in_memory=True)
    files = []
    for version in range(1, 6):
        manifest = publish(publisher, version)
        assert same_bits(read(reader, version), tensors_of(version))
        files.append((tmp_path / manifest.file).stat().st_ino)
        publisher.retain(manifest, keep=version)
        assert versions_in(tmp_path) == [version]
    assert files[0] == files[2] == files[4] != files[1] == files[3]
    smaller = {"fp32": LAYOUT["fp32"]}
    written(publisher, 6, smaller, [("fp32", tensors_of(6)["fp32"])])
    assert same_bits(read(reader, 6), {"fp32": tensors_of(6)["fp32"]})


def test_a_file_that_is_read_is_not_written_over(tmp_path, reader):
    publisher = Publisher(tmp_path, in_memory=True)
    publish(publisher, 1)
    reader.fetch(1)
    _, held = reader.open(1)
    for version in (2, 3, 4):
        publisher.retain(publish(publisher, version), keep=version)
        assert same_bits(held, tensors_of(1))
    reader.release()
    with pytest.raises(ValueError, match=r"version 1: 00000001.json in .* is missing"):
        reader.open(1)


def test_deltas_are_followed_one_by_one(tmp_path, reader):
    publisher = Publisher(tmp_path, encoding="delta", snapshot_every=3)
    kinds = []
    for version in range(1, 8):
        kinds.append(publish(publisher, version).kind)
        assert same_bits(read(reader, version), tensors_of(version))
    assert kinds == ["full", "delta", "delta", "full", "delta", "delta", "full"]


def test_an_unchanged_tensor_is_not_sent(deltas):
    forms = manifests.read_manifest(deltas.folder, 2).forms
    assert forms["fixed"] == forms["none"] == "same"
    assert forms["table"] == "delta"
    assert forms["fp32"] == "full", "smaller than its difference"
    assert "fixed" not in load_file(deltas.folder / "00000002.delta.safetensors")


def test_a_late_joiner_and_one_that_missed_versions(deltas, reader):
    late = FolderReader(deltas.folder, timeout_s=2.0)
    assert same_bits(read(late, 4), tensors_of(4))
    late.close()
    assert same_bits(read(reader, 2), tensors_of(2))
    steps = manifests.chain(deltas.folder, 4, have=manifests.read_manifest(deltas.folder, 2).digest)
    assert [step.version for step in steps] == [3, 4]
    assert same_bits(read(reader, 4), tensors_of(4))


def test_the_file_kept_aside_by_an_earlier_publisher_is_removed(tmp_path):
    publisher = Publisher(tmp_path, in_memory=True)
    for version in (1, 2):
        publisher.retain(publish(publisher, version), keep=version)
    assert (tmp_path / ".spare").exists()
    publish(Publisher(tmp_path, encoding="delta"), 3)
    assert not (tmp_path / ".spare").exists()


def test_receivers_of_a_host_share_one_copy_and_the_last_removes_it(deltas, reader):
    other = FolderReader(deltas.folder, timeout_s=2.0)
    read(reader, 3)
    place = reader._copy._place.path
    changed = (place / "tensors.safetensors").stat().st_mtime_ns
    assert same_bits(read(other, 3), tensors_of(3))
    assert (place / "tensors.safetensors").stat().st_mtime_ns == changed, "made once"
    reader.close()
    assert place.exists()
    other.close()
    assert not place.exists()


def test_what_a_killed_process_leaves_is_removed_before_room_is_looked_for(
    tmp_path_factory, monkeypatch
):
    memory, disk = tmp_path_factory.mktemp("memory"), tmp_path_factory.mktemp("disk")
    monkeypatch.setattr(shared_folder, "_DEV_SHM", memory)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))

    def usage(_):
        held = sum(path.stat().st_size for path in memory.rglob("*") if path.is_file())
        return shutil._ntuple_diskusage(1000, held, 1000 - held)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    killed = SharedFolder("killed", room=800)
    (killed.path / "file").write_bytes(bytes(800))
    on_disk = SharedFolder("large", room=2000)
    assert (killed.path.parent, on_disk.path.parent) == (memory, disk)
    os.close(killed._users)
    os.close(on_disk._users)

    after = SharedFolder("after", room=800)

    assert after.path.parent == memory
    assert not killed.path.exists()
    assert not on_disk.path.exists()
    after.close()


def _use_and_die(folder):
    SharedFolder("of-a-killed-process")
    os.kill(os.getpid(), 9)


def test_what_a_killed_process_leaves_is_removed_by_the_next():
    child = multiprocessing.get_context("fork").Process(target=_use_and_die, args=(None,))
    child.start()
    child.join(20)
    left = shared_memory() / f"primerl-{os.getuid()}-of-a-killed-process"
    assert child.exitcode == -9
    assert left.exists()
    SharedFolder("another").close()
    assert not left.exists()


def test_a_copy_that_the_shared_memory_has_no_room_for_is_on_disk(
    deltas, reader, tmp_path_factory, monkeypatch
):
    size = sum(one.nbytes for one in manifests.read_manifest(deltas.folder, 1).tensors.values())
    disk, usage = tmp_path_factory.mktemp("disk"), shutil.disk_usage(deltas.folder)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    free = [2 * size - 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free[0]))

    assert same_bits(read(reader, 4), tensors_of(4))
    assert len(list(disk.glob("primerl-*-copy-*"))) == 1
    reader.close()
    assert not any(disk.iterdir())

    free[0] = 2 * size
    read(reader, 3)
    free[0] = 0  # the first copy may take all: receivers of a host still share it
    other = FolderReader(deltas.folder, timeout_s=2.0)
    read(other, 3)
    assert other._copy._place.path == reader._copy._place.path
    other.close()
    assert not any(disk.iterdir())


def test_a_reader_locks_the_copy(deltas, reader):
    """Another may not patch it meanwhile; it waits, and gives up by its deadline."""
    reader.fetch(3)
    reader.open(3)
    impatient = FolderReader(deltas.folder, timeout_s=0.1)
    with pytest.raises(TimeoutError, match="locked by others for 0.1 s"):
        impatient.fetch(4)
    reader.release()
    assert same_bits(read(impatient, 4), tensors_of(4))
    with pytest.raises(ValueError, match="no longer holds version 3"):
        reader.open(3)
    impatient.close()


def test_an_interrupted_copy_is_made_again(deltas, reader):
    read(reader, 2)
    state = json.loads(state_file(reader).read_text())
    state_file(reader).write_text(json.dumps(state | {"digest": None}))  # as during a patch
    map_tensors(reader._copy._place.path / "tensors.safetensors", writable=True)["table"].zero_()
    assert same_bits(read(reader, 3), tensors_of(3))


def test_a_copy_with_wrong_bytes_is_made_again(deltas, reader):
    reader.fetch(3)
    map_tensors(reader._copy._place.path / "tensors.safetensors", writable=True)["fixed"].zero_()
    reader.open(3)
    reader.release(distrust=True)  # what a receiver does when digests differ
    assert same_bits(read(reader, 3), tensors_of(3))


def test_a_change_behind_the_copys_back_is_found_by_the_next_delta(deltas, reader):
    read(reader, 2)
    map_tensors(reader._copy._place.path / "tensors.safetensors", writable=True)["fixed"].zero_()
    with pytest.raises(ValueError, match="version 3 is wrong: fixed differ from the published"):
        reader.fetch(3)
    assert same_bits(read(reader, 3), tensors_of(3)), "the next try starts from the full version"


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("at", [0, 9, -1, -100])
def test_a_flipped_bit_is_caught(deltas, reader, at):
    read(reader, 2)
    path = deltas.folder / "00000003.delta.safetensors"
    flip(path, at)
    with pytest.raises(ValueError, match=r"00000003.delta.safetensors in .* is altered"):
        reader.fetch(4)
    assert same_bits(read(reader, 2), tensors_of(2)), "what the host has is as it was"


def test_a_truncated_file_is_caught(deltas, reader):
    path = deltas.folder / "00000001.full.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(
        ValueError, match=rf"{path.name} in .* is truncated: {size - 1} bytes of {size}"
    ):
        reader.fetch(4)
    with pytest.raises(ValueError, match="is truncated"):
        map_tensors(path)


def test_a_missing_file_is_named(deltas, reader):
    (deltas.folder / "00000002.delta.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"00000002.delta.safetensors in .* is missing \(version 2\)"
    ):
        reader.fetch(4)
    (deltas.folder / "00000003.json").unlink()
    with pytest.raises(ValueError, match=r"no publication of version 3: .*00000003.json"):
        reader.fetch(4)


def test_a_broken_manifest_is_named(deltas, reader):
    path = deltas.folder / "00000004.json"
    good = json.loads(path.read_text())

    def refused(why, **changes):
        path.write_text(json.dumps({**good, **changes}))
        with pytest.raises(ValueError, match=why):
            reader.fetch(4)

    refused("describes version 5, not 4", version=5)
    for outside in ("../../etc/passwd", "/etc/passwd", "..", "", None):
        refused("outside its folder", file=outside)
    refused("is not that of the tensors that it lists", digest="0" * 32)
    refused("is not a valid manifest", extra=1)
    for broken in ("{", "[" * 100_000):
        path.write_text(broken)
        with pytest.raises(ValueError, match=r"00000004.json in .* is not a valid manifest"):
            reader.fetch(4)


@pytest.mark.parametrize("name", ["00000004.json", "00000004.delta.safetensors"])
def test_a_publication_is_not_read_through_a_link(deltas, reader, name):
    path = deltas.folder / name
    path.rename(deltas.folder.parent / name)
    path.symlink_to(deltas.folder.parent / name)

    with pytest.raises(ValueError, match="symbolic link"):
        reader.fetch(4)


def test_other_files_in_a_folder_of_publications_are_left_alone(tmp_path):
    """Whatever numbers they begin with, and from the first publication on."""
    mine = [
        "2024",
        "2024-01-01.txt",
        "7.json",
        "99999999.csv",
        "1.full.safetensors",
        ".x.1.partial",
    ]
    for name in mine:
        (tmp_path / name).write_text("kept")
    (tmp_path / "00000099.json").mkdir()
    publisher = Publisher(tmp_path)
    for version in (1, 2):
        manifest = written(publisher, version, LAYOUT, iter(tensors_of(version).items()))
    publisher.retain(manifest, keep=2)

    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*mine, "00000099.json", "00000002.json", "00000002.full.safetensors"}


def test_a_delta_of_another_run_is_refused(tmp_path, deltas, reader):
    """Version 3 of a run that was restarted: same number, other tensors."""
    other = tmp_path / "other"
    publisher = Publisher(other)
    written(publisher, 3, LAYOUT, iter(tensors_of(17).items()))
    for name in ("00000003.json", "00000003.full.safetensors"):
        shutil.copy(other / name, deltas.folder / name)
    with pytest.raises(ValueError, match=r"00000004.json in .* has the wrong parent: version 3"):
        reader.fetch(4)


def test_a_run_resumed_from_an_earlier_version_replaces_the_later_ones(deltas, reader):
    assert same_bits(read(reader, 4), tensors_of(4))
    again = Publisher(deltas.folder, encoding="delta")
    written(again, 3, LAYOUT, iter(tensors_of(17).items()))
    assert versions_in(deltas.folder) == [1, 2, 3]
    assert same_bits(read(reader, 3), tensors_of(17))


def test_what_an_interrupted_writer_left_is_no_publication_and_is_removed(deltas):
    partial = deltas.folder / ".00000005.delta.safetensors.77.partial"
    partial.write_bytes(b"half")
    (deltas.folder / "00000005.delta.safetensors").write_bytes(b"no manifest yet")
    assert versions_in(deltas.folder) == [1, 2, 3, 4]
    manifest = publish(deltas, 5)
    assert not partial.exists()
    assert manifests.check_file(deltas.folder, manifest)


def test_an_error_while_gathering_publishes_nothing_and_the_next_is_whole(deltas):
    def broken():
        yield from list(tensors_of(5).items())[:2]
        raise OSError("a rank went away")

    with pytest.raises(OSError, match="went away"):
        written(deltas, 5, LAYOUT, broken())
    assert versions_in(deltas.folder) == [1, 2, 3, 4]
    assert publish(deltas, 5).kind == "full"


def test_retention_keeps_what_a_late_joiner_needs(tmp_path):
    publisher = Publisher(tmp_path, encoding="delta", snapshot_every=3)
    for version in range(1, 9):
        manifest = publish(publisher, version)
        publisher.retain(manifest, keep=publisher.snapshot)
    assert versions_in(tmp_path) == [7, 8]
    assert len(list(tmp_path.iterdir())) == 4


def test_another_model_starts_with_a_full_version(deltas):
    layout = {**LAYOUT, "new": TensorLayout(torch.float32, (2,))}
    tensors = {**tensors_of(5), "new": torch.ones(2)}
    assert written(deltas, 5, layout, iter(tensors.items())).kind == "full"


def test_bad_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match='"full" or "delta", got \'zip\''):
        Publisher(tmp_path, encoding="zip")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Publisher(tmp_path, snapshot_every=0)


def test_a_lock_is_released_with_its_file(tmp_path):
    held = acquire(tmp_path / "lock", exclusive=True, timeout_s=1.0)
    other = os.open(tmp_path / "lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    held.close()
    fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(other)


def test_a_folder_that_others_can_change_is_refused():
    path = shared_memory() / f"primerl-{os.getuid()}-open"
    path.mkdir(exist_ok=True)
    path.chmod(0o777)
    try:
        with pytest.raises(RuntimeError, match="is accessible to other accounts"):
            SharedFolder("open")
    finally:
        shutil.rmtree(path)
    assert not Path(path).exists()


def test_files_that_are_not_publications_are_never_removed_or_written(tmp_path):
    """Their names begin with digits, end in .partial, or are links to what is elsewhere."""
    names = ["7.txt", "2024-notes.md", "00000009.csv", ".download.partial", ".0.json.1.partial"]
    outside = tmp_path / "elsewhere"
    outside.write_text("of the user")
    folder = tmp_path / "publications"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("of the user")
    for name in ("00000002.full.safetensors", "00000002.json"):
        (folder / f".{name}.{os.getpid()}.partial").symlink_to(outside)

    publisher = Publisher(folder, encoding="full")
    for version in (1, 2):
        publisher.retain(publish(publisher, version), keep=version)

    for path in (outside, *(folder / name for name in names)):
        assert path.read_text() == "of the user"
    assert versions_in(folder) == [2]


def test_receivers_of_a_host_share_the_work_on_parts(tmp_path, monkeypatch):
    """Each part is patched once, by one of the receivers, at the same time as the others."""
    publishers = [Publisher(tmp_path, encoding="delta")]
    publishers += [Publisher(tmp_path / f"part-{n:04d}", encoding="delta") for n in (1, 2, 3)]
    tensors = [{f"table{n}": torch.zeros(1000, dtype=torch.bfloat16)} for n in range(4)]

    def publish_all(version):
        digests = {}
        for n, publisher in reversed(list(enumerate(publishers))):
            layout = {k: TensorLayout(t.dtype, tuple(t.shape)) for k, t in tensors[n].items()}
            manifest = publisher.prepare(version, layout, tensors[n].items())
            publisher.commit(parts={} if n else digests)
            digests[f"part-{n:04d}"] = manifest.digest

    taken, together = [], threading.Barrier(2)
    copy, patch = host_copy.CopiedPart._copy, host_copy.CopiedPart._patch

    def copied(part, step, path, names):
        taken.append((step.version, path.parent.name))
        copy(part, step, path, names)

    def patched(part, step, path, names):
        taken.append((step.version, path.parent.name))
        if len(taken) in (5, 6):  # the first part of each receiver
            together.wait(30.0)
        patch(part, step, path, names)

    monkeypatch.setattr(host_copy.CopiedPart, "_copy", copied)
    monkeypatch.setattr(host_copy.CopiedPart, "_patch", patched)
    readers = [FolderReader(tmp_path) for _ in range(2)]
    publish_all(1)
    readers[0].fetch(1)
    for n in range(4):
        tensors[n][f"table{n}"][n] = 1.0
    publish_all(2)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(reader.fetch, 2) for reader in readers]:
            done.result(60.0)
    folders = sorted([tmp_path.name, "part-0001", "part-0002", "part-0003"])
    assert sorted(name for version, name in taken if version == 1) == folders
    assert sorted(name for version, name in taken if version == 2) == folders
    for reader in readers:
        manifest, held = reader.open(2)
        assert set(held) == set(manifest.tensors) == {f"table{n}" for n in range(4)}
        assert all(float(held[f"table{n}"][n]) == 1.0 for n in range(4))
        reader.release()
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_a_version_is_mapped_and_read_before_it_is_opened(tmp_path, encoding, monkeypatch):
    """The engine pauses from ``open`` on, so nothing is left to it but to lock the files."""
    tensors = {name: torch.full((1 << 22,), n, dtype=torch.uint8) for n, name in enumerate("abcd")}
    layout = {name: TensorLayout(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    written(Publisher(tmp_path, encoding=encoding), 1, layout, tensors.items())
    other = FolderReader(tmp_path)
    other.fetch(1)  # makes the copy
    reader = FolderReader(tmp_path, needs=lambda name: name in "ac")
    reader.fetch(1)
    other.close()

    def refuse(*arguments):
        raise AssertionError(f"{arguments} is read during the pause")

    monkeypatch.setattr(folder_reader, "read_manifest", refuse)
    monkeypatch.setattr(tensor_files, "map_tensors", refuse)
    _, opened = reader.open(1)
    assert {name for name, tensor in opened.items() if tensor.is_meta} == {"b", "d"}
    assert same_bits({name: opened[name] for name in "ac"}, {name: tensors[name] for name in "ac"})
    assert all(resident_pages(opened[name]) > 1000 for name in "ac")
    reader.close()


def test_a_file_that_was_replaced_after_it_was_mapped(tmp_path, reader):
    publisher = Publisher(tmp_path)
    manifest = publish(publisher, 1)
    reader.fetch(1)
    write_tensors(tmp_path / manifest.file, LAYOUT, tensors_of(2).items())
    _, opened = reader.open(1)
    assert same_bits(opened, tensors_of(2)), "the worker's digests differ from the manifest's"


def test_all_tensors_of_a_copy_that_are_wrong_are_named(deltas, reader, monkeypatch):
    reader.fetch(3)
    monkeypatch.setattr(host_copy.delta, "apply", lambda source, target: None)
    with pytest.raises(ValueError, match="copy of version 4 is wrong: table differ"):
        reader.fetch(4)
    monkeypatch.setattr(host_copy, "_patch", lambda source, target, form: None)
    with pytest.raises(ValueError, match="copy of version 4 is wrong: .*, .*, .* differ"):
        reader.fetch(4)
    monkeypatch.undo()
    assert same_bits(read(reader, 4), tensors_of(4))


def test_a_patch_that_fails_names_its_tensor_and_leaves_no_thread(deltas, reader, monkeypatch):
    def fail(source, target):
        raise ValueError("the difference is damaged")

    reader.fetch(3)
    monkeypatch.setattr(host_copy.delta, "apply", fail)
    with pytest.raises(ValueError, match="00000004.delta.safetensors: table: the difference is"):
        reader.fetch(4)
    assert not [t for t in threading.enumerate() if t.name.startswith("primerl-beside")]
    monkeypatch.undo()
    assert same_bits(read(reader, 4), tensors_of(4))


def test_a_part_of_another_publication_is_refused(tmp_path):
    whole, part = Publisher(tmp_path), Publisher(tmp_path / "part-0001")
    layout = {"a": TensorLayout(torch.float32, (2,))}
    for publisher, parts in ((part, {}), (whole, {"part-0001": "0" * 32})):
        publisher.prepare(1, layout, {"a": torch.ones(2)}.items())
        publisher.commit(parts=parts)
    with pytest.raises(ValueError, match=r"00000001.json in .*part-0001 is of another publication"):
        FolderReader(tmp_path).fetch(1)


def test_the_time_limit_follows_from_the_bytes():
    assert manifests.timeout_of(10**9) == 300.0
    assert manifests.timeout_of(747 * 10**9) == pytest.approx(7470.0)
