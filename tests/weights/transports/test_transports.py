import functools
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from forked_ranks import forked_ranks
from publishing import Replica, Replicas, same_bits, train

from primerl import models, testing, weights
from primerl._common.digests import digest_of, digest_of_all
from primerl._common.shared_folder import SharedFolder, shared_memory
from primerl._common.tensor_files import map_tensors
from primerl.weights.transports import disk
from primerl.weights.transports.receipts import check_receipts


@pytest.fixture
def servers():
    servers = Replicas(2)
    yield servers
    servers.close()


def held(servers):
    return [server.tensors for server in servers.workers.values()]


def sent(model, dtype=None):
    return dict(models.checkpoint_tensors(model, dtype=dtype))


@pytest.mark.parametrize("family", ["llama", "glm4_moe", "minimax_m2"])
@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_every_replica_holds_the_checkpoint_of_the_trainer(family, encoding, tmp_path, servers):
    model = testing.tiny_model(family)
    transport = weights.Disk(
        model, servers, folder=tmp_path / "w", encoding=encoding, dtype=torch.bfloat16
    )
    kinds, sizes = [], []
    for version in range(1, 4):
        train(model, seed=version)
        receipt = transport.publish(version)
        kinds.append(receipt.kind)
        sizes.append(receipt.bytes)
        for tensors in held(servers):
            assert same_bits(tensors, sent(model, torch.bfloat16))
        assert receipt.version == version
        assert receipt.tensors == len(sent(model))
        assert {r[0]["digest"] for r in receipt.servers.values()} == {receipt.digest}
        assert set(receipt.seconds) == {"gather", "encode", "write", "load"}
        assert receipt.metrics == {
            "publish_s": sum(receipt.seconds.values()),
            "publish_bytes": receipt.bytes,
        }
        assert min(receipt.seconds.values()) >= 0
    assert kinds == (["full"] * 3 if encoding == "full" else ["full", "delta", "delta"])
    if encoding == "delta":
        assert sizes[1] < sizes[0]


def test_shared_memory_serves_both_kinds_of_engine_and_leaves_nothing(servers):
    class Engine:
        def update_weights(self, tensors, *, version, timeout_s=1.0):
            self.taken = {name: tensor.clone() for name, tensor in tensors.items()}

    def publications():  # other runs of this user have theirs
        return set(shared_memory().glob(f"primerl-{os.getuid()}-publications-*"))

    model, engine = testing.tiny_model("qwen3_moe"), Engine()
    before = publications()
    transport = weights.SharedMemory(model, engine, servers)
    receipt = transport.publish(3)

    assert same_bits(engine.taken, model.state_dict())
    assert all(same_bits(tensors, sent(model)) for tensors in held(servers))
    assert receipt.servers.keys() == servers.workers.keys()
    mine = publications() - before
    assert mine
    del transport
    assert not all(path.exists() for path in mine)


def test_weights_that_the_shared_memory_has_no_room_for_go_to_the_disk(
    servers, tmp_path, monkeypatch, caplog
):
    model = testing.tiny_model("llama")
    small = shutil.disk_usage(tmp_path)._replace(free=int(1.9 * model.num_parameters() * 4))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: small)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    transport = weights.SharedMemory(model, servers)
    transport.publish(1)

    (folder,) = tmp_path.glob("primerl-*-publications-*")
    assert any(folder.glob("*.safetensors"))
    assert f"files go to {tmp_path} instead" in caplog.text
    assert all(same_bits(tensors, sent(model)) for tensors in held(servers))
    del transport
    assert not any(tmp_path.iterdir())


def test_files_in_shared_memory_are_written_over_whoever_chose_the_folder(servers):
    place = SharedFolder("of-a-disk-transport")
    transport = weights.Disk(testing.tiny_model("llama"), servers, folder=place.path / "w")
    files = []
    for version in range(1, 4):
        transport.publish(version)
        (file,) = (place.path / "w").glob("*.full.safetensors")
        files.append(file.stat().st_ino)
        for server in servers.workers.values():
            assert server.version == version
    assert files[0] == files[2] != files[1]
    place.close()


