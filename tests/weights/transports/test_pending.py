"""Publications beside training: ``start`` and ``wait``."""

import shutil
import subprocess
import sys
import threading

import pytest
import torch
from publishing import Replicas, same_bits, train

from primerl import models, testing, weights
from primerl._common.threads import in_thread, wait_for_work
from primerl.weights.transports import transport as transports
from primerl.weights.transports.publications import publisher


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
    monkeypatch.setattr(transport, "_limit_s", 0.01)
    with pytest.raises(RuntimeError, match=r"1 was not published within 0 s \(0.0 GB have 600 s"):
        pending.wait()
    with pytest.raises(RuntimeError, match="version 1 was given up, but a thread is still sending"):
        transport.start(2)  # would overwrite what the thread sends
    servers.let_go.set()
    pending.abandon(60.0)
    assert transport.publish(2).version == 2


def test_the_time_limit_grows_with_the_engines(tmp_path, servers):
    servers.let_go.set()
    limits = []
    for count in (1, 3):
        engines = [servers] * count
        with weights.Disk(testing.tiny_model("llama"), *engines, folder=tmp_path) as transport:
            transport.publish(count)
        limits.append(transport._limit_s)
    assert limits[1] - limits[0] == 4 * 600.0  # two more engines may each load a version twice


@pytest.mark.parametrize("version", [-1, True])
@pytest.mark.parametrize("kind", ["Disk", "SharedMemory"])
def test_versions_are_integers_of_at_least_0(tmp_path, servers, kind, version):
    folder = {"folder": tmp_path} if kind == "Disk" else {}
    transport = getattr(weights, kind)(testing.tiny_model("llama"), servers, **folder)
    for begin in (transport.start, transport.publish):
        with pytest.raises(ValueError, match=f"version={version}; expected an integer of at least"):
            begin(version)


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_tensors_that_come_go_or_change_their_kind_are_sent(tmp_path, servers, encoding):
    model = testing.tiny_model("llama")
    transport = weights.Disk(model, servers, folder=tmp_path, encoding=encoding)
    servers.let_go.set()
    transport.publish(1)

    model.register_buffer("extra", torch.arange(3.0))
    transport.start(2).wait()
    assert "extra" in servers.tensors
    assert same_bits(servers.tensors, sent(model))

    model.extra = torch.arange(5.0)
    model.lm_head.to(torch.bfloat16)
    receipt = transport.start(3).wait()
    assert (receipt.kind, receipt.fallback) == ("full", None)
    assert same_bits(servers.tensors, sent(model))

    del model.extra
    transport.publish(4)
    assert "extra" not in servers.tensors


def test_a_folder_that_was_removed_is_made_again(tmp_path, servers):
    model = testing.tiny_model("llama")
    transport = weights.Disk(model, servers, folder=tmp_path / "weights", encoding="delta")
    servers.let_go.set()
    transport.publish(1)
    shutil.rmtree(tmp_path / "weights")
    train(model, seed=1)
    assert transport.publish(2).kind == "full"
    assert same_bits(servers.tensors, sent(model))


def test_a_full_disk_is_named_with_the_version_the_folder_and_the_bytes(
    tmp_path, servers, monkeypatch
):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    transport = weights.Disk(testing.tiny_model("llama"), servers, folder=tmp_path)
    monkeypatch.setattr(publisher, "write_tensors", full)
    expected = rf"version 7 could not be written into {tmp_path}, which needs up to 0.0 GB .* No sp"
    with pytest.raises(RuntimeError, match=expected):
        transport.publish(7)


def test_an_engine_here_that_fails_leaves_the_transport_usable_beside_servers(servers):
    model = testing.tiny_model("llama")

    class Engine:
        failing = True

        def update_weights(self, tensors, *, version, timeout_s=600.0):
            if self.failing:
                raise RuntimeError("this engine has no memory left")
            self.version = version

    engine = Engine()
    transport = weights.SharedMemory(model, engine, servers)
    servers.let_go.set()
    for begin in (transport.start, transport.publish):
        with pytest.raises(RuntimeError, match="this engine has no memory"):
            begin(1)
    engine.failing = False
    pending = transport.start(2)
    with pytest.raises(RuntimeError, match="version 2 is still being published"):
        transport.start(3)
    receipt = pending.wait()
    assert engine.version == receipt.version == 2
    assert same_bits(servers.tensors, sent(model))


UNFINISHED = """
import time
from primerl._common.threads import in_thread
in_thread(lambda: (time.sleep(0.5), print("sent")), finishing="the publication of version 7")
"""


def test_a_program_that_ends_without_wait_says_so_and_waits_a_little():
    ended = subprocess.run([sys.executable, "-c", UNFINISHED], capture_output=True, text=True)
    assert ended.returncode == 0
    assert ended.stdout == "sent\n"
    assert "the publication of version 7 is under way at the end of the program" in ended.stderr
    assert "is lost" not in ended.stderr


def test_work_that_does_not_end_is_said_to_be_lost(caplog):
    never = threading.Event()
    work = in_thread(lambda: never.wait(60.0), finishing="the publication of version 8")
    wait_for_work(0.01)
    assert "the publication of version 8 did not end within 0 s, and is lost" in caplog.text
    never.set()
    work.result(60.0)
    caplog.clear()
    wait_for_work(0.01)
    assert not caplog.text
