"""``weights.NCCL`` with a stand-in for NCCL that carries bytes through a file."""

import contextlib
import json
import socket

import pytest
import torch
from forked_ranks import forked_ranks
from publishing import BroadcastReplicas, StoreMeeting, same_bits, train

from primerl import models, testing, weights
from primerl._common.digests import as_bytes
from primerl._common.threads import in_thread
from primerl.weights.transports import nccl
from primerl.weights.transports.broadcasts import groups
from primerl.weights.transports.broadcasts.layers import LayerSender
from primerl.weights.transports.broadcasts.rendezvous import Membership, address_towards


def sent(model):
    return dict(models.checkpoint_tensors(model, dtype=torch.bfloat16))


@pytest.fixture
def broadcasts(tmp_path):
    """A model, two servers of one and two workers, what connects them, and the transport."""
    model, engine, store = (
        testing.tiny_model("qwen3_moe"),
        BroadcastReplicas(1, 2),
        StoreMeeting(tmp_path),
    )
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
        assert all(same_bits(t, sent(model)) for t in engine.tensors.values())
        whole = sum(t.nbytes for t in sent(model).values())
        assert (receipt.version, receipt.bytes) == (version, whole)
    assert store.groups == 1, "one group is used as long as the members stay the same"


def test_a_new_group_is_formed_when_a_replica_joins_or_leaves(broadcasts):
    model, engine, store, transport = broadcasts
    transport.publish(1)
    engine.counts = {"http://127.0.0.1/1": 2, "http://127.0.0.1/new": 1}
    train(model)
    transport.publish(2)
    assert store.groups == 2
    assert same_bits(engine.tensors["http://127.0.0.1/new", 0], sent(model))


def test_a_worker_with_wrong_bytes_is_named_and_a_new_group_is_formed(broadcasts):
    _, engine, store, transport = broadcasts

    def tamper(url, name, tensor):
        return tensor + 1 if url.endswith("/1") and name == "model.norm.weight" else tensor

    untampered, engine.tamper = engine.tamper, tamper
    with pytest.raises(RuntimeError, match="digest: .* on http://127.0.0.1/1 worker 1") as error:
        transport.publish(1)
    assert "127.0.0.1/0" not in str(error.value)
    engine.tamper = untampered
    transport.publish(2)
    assert store.groups == 2


def test_a_group_that_is_complete_refuses_another_member(broadcasts):
    _, engine, _, transport = broadcasts
    engine.workers = lambda: {"http://127.0.0.1/0": 1}
    with pytest.raises(RuntimeError, match="the broadcast group of 2 members is complete"):
        transport.publish(1)


def test_several_engines_cannot_share_a_broadcast():
    with pytest.raises(ValueError, match="got 2 engines"):
        weights.NCCL(testing.tiny_model("llama"), BroadcastReplicas(1), BroadcastReplicas(1))


def test_the_number_of_senders_is_checked():
    with pytest.raises(ValueError, match="senders=2; expected 1 to 1, the number of ranks"):
        weights.NCCL(testing.tiny_model("llama"), BroadcastReplicas(1), senders=2)


def test_a_tensor_that_was_not_announced(broadcasts, monkeypatch):
    """A gather that loses a tensor: the workers wait for another than is sent."""
    model, engine, _, transport = broadcasts
    whole = nccl.owned_checkpoint_tensors

    def lossy(*model, **settings):
        for layer in whole(*model, **settings):
            yield [(name, tensor) for name, tensor in layer if "k_proj" not in name]

    monkeypatch.setattr(nccl, "owned_checkpoint_tensors", lossy)
    with pytest.raises(RuntimeError, match=r"o_proj.weight is not the next tensor that was ann"):
        transport.publish(1)
    monkeypatch.undo()
    transport.publish(2)
    assert same_bits(engine.tensors["http://127.0.0.1/0", 0], sent(model))


# ---- addresses ----


def test_the_address_towards_this_host_is_its_loopback_address():
    for host in ("127.0.0.1", "localhost"):
        assert address_towards(host, first_host=socket.gethostname()) == "127.0.0.1"


def test_the_loopback_address_of_another_host_is_refused():
    with pytest.raises(ValueError, match="127.0.0.1 of rank 0's host trainer-0.*pass address="):
        address_towards("127.0.0.1", first_host="trainer-0")


@pytest.mark.parametrize("host", ["nowhere.invalid", "n" * 70])
def test_a_host_without_an_address(host):
    with pytest.raises(OSError, match=rf"no route to the server at {host} .*pass address="):
        address_towards(host, first_host="trainer-0")


@pytest.mark.parametrize("host", ["::1", "2001:db8::7"])
def test_ipv6_is_refused(host):
    with pytest.raises(OSError, match=f"{host} has only an IPv6 address.*pass towards=, an IPv4"):
        address_towards(host, first_host="trainer-0", argument="towards")


# ---- GPUs ----


class FakeStream:
    """A CUDA stream whose work ends when it is told to."""

    def __init__(self, device):
        self.device, self.waited, self.ended = device, [], False

    def wait_stream(self, other):
        self.waited.append(other)

    def query(self):
        return self.ended


class OnStream:
    """A communicator that notes on which stream it broadcasts."""

    def __init__(self, streams):
        self.streams, self.sent = streams, []

    def broadcast(self, tensor, src):
        self.sent.append((tensor.tolist(), self.streams[-1]))

    def destroy(self):
        pass