def test_publishing_to_an_engine_in_this_process_returns_a_receipt_too():
    class Engine:
        def update_weights(self, tensors, *, version, timeout_s=1.0):
            pass

    receipt = weights.SharedMemory(testing.tiny_model("llama"), Engine()).publish(2)
    assert (receipt.version, receipt.bytes, receipt.digest) == (2, 0, None)


def test_a_replica_that_joins_late_or_missed_versions(tmp_path):
    model = testing.tiny_model("llama")
    first, second = Replicas(1), Replicas(1)
    transport = weights.Disk(model, first, folder=tmp_path, encoding="delta")
    for version in (1, 2, 3):
        train(model, seed=version)
        transport.publish(version)
    first.close()  # the host has no copy any more
    second.load_weights({"folder": str(tmp_path), "version": 3}, version=3)
    assert same_bits(second.workers["http://replica0"].tensors, sent(model))
    second.close()


# ---- faults, and the layer that catches each ----


class Damaging(Replicas):
    """Damages the publication before the servers read it."""

    def __init__(self, damage):
        super().__init__()
        self.damage = damage

    def load_weights(self, update, *, version, timeout_s=600.0, send=None):
        self.damage(update, self.calls)
        return super().load_weights(update, version=version)


def damaged(tmp_path, damage, encoding="full"):
    servers = Damaging(damage)
    model = testing.tiny_model("llama")
    transport = weights.Disk(model, servers, folder=tmp_path, encoding=encoding)
    return model, servers, transport


def file_of(update):
    return next(Path(update["folder"]).glob(f"{update['version']:08d}.*.safetensors"))


def test_a_truncated_file(tmp_path):
    def truncate(update, call):
        if call == 1:
            os.truncate(file_of(update), 1000)

    model, servers, transport = damaged(tmp_path, truncate)
    transport.publish(1)
    before = held(servers)[0]
    train(model)
    with pytest.raises(
        RuntimeError, match=r"00000002.full.safetensors in .* is truncated: 1000 bytes"
    ):
        transport.publish(2)
    assert same_bits(held(servers)[0], before), "the server keeps serving version 1"
    train(model)
    transport.publish(3)
    assert same_bits(held(servers)[0], sent(model))
    servers.close()


def flip_a_bit(update, call):
    if call == 1:
        path = file_of(update)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))


def test_a_flipped_bit_in_a_full_version(tmp_path):
    """The worker that needs the tensor finds it before its engine pauses."""
    model, servers, transport = damaged(tmp_path, flip_a_bit)
    transport.publish(1)
    before = held(servers)[0]
    with pytest.raises(RuntimeError, match=r"2.full.safetensors in .* is altered: .* has another"):
        transport.publish(2)
    assert held(servers)[0] is before, "it serves version 1"
    transport.publish(3)
    assert same_bits(held(servers)[0], sent(model))
    servers.close()


def test_a_flipped_bit_in_a_delta_is_answered_by_the_full_version(tmp_path):
    model, servers, transport = damaged(tmp_path, flip_a_bit, encoding="delta")
    transport.publish(1)
    train(model)
    receipt = transport.publish(2)
    assert receipt.kind == "full"
    assert re.search(r"00000002.delta.safetensors in .* is altered", receipt.fallback)
    assert servers.calls == 3
    assert same_bits(held(servers)[0], sent(model))
    train(model, seed=1)
    assert transport.publish(3).kind == "delta"
    assert same_bits(held(servers)[0], sent(model))
    servers.close()


