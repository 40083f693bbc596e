import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from forked_ranks import forked_ranks
from publishing import BroadcastReplicas, Replicas, StoreMeeting, same_bits, train

from primerl import models, testing, weights
from primerl._common.digests import digest_of, digest_of_all
from primerl._common.shared_folder import SharedFolder, shared_memory
from primerl.weights.transports import broadcast_group, disk
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
    """No worker hashes the file: it hashes what it hands to its model."""
    model, servers, transport = damaged(tmp_path, flip_a_bit)
    transport.publish(1)
    with pytest.raises(RuntimeError, match=r"digest: .* on http://replica0 worker 0"):
        transport.publish(2)
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


def test_a_tensor_that_is_not_sent(tmp_path, servers, monkeypatch):
    """A gather that loses a tensor: the names that the model's layout has are the measure."""
    whole = disk.checkpoint_tensors

    def lossy(model, **settings):
        return ((n, t) for n, t in whole(model, **settings) if n != "model.norm.weight")

    transport = weights.Disk(testing.tiny_model("llama"), servers, folder=tmp_path)
    monkeypatch.setattr(disk, "checkpoint_tensors", lossy)
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


# ---- broadcasts, with a stand-in for NCCL ----


@pytest.fixture
def broadcasts():
    """A model, two servers of one and two workers, what connects them, and the transport."""
    model, engine, store = testing.tiny_model("qwen3_moe"), BroadcastReplicas(1, 2), StoreMeeting()
    transport = weights.NCCL(
        model,
        engine,
        dtype=torch.bfloat16,
        connect=store.connect,
        unique_id=store.unique_id,
        timeout_s=30.0,
    )
    return model, engine, store, transport


def test_every_worker_gets_the_broadcast_of_every_version(broadcasts):
    model, engine, store, transport = broadcasts
    for version in (1, 2):
        train(model, seed=version)
        receipt = transport.publish(version)
        assert len(engine.tensors) == 3
        assert all(same_bits(t, sent(model, torch.bfloat16)) for t in engine.tensors.values())
        whole = sum(t.nbytes for t in sent(model, torch.bfloat16).values())
        assert (receipt.version, receipt.bytes) == (version, whole)
    assert store.groups == 1, "one group is used as long as the members stay the same"


def test_a_new_group_is_formed_when_a_replica_joins_or_leaves(broadcasts):
    model, engine, store, transport = broadcasts
    transport.publish(1)
    engine.counts = {"http://replica1": 2, "http://new": 1}
    train(model)
    transport.publish(2)
    assert store.groups == 2
    assert same_bits(engine.tensors["http://new", 0], sent(model, torch.bfloat16))


def test_a_worker_with_wrong_bytes_is_named_and_a_new_group_is_formed(broadcasts):
    _, engine, store, transport = broadcasts

    def tamper(url, name, tensor):
        return tensor + 1 if url == "http://replica1" and name == "model.norm.weight" else tensor

    untampered, engine.tamper = engine.tamper, tamper
    with pytest.raises(RuntimeError, match="digest: .* on http://replica1 worker 1") as error:
        transport.publish(1)
    assert "replica0" not in str(error.value)
    engine.tamper = untampered
    transport.publish(2)
    assert store.groups == 2


def test_a_group_that_is_complete_refuses_another_member(broadcasts):
    _, engine, _, transport = broadcasts
    counts = engine.workers()
    engine.workers = lambda: {"http://replica0": counts["http://replica0"]}
    with pytest.raises(RuntimeError, match="the broadcast group of 2 members is complete"):
        transport.publish(1)


def test_several_engines_cannot_share_a_broadcast():
    with pytest.raises(ValueError, match="got 2 engines"):
        weights.NCCL(testing.tiny_model("llama"), BroadcastReplicas(1), BroadcastReplicas(1))


@pytest.mark.gpu
def test_nccl_carries_a_tensor_between_two_communicators():
    """Needs two GPUs and vLLM: rank 0 here, rank 1 in a thread."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU cannot be two NCCL ranks")
    unique_id = broadcast_group.new_unique_id()

    def member(rank):
        place = broadcast_group.Membership(rank, 2, unique_id)
        device = torch.device("cuda", rank)
        tensor = torch.full((1000,), float(1 - rank), dtype=torch.bfloat16, device=device)
        communicator = broadcast_group.connect_nccl(place, device)
        with torch.cuda.device(device):
            communicator.broadcast(tensor, src=0)
            torch.cuda.synchronize()
        return tensor.float().cpu()

    other = broadcast_group.in_thread(lambda: member(1))
    assert torch.equal(member(0), other.result(timeout=60.0))


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
    kinds = ["llama full", "qwen3_moe full", "qwen3_moe delta", "adapter"]
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