def test_a_layer_is_broadcast_on_a_stream_of_its_own(monkeypatch):
    """So a worker that is lost stops only this stream."""
    streams = ["the trainer's"]

    @contextlib.contextmanager
    def entered(stream):
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[-1])
    connecting = in_thread(lambda: OnStream(streams))
    sender = LayerSender(connecting, torch.device("cuda"), timeout_s=0.05)
    sender.connect()
    sender.send([torch.tensor([1, 2], dtype=torch.uint8), torch.tensor(1, dtype=torch.int16)])
    first, second = connecting.result().sent
    stream = first[1]
    assert (first[0], second) == ([1, 2], ([1, 0], stream))
    assert stream.waited == ["the trainer's"], "the layer is computed on the trainer's stream"
    with pytest.raises(RuntimeError, match="the broadcast took longer than 0.05 s"):
        sender.wait()
    stream.ended = True
    sender.wait()


@pytest.mark.gpu
def test_nccl_carries_a_tensor_between_two_communicators():
    """Needs two GPUs and vLLM: rank 0 here, rank 1 in a thread."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU cannot be two NCCL ranks")
    unique_id = groups.new_unique_id()

    def joined(rank):
        place = Membership(rank, 2, unique_id)
        return groups.connect_nccl(place, torch.device("cuda", rank))

    def receive():
        tensor = torch.empty(1000, dtype=torch.bfloat16, device=torch.device("cuda", 1))
        communicator = joined(1)
        with torch.cuda.device(1):
            communicator.broadcast(as_bytes(tensor), src=0)
            torch.cuda.synchronize()
        return tensor.cpu()

    received = in_thread(receive)
    connecting = in_thread(lambda: joined(0))
    sent = torch.randn(1000, dtype=torch.bfloat16, device=torch.device("cuda", 0))
    sender = LayerSender(connecting, sent.device, timeout_s=60.0)
    sender.connect()
    sender.send([sent])
    sender.wait()
    assert torch.equal(received.result(timeout=60.0), sent.cpu())


# ---- several ranks ----


def found_by(root, folder, ranks):
    script = root / "tests/ranks/weight_broadcasts.py"
    done = forked_ranks(script, folder, ranks=ranks, cwd=folder)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="session")
def two(root, tmp_path_factory):
    """What tests/ranks/weight_broadcasts.py found on each of two ranks."""
    return found_by(root, tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="session")
def four(root, tmp_path_factory):
    return found_by(root, tmp_path_factory.mktemp("four"), 4)


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_broadcasts_of_several_ranks_arrive_as_disk_publishes_them(ranks, request):
    found = request.getfixturevalue(ranks)
    for case in ("default", "one", "two", *(("ep", "fp8") if len(found) == 2 else ())):
        assert all(rank[case]["same"] for rank in found), case
        assert sum(rank[case]["sent"] for rank in found) == found[0][case]["bytes"]


def test_each_sender_sends_its_share(two, four):
    for found in (two, four):
        shares = [rank["default"]["sent"] for rank in found]
        largest_layer = found[0]["default"]["bytes"] / 6
        assert max(shares) - min(shares) <= largest_layer
        assert [rank["one"]["sent"] > 0 for rank in found] == [True] + [False] * (len(found) - 1)
    assert [rank["two"]["sent"] > 0 for rank in four] == [True, False, True, False]
    assert [rank["two"]["groups"] for rank in four] == [1, 0, 1, 0]


def test_senders_take_turns(two, four):
    """A worker receives a layer of each sender, and then the next layer of each."""
    for found in (two, four):
        told = found[0]["default"]
        layers = []  # of each turn of a sender: the sender, and the names of its layer
        for sender, name in zip(told["order"], told["names"], strict=True):
            layer = name.split(".")[2] if "layers" in name else name
            if (sender, layer) not in layers:
                layers.append((sender, layer))
        senders = [sender for sender, _ in layers]
        whole = len(layers) // len(found) * len(found)
        for turn in range(0, whole - len(found), len(found)):
            assert senders[turn : turn + len(found)] == list(range(len(found)))


def test_senders_cannot_be_more_than_ranks(two):
    for rank in two:
        assert rank["refusal"] == "senders=3; expected 1 to 2, the number of ranks"


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("sender", "rank 1: the link of rank 1 is down"),
        ("lost worker", "Wait timeout"),
        ("no connection", "rank 1: connecting to the engines by NCCL took longer than 2 s"),
        ("no address", "rank 1: 203.0.113.1 is not an address of this host"),
    ],
)
def test_a_sender_that_fails_fails_on_every_rank(two, fault, why):
    errors = [rank["failures"][fault]["error"] for rank in two]
    assert why in errors[0]
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("refused", "the servers did not prepare the update"),
        ("damaged", "worker 0; digest: "),
        ("late worker", "the broadcast group of 2 members is complete"),
    ],
)
def test_servers_that_fail_are_named_on_every_rank(two, fault, why):
    errors = [rank["failures"][fault]["error"] for rank in two]
    assert why in errors[0]
    assert errors[1] == f"rank 0 failed: RuntimeError: {errors[0]}"


def test_after_a_failure_new_groups_are_formed(two):
    for rank in two:
        after = {name: one["after"] for name, one in rank["failures"].items() if "after" in one}
        assert after == dict.fromkeys(after, True)
        assert len(after) == 6