class TwoWorkers(Replicas):
    """One server of two workers that use every second tensor each."""

    def __init__(self):
        super().__init__(2)
        numbers = {}
        for place, worker in enumerate(self.workers.values()):
            worker.needs = lambda name, place=place: (
                numbers.setdefault(name, len(numbers)) % 2 == place
            )

    def load_weights(self, update, *, version, timeout_s=600.0, send=None):
        found = super().load_weights(update, version=version)
        return {"http://two": [receipt for receipts in found.values() for receipt in receipts]}


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_two_workers_with_half_of_the_tensors_each(tmp_path, encoding):
    model, server = testing.tiny_model("qwen3_moe"), TwoWorkers()
    transport = weights.Disk(model, server, folder=tmp_path, encoding=encoding)
    for version in (1, 2):
        train(model, seed=version)
        receipt = transport.publish(version)
        one, two = held(server)
        assert one.keys().isdisjoint(two)
        assert same_bits(one | two, sent(model))
        assert {r["digest"] for r in receipt.servers["http://two"]} == {receipt.digest}
    server.close()


def test_an_altered_tensor_is_reported_by_the_worker_that_uses_it(tmp_path):
    server = TwoWorkers()
    model = testing.tiny_model("llama")
    transport = weights.Disk(model, server, folder=tmp_path)
    transport.publish(1)
    altered = "model.layers.1.mlp.up_proj.weight"
    prepare = Replica.prepare

    def damage(worker, update):
        map_tensors(file_of(update), writable=True)[altered][0, 0] += 1
        prepare(worker, update)

    first, second = server.workers.values()
    user = 0 if first.needs(altered) else 1
    first.prepare = functools.partial(damage, first)
    with pytest.raises(RuntimeError, match=rf"is altered: {altered} has another digest"):
        transport.publish(2)
    assert [one.reader.hashed == {} for one in (first, second)][user]
    del first.prepare
    transport.publish(3)
    server.close()


def test_a_tensor_that_changes_between_fetching_and_loading_is_reported(tmp_path):
    """It is hashed again; tensors that did not change are not."""
    server = TwoWorkers()
    transport = weights.Disk(testing.tiny_model("llama"), server, folder=tmp_path)
    transport.publish(1)
    altered = "model.layers.1.mlp.up_proj.weight"
    first, second = server.workers.values()
    user = 0 if first.needs(altered) else 1
    prepare = Replica.prepare

    def damage(worker, update):
        prepare(worker, update)
        worker.reader.open(update["version"])[1][altered][0, 0] += 1
        worker.reader._unlock()

    (first, second)[user].prepare = functools.partial(damage, (first, second)[user])
    with pytest.raises(RuntimeError, match=rf"digest: .* on http://two worker {user}") as error:
        transport.publish(2)
    assert f"worker {1 - user}" not in str(error.value)
    assert (first, second)[user].receipt["differing"] == [altered]
    server.close()


def test_a_tensor_that_no_worker_uses_is_named(tmp_path):
    server = TwoWorkers()
    transport = weights.Disk(testing.tiny_model("llama"), server, folder=tmp_path)
    for worker in server.workers.values():
        worker.needs = lambda name, needs=worker.needs: name == "lm_head.weight" or needs(name)
        worker.store = lambda tensors, store=worker.store: store(
            (name, tensor) for name, tensor in tensors if name != "lm_head.weight"
        )
    with pytest.raises(RuntimeError, match="coverage: lm_head.weight was sent to http://two but"):
        transport.publish(1)
    server.close()


def test_two_swapped_tensors(tmp_path):
    """The server reports what it was handed, not what its file claims."""

    class Swapping(Replicas):
        def load_weights(self, update, *, version, timeout_s=600.0, send=None):
            found = super().load_weights(update, version=version)
            server = self.workers["http://replica0"]
            one, two = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))
            tensors = server.tensors
            tensors[one], tensors[two] = tensors[two], tensors[one]
            digest = digest_of_all({n: digest_of(t) for n, t in tensors.items()})
            return {url: [{**r[0], "digest": digest}] for url, r in found.items()}

    servers = Swapping()
    transport = weights.Disk(testing.tiny_model("llama"), servers, folder=tmp_path)
    with pytest.raises(RuntimeError, match=r"digest: .* on http://replica0 worker 0"):
        transport.publish(1)
    servers.close()


