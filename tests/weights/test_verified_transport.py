"""Publications that a canary checks, and what the worker is told."""

import re
import threading

import pytest
import torch
from copy_engine import CopyEngine
from random_steps import trained

from primerl import optim, testing, weights
from primerl.weights.verification.fingerprints import changed_since, fingerprint, fingerprints

SIZES = {"count": 2, "length": 40, "new_tokens": 4}


class Worker:
    """Records what it was told, in order."""

    def __init__(self):
        self.told = []

    def mark_version(self, version, *, verified):
        self.told.append((version, verified))


def verified(model, engine, **settings):
    worker = Worker()
    canary = weights.Canary(model, engine, **SIZES)
    transport = weights.SharedMemory(model, engine)
    return worker, weights.VerifiedTransport(transport, canary, worker=worker, **settings)


def test_a_version_that_passes_is_reported_once():
    model = testing.tiny_model("llama")
    engine = CopyEngine(model)
    worker, transport = verified(model, engine)

    for version in range(3):
        receipt = transport.publish(version)
        assert receipt.version == version
        assert receipt.metrics.keys() == {
            "publish_s",
            "publish_bytes",
            "mismatch_kl",
            "canary_difference",
        }
        assert receipt.metrics["publish_s"] > receipt.seconds["verify"] > 0
        assert 0 <= receipt.metrics["mismatch_kl"] < 1e-9
        assert all(type(value) is float for value in receipt.metrics.values())
        trained(model, seed=version, lr=1e-3)

    assert worker.told == [(0, True), (1, True), (2, True)]
    assert engine.updates == [0, 1, 2]


def test_a_version_that_fails_is_published_again_under_its_number():
    model = testing.tiny_model("llama")
    engine = CopyEngine(model)
    worker, transport = verified(model, engine)
    transport.publish(0)
    trained(model, seed=1, lr=1e-2)
    lost = []
    engine.skip = lambda name: len(engine.updates) == 2 and not lost.append(name)

    transport.publish(1)

    assert lost  # the fault happened
    assert engine.updates == [0, 1, 1]
    assert worker.told == [(0, True), (1, False), (1, True)]


def test_a_version_that_fails_each_retry_raises():
    model = testing.tiny_model("llama")
    engine = CopyEngine(model)
    worker, transport = verified(model, engine, retries=2)
    transport.publish(0)
    trained(model, seed=1, lr=1e-2)
    engine.skip = lambda name: True

    with pytest.raises(RuntimeError, match="do not serve the published weights: version 1 failed"):
        transport.publish(1)

    assert engine.updates == [0, 1, 1, 1]
    assert worker.told == [(0, True), (1, False), (1, False), (1, False)]


def test_the_wiring_is_tested_once_on_request_and_what_was_sampled_meanwhile_is_dropped():
    model = testing.tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = CopyEngine(model)
    worker, transport = verified(model, engine, wiring_test=True)

    transport.publish(4)
    publications = len(engine.updates)
    transport.publish(5)

    assert worker.told == [(4, False), (4, True), (5, True)]
    groups = len({re.sub(r"\d+", "*", name) for name, _ in model.named_parameters()})
    assert publications == groups + 2  # to calibrate the canary, and what counts
    assert len(engine.updates) == publications + 1
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


def test_the_wiring_test_refuses_a_tensor_that_never_arrives():
    model = testing.tiny_model("llama")
    engine = CopyEngine(model, skip=lambda name: "q_proj" in name)
    worker, transport = verified(model, engine, wiring_test=True)

    with pytest.raises(RuntimeError, match="q_proj"):
        transport.publish(0)
    assert (0, True) not in worker.told


class Bf16Engine(CopyEngine):
    """Says what it computes in, as clients of servers do."""

    dtype = "bfloat16"


@pytest.mark.parametrize("settings", [{}, {"wiring_test": True}])
def test_the_usual_transport_verifies_engines_that_can_be_probed(settings):
    model = testing.tiny_model("llama")
    worker = Worker()
    engine = Bf16Engine(model, dtype=torch.bfloat16)

    transport = weights.transport_to(model, engine, worker=worker, **settings)
    transport.publish(0)

    assert isinstance(transport, weights.VerifiedTransport)
    assert transport.canary.dtype == torch.bfloat16  # in float32, its noise would be refused
    if settings:
        assert worker.told == [(0, False), (0, True)]
        assert len(engine.updates) > 10  # one for each group of tensors
    else:
        assert worker.told == [(0, True)]
        assert engine.updates == [0]


def test_servers_that_can_not_be_sent_weights_are_refused_before_anything_is_published():
    class MovesExperts(Bf16Engine):
        def check_reloads(self):
            raise RuntimeError("start it without enable_eplb")

    model = testing.tiny_model("llama")
    engine = MovesExperts(model)
    with pytest.raises(RuntimeError, match="start it without enable_eplb"):
        weights.transport_to(model, engine)
    assert engine.updates == []


def test_the_usual_transport_of_an_engine_in_this_process_is_its_memory():
    class Plain:
        def update_weights(self, tensors, *, version, timeout_s=1.0):
            self.version = version

    engine = Plain()
    transport = weights.transport_to(testing.tiny_model("llama"), engine)
    receipt = transport.publish(3)

    assert isinstance(transport, weights.SharedMemory)
    assert engine.version == 3
    assert receipt.metrics.keys() == {"publish_s", "publish_bytes"}
    assert receipt.metrics["publish_bytes"] == 0


