"""Publications beside training: ``start`` and ``wait``."""

import threading

import pytest
import torch
from publishing import Replicas, same_bits, train

from primerl import models, testing, weights
from primerl.weights.transports import transport as transports


class Slow(Replicas):
    """Servers that load a version once they are told to."""

    def __init__(self, count=1):
        super().__init__(count)
        self.asked, self.let_go = threading.Event(), threading.Event()
        self.error = None

    def load_weights(self, update, *, version, timeout_s=600.0, send=None):
        self.asked.set()
        assert self.let_go.wait(60.0)
        if self.error is not None:
            raise self.error
        return super().load_weights(update, version=version)

    @property
    def tensors(self):
        return self.workers["http://replica0"].tensors


@pytest.fixture
def servers():
    slow = Slow()
    yield slow
    slow.let_go.set()
    slow.close()


def sent(model):
    return {name: tensor.clone() for name, tensor in models.checkpoint_tensors(model)}


@pytest.mark.parametrize("encoding", ["full", "delta"])
@pytest.mark.parametrize("kind", ["Disk", "SharedMemory"])
def test_engines_get_the_weights_at_start_although_they_change(tmp_path, servers, kind, encoding):
    model = testing.tiny_model("llama")
    if kind == "Disk":
        transport = weights.Disk(model, servers, folder=tmp_path, encoding=encoding)
    else:
        transport = weights.SharedMemory(model, servers, encoding=encoding)
    for version in (1, 2, 3):
        train(model, seed=version)
        expected = sent(model)
        servers.let_go.clear()
        pending = transport.start(version)
        assert servers.asked.wait(60.0)
        train(model, seed=10 + version)  # start has returned, and no engine has loaded
        servers.let_go.set()
        receipt = pending.wait()
        assert receipt.version == version
        assert same_bits(servers.tensors, expected)
        assert not same_bits(servers.tensors, sent(model))
        assert receipt.kind == ("full" if version == 1 else encoding)


def test_the_receipt_says_for_how_long_training_waited(tmp_path, servers):
    transport = weights.Disk(testing.tiny_model("llama"), servers, folder=tmp_path)
    servers.let_go.set()
    pending = transport.start(1)
    receipt = pending.wait()
    assert type(receipt.version) is int
    assert receipt.metrics["publish_wait_s"] == receipt.waited_s > 0
    assert receipt.seconds.keys() == {"gather", "encode", "write", "load"}
    assert min(receipt.seconds.values()) >= 0
    assert pending.wait() is receipt
    assert "publish_wait_s" not in transport.publish(2).metrics


def test_one_version_is_published_at_a_time(tmp_path, servers):
    transport = weights.Disk(testing.tiny_model("llama"), servers, folder=tmp_path)
    pending = transport.start(1)
    for begin in (transport.start, transport.publish):
        with pytest.raises(RuntimeError, match=r"version 1 is still being published: call wait"):
            begin(2)
    servers.let_go.set()
    pending.wait()
    assert transport.publish(2).version == 2


def test_an_error_is_raised_by_wait_and_the_next_version_is_published(tmp_path, servers):
    model = testing.tiny_model("llama")
    transport = weights.Disk(model, servers, folder=tmp_path)
    servers.error = RuntimeError("the server has no memory left")
    servers.let_go.set()
    pending = transport.start(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory left"):
            pending.wait()
    servers.error = None
    transport.publish(2)
    assert same_bits(servers.tensors, sent(model))


def test_leaving_a_transport_waits_for_the_version_under_way(tmp_path, servers):
    model = testing.tiny_model("llama")
    with weights.Disk(model, servers, folder=tmp_path) as transport:
        transport.start(1)
        threading.Timer(0.1, servers.let_go.set).start()
    assert same_bits(servers.tensors, sent(model))


def test_leaving_a_transport_raises_what_the_version_under_way_ended_with(tmp_path, servers):
    servers.error = RuntimeError("the server has no memory left")
    servers.let_go.set()
    with (
        pytest.raises(RuntimeError, match="no memory left"),
        weights.Disk(testing.tiny_model("llama"), servers, folder=tmp_path) as transport,
    ):
        transport.start(1)


def test_an_error_does_not_wait_for_the_version_under_way(tmp_path, servers, monkeypatch):
    monkeypatch.setattr(transports, "_ABANDONED_S", 0.01)
    transport = weights.Disk(testing.tiny_model("llama"), servers, folder=tmp_path)

    def train():
        with transport:
            transport.start(1)
            raise ValueError("the loss is odd")

    with pytest.raises(ValueError, match="^the loss is odd$"):
        train()


def test_the_copies_reuse_host_memory(tmp_path, servers):
    model = testing.tiny_model("llama")
    transport = weights.Disk(model, servers, folder=tmp_path)
    servers.let_go.set()
    places = []
    for version in (1, 2):
        transport.start(version).wait()
        kept = transport._host_memory._copies
        places.append({name: tensor.data_ptr() for name, tensor in kept.items()})
    assert places[0] == places[1]
    trained = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert trained.isdisjoint(places[0].values())


def test_a_transport_in_this_process_has_copied_when_start_returns():
    model = testing.tiny_model("llama")

    class Engine:
        def update_weights(self, tensors, *, version, timeout_s=600.0):
            self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            self.version = version

    engine = Engine()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pending = weights.SharedMemory(model, engine).start(3)
    train(model, seed=1)
    assert engine.version == 3
    assert all(torch.equal(engine.tensors[name], expected[name]) for name in engine.tensors)
    assert pending.wait().version == 3


def test_a_load_that_takes_too_long_names_the_bytes(tmp_path):
    class Stuck(Replicas):
        def load_weights(self, update, *, version, timeout_s=600.0, send=None):
            threading.Event().wait(timeout_s)
            raise RuntimeError(f"the server did not answer within {timeout_s:g} s")

    servers = Stuck()
    transport = weights.Disk(testing.tiny_model("llama"), servers, folder=tmp_path, timeout_s=0.01)
    with pytest.raises(RuntimeError, match=r"within 0.01 s \(0.0 GB have 0 s\)$"):
        transport.publish(1)
    servers.close()


def test_a_publication_that_never_ends_is_given_up(tmp_path, servers, monkeypatch):
    transport = weights.Disk(testing.tiny_model("llama"), servers, folder=tmp_path)
    pending = transport.start(1)
    monkeypatch.setattr(transport, "_group_timeout_s", lambda: 0.01)
    with pytest.raises(RuntimeError, match=r"1 was not published within 0 s \(0.0 GB have 600 s"):
        pending.wait()