def test_the_time_limit_is_that_of_a_full_version(tmp_path, servers, monkeypatch):
    """Also of a delta, since a server that has missed versions loads the full one."""
    limits = []
    load = servers.load_weights
    monkeypatch.setattr(
        servers,
        "load_weights",
        lambda *args, timeout_s, **named: limits.append(timeout_s) or load(*args, **named),
    )
    monkeypatch.setattr(disk, "timeout_of", lambda size: 700.0 + size)
    model = testing.tiny_model("llama")
    transport = weights.Disk(model, servers, folder=tmp_path, encoding="delta")
    kinds = []
    for version in (1, 2):
        train(model, seed=version)
        kinds.append(transport.publish(version).kind)
    assert kinds == ["full", "delta"]
    whole = sum(tensor.nbytes for tensor in sent(model).values())
    assert limits == [700.0 + whole, 700.0 + whole]


def test_a_tensor_that_is_not_sent(tmp_path, servers, monkeypatch):
    """A gather that loses a tensor: the names that the model's layout has are the measure."""
    transport = weights.Disk(testing.tiny_model("llama"), servers, folder=tmp_path)
    whole = disk.layer_for_checkpoint

    def lossy(*model, **settings):
        layer = whole(*model, **settings)
        return [(name, tensor) for name, tensor in layer if name != "model.norm.weight"]

    monkeypatch.setattr(disk, "layer_for_checkpoint", lossy)
    with pytest.raises(ValueError, match=r"tensors are missing: model.norm.weight"):
        transport.publish(1)
    assert servers.calls == 0
    monkeypatch.undo()
    assert transport.publish(1).version == 1


def test_a_publication_that_is_interrupted_is_repaired_by_the_next(tmp_path, servers):
    class Stopped(BaseException):
        pass

    class Interrupted(Replicas):
        def load_weights(self, update, *, version, timeout_s=600.0, send=None):
            if version == 2:  # one server has it, the other does not
                next(iter(self.workers.values())).prepare(update)
                raise Stopped
            return super().load_weights(update, version=version)

    model, two = testing.tiny_model("llama"), Interrupted(2)
    transport = weights.Disk(model, two, folder=tmp_path, encoding="delta")
    transport.publish(1)
    train(model)
    with pytest.raises(Stopped):
        transport.publish(2)
    train(model, seed=1)
    transport.publish(3)
    assert all(same_bits(tensors, sent(model)) for tensors in held(two))
    two.close()


RECEIPT = {"version": 5, "digest": "d", "tensors": 3, "unreached": []}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": 4}, r"version: still serves version 4 on http://b worker 1"),
        ({"version": None}, r"version: still serves version None on http://b worker 1"),
        ({"tensors": 2}, r"coverage: 2 of 3 tensors were loaded on http://b worker 1"),
        (
            {"unreached": ["lm_head"]},
            r"coverage: no tensor was loaded into lm_head on http://b worker 1",
        ),
        ({"digest": "x"}, r"digest: x of the loaded tensors, expected d on http://b worker 1"),
    ],
)
def test_one_worker_of_one_replica_that_differs_is_named(changes, why):
    servers = {"http://a": [RECEIPT], "http://b": [RECEIPT, {**RECEIPT, **changes}]}
    with pytest.raises(RuntimeError, match=why) as error:
        check_receipts(servers, version=5, digest="d", tensors=3)
    assert "http://a" not in str(error.value)


def test_a_replica_without_a_receipt_is_an_error():
    with pytest.raises(RuntimeError, match="no worker of http://a answered"):
        check_receipts({"http://a": []}, version=5, digest="d", tensors=3)
    with pytest.raises(RuntimeError, match="no server took the weights"):
        check_receipts({}, version=5, digest="d", tensors=3)


def test_publishing_without_an_engine_is_refused(tmp_path):
    model = testing.tiny_model("llama")
    with pytest.raises(ValueError, match="no engine"):
        weights.Disk(model, folder=tmp_path)
    with pytest.raises(ValueError, match="folder is None"):
        weights.Disk(model, Replicas(), folder=None)


# ---- a sharded trainer ----