def test_a_version_is_verified_by_wait():
    model = testing.tiny_model("llama")
    engine = CopyEngine(model)
    worker, transport = verified(model, engine)

    for version in range(3):
        pending = transport.start(version)
        assert worker.told == [(one, True) for one in range(version)]
        receipt = pending.wait()
        assert pending.wait() is receipt
        assert receipt.seconds["verify"] > 0
        assert receipt.metrics["publish_wait_s"] > 0
        trained(model, seed=version, lr=1e-3)

    assert worker.told == [(0, True), (1, True), (2, True)]
    assert engine.updates == [0, 1, 2]


def test_engines_are_asked_before_wait():
    model = testing.tiny_model("llama")
    engine = CopyEngine(model)
    asked, probe = threading.Event(), engine.probe

    def recorded(*arguments, **settings):
        answer = probe(*arguments, **settings)
        asked.set()
        return answer

    engine.probe = recorded
    _, transport = verified(model, engine)
    pending = transport.start(0)
    assert asked.wait(60)
    asked.clear()
    assert pending.wait().canary["canary_difference"] < 1e-4
    assert not asked.is_set()  # once is enough


def test_an_engine_that_does_not_answer_fails_in_wait():
    model = testing.tiny_model("llama")
    engine = CopyEngine(model)
    worker, transport = verified(model, engine)

    def fail(*_, **__):
        raise RuntimeError("no server answers")

    probe, engine.probe = engine.probe, fail
    pending = transport.start(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no server answers"):
            pending.wait()
    assert pending.ended
    engine.probe = probe
    transport.start(2).wait()
    assert worker.told == [(1, False), (2, True)]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True),
        lambda model: optim.Muon(optim.muon_parameters(model), lr=1e-4),
    ],
    ids=["fused", "foreach", "muon"],
)
def test_weights_that_change_before_wait_are_not_compared(optimizer):
    model = testing.tiny_model("llama")
    worker, transport = verified(model, CopyEngine(model))
    transport.publish(0)
    pending = transport.start(1)
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    optimizer(model).step()

    with pytest.raises(RuntimeError, match=r"changed after start\(1\).* before the optimizer's"):
        pending.wait()
    assert worker.told == [(0, True), (1, False)]


@pytest.mark.parametrize("change", ["one value", "swapped rows", "a sign of zero", "a new tensor"])
def test_any_change_of_the_weights_before_wait_is_named(change):
    model = testing.tiny_model("llama")
    norm, table = model.model.norm.weight.data, model.model.embed_tokens.weight.data
    table[0, 0] = 0.0
    worker, transport = verified(model, CopyEngine(model))
    pending = transport.start(1)
    name = "model.norm.weight" if change == "one value" else "model.embed_tokens.weight"
    if change == "one value":
        norm[7] += 1e-7
    elif change == "swapped rows":
        table[[3, 4]] = table[[4, 3]]
    elif change == "a sign of zero":
        table[0, 0] = -0.0
    else:
        name = "extra"
        model.register_buffer("extra", torch.zeros(2))

    with pytest.raises(RuntimeError, match=rf"compared with them: {name} on rank 0; call wait\(\)"):
        pending.wait()
    assert worker.told == [(1, False)]


def test_weights_that_are_not_numbers_have_not_changed():
    model = testing.tiny_model("llama")
    before = fingerprints(model)
    model.model.norm.weight.data[0] = float("nan")
    assert changed_since(before, model) == ["model.norm.weight"]
    assert changed_since(fingerprints(model), model) == []


def test_fingerprints_see_a_change_of_any_byte_of_any_dtype():
    kinds = [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex64]
    for dtype in kinds:
        for size in (0, 1, 2, 7, 9, 64, 101):
            tensor = torch.zeros(size + 1, dtype=dtype)[1:]  # at an odd offset in memory
            before = fingerprint(tensor)
            for place in range(size):
                changed = tensor.clone()
                changed[place] = 1
                assert not torch.equal(fingerprint(changed), before)
    numbers = torch.arange(16)
    for exchanged in ([1, 0, *range(2, 16)], [4, 1, 2, 3, 0, *range(5, 16)]):  # in a row, a column
        assert not torch.equal(fingerprint(numbers[exchanged]), fingerprint(numbers))
    flipped = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert torch.equal(fingerprint(flipped), fingerprint(flipped.resolve_conj()))


def test_a_version_whose_publication_fails_is_rejected():
    model = testing.tiny_model("llama")
    engine = CopyEngine(model)
    worker, transport = verified(model, engine)

    def fail(*_, **__):
        raise RuntimeError("no memory left")

    update, engine.update_weights = engine.update_weights, fail
    for publish in (transport.publish, lambda version: transport.start(version).wait()):
        with pytest.raises(RuntimeError, match="no memory left"):
            publish(1)
    engine.update_weights = update
    transport.publish(2)
    assert worker.told == [(1, False), (2, True)]


def test_one_version_is_verified_at_a_time():
    model = testing.tiny_model("llama")
    worker, transport = verified(model, CopyEngine(model))
    pending = transport.start(1)
    for begin in (transport.start, transport.publish):
        with pytest.raises(RuntimeError, match="version 1 is still being published: call wait"):
            begin(2)
    pending.wait()
    transport.start(2).wait()
    assert worker.told == [(1, True), (2, True)]


def test_a_version_that_fails_beside_training_is_published_again():
    model = testing.tiny_model("llama")
    engine = CopyEngine(model)
    worker, transport = verified(model, engine)
    transport.publish(0)
    trained(model, seed=1, lr=1e-2)
    lost = []
    engine.skip = lambda name: len(engine.updates) == 2 and not lost.append(name)

    with transport:
        pending = transport.start(1)
        assert worker.told == [(0, True)]

    assert lost  # the fault happened
    assert pending.ended
    assert engine.updates == [0, 1, 1]
    assert worker.told == [(0, True), (1, False), (1, True)]