@pytest.fixture(scope="session")
def found(root, tmp_path_factory):
    """What tests/ranks/weight_publishing.py found on each of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    script = root / "tests/ranks/weight_publishing.py"
    done = forked_ranks(script, folder, ranks=2, cwd=folder)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]


def test_ranks_publish_what_an_unsharded_trainer_would(found):
    kinds = ["llama full", "qwen3_moe full", "qwen3_moe delta", "qwen3_moe full ep"]
    kinds += ["qwen3_moe delta network", "merged", "adapter"]
    assert found[0]["same"] == dict.fromkeys(kinds, True)
    assert found[1]["adapter"] == found[0]["adapter"]
    assert found[0]["kinds"] == ["full", "delta"]
    assert found[1]["receipts"] == found[0]["receipts"]
    assert found[1]["metrics"] == found[0]["metrics"]
    assert min(found[1]["metrics"].values()) > 0


def test_no_rank_holds_more_than_a_layer(found):
    for rank in found:
        assert 0 < rank["peak"] <= 2 * rank["layer"] < rank["whole"] / 2


def test_a_failure_on_rank_0_is_raised_on_every_rank_and_none_hangs(found):
    assert "is truncated" in found[0]["failure"]
    assert found[1]["failure"].startswith("rank 0 failed: ")
    assert "is truncated" in found[1]["failure"]
    assert "the disk is full" in found[1]["mid_gather"], "in the middle of a gather"
    assert all(rank["after"] for rank in found), "the next publication works"
    assert found[0]["unsaved"].startswith("folder is None")
    assert found[1]["unsaved"].startswith("rank 0 failed: ValueError: folder is None")


def test_each_rank_writes_a_part(found):
    """A version is rank 0's files and those of the other ranks, about equally large."""
    first = found[0]
    assert first["files"] == ["00000001.full.safetensors"] * 2 + ["00000001.json"] * 2
    assert max(first["sizes"]) < 1.5 * min(first["sizes"])
    assert not first["stale"], "parts of ranks that write no longer are removed"
    assert first["part_kinds"] == ["full", "delta", "delta"]
    assert first["parts_same"] == [True, True, True], "also for a server that joins late"


def test_a_rank_that_fails_fails_the_publication_of_all(found):
    assert found[0]["other_rank"] == f"rank 1 failed: RuntimeError: {found[1]['other_rank']}"
    assert found[1]["other_rank"].startswith("version 3 could not be written into ")
    assert found[1]["other_rank"].endswith(
        "part-0001, which needs up to 0.0 GB for it: the disk of rank 1 is full"
    )
    assert found[0]["uncommitted"]


def test_a_torn_part_is_published_in_full_by_all_ranks(found):
    for rank in found:
        kind, why = rank["fallback"]
        assert kind == "full"
        assert "00000002.delta.safetensors in" in why
        assert "truncated" in why
    assert found[0]["torn_same"] == [True, True]


def test_ranks_publish_beside_training(found):
    for rank in found:
        assert rank["busy"].startswith("rank 0: version 3 is still being published: call wait()")
        kinds, same, again = rank["beside"]
        assert kinds == ["full", "delta", "delta"]
        assert all(same), "the weights at start(), not those at wait()"
        assert again, "wait() returns the same receipt again"
    assert len(found[0]["beside"][1]) == 3
    assert found[0]["uncopied"] == "rank 1 failed: IndexError: list index out of range"
    assert found[0]["copied_again"] == 5


def test_ranks_agree_about_what_only_one_of_them_sees(found):
    for rank in found:
        assert "model.norm.weight on rank 1; call wait() before" in rank["changed"]
        assert rank["versions"] == "the ranks publish different versions: [2, 3], in rank order"
    assert found[0]["late"].startswith("rank 1 failed: RuntimeError: version 4 was not published")
    assert found[1]["late"].startswith("version 4 was not published within 0 s")


def test_ranks_send_a_model_that_has_changed_its_tensors(found):
    assert found[0]["other_tensors"] == [True, True]
    assert found[0]["unfinished"] == found[1]["unfinished"] == "done"
