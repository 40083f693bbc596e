"""Publications that the worker is told about once a canary has passed, or failed."""

import re

import pytest
import torch
from copy_engine import CopyEngine
from random_steps import trained

from primerl import testing, weights

SIZES = {"count": 2, "length": 40, "new_tokens": 4}


class Settled:
    """Stands for the worker: what it was told, in order."""

    def __init__(self):
        self.told = []

    def mark_version(self, version, *, verified):
        self.told.append((version, verified))


def proven(model, engine, *, wiring=False, **settings):
    worker = Settled()
    canary = weights.Canary(model, engine, **SIZES)
    transport = weights.SharedMemory(model, engine)
    return worker, weights.Proven(transport, canary, worker=worker, wiring=wiring, **settings)


def test_a_version_that_passes_is_settled_once():
    model = testing.tiny_model("llama")
    engine = CopyEngine(model)
    worker, transport = proven(model, engine)

    for version in range(3):
        receipt = transport.publish(version)
        assert receipt.version == version
        trained(model, seed=version, lr=1e-3)

    assert worker.told == [(0, True), (1, True), (2, True)]
    assert engine.updates == [0, 1, 2]


def test_a_version_that_fails_is_rejected_first_and_repaired_under_its_number():
    model = testing.tiny_model("llama")
    engine = CopyEngine(model)
    worker, transport = proven(model, engine)
    transport.publish(0)
    trained(model, seed=1, lr=1e-2)
    lost = []
    engine.skip = lambda name: len(engine.updates) == 2 and not lost.append(name)

    transport.publish(1)

    assert lost  # the fault happened
    assert engine.updates == [0, 1, 1]
    assert worker.told == [(0, True), (1, False), (1, True)]


def test_a_version_that_no_repair_helps_raises():
    model = testing.tiny_model("llama")
    engine = CopyEngine(model)
    worker, transport = proven(model, engine, repairs=2)
    transport.publish(0)
    trained(model, seed=1, lr=1e-2)
    engine.skip = lambda name: True

    with pytest.raises(RuntimeError, match="do not serve what was published: version 1 failed"):
        transport.publish(1)

    assert engine.updates == [0, 1, 1, 1]
    assert worker.told == [(0, True), (1, False), (1, False), (1, False)]


def test_the_first_publication_tests_the_wiring_and_rejects_what_was_sampled_meanwhile():
    model = testing.tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = CopyEngine(model)
    worker, transport = proven(model, engine, wiring=True)

    transport.publish(4)
    publications = len(engine.updates)
    transport.publish(5)

    assert worker.told == [(4, False), (4, True), (5, True)]
    groups = len({re.sub(r"\d+", "*", name) for name, _ in model.named_parameters()})
    assert publications == groups + 2  # to calibrate the canary, and what counts
    assert len(engine.updates) == publications + 1
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


def test_weights_that_do_not_reach_the_engine_end_the_run_at_its_start():
    model = testing.tiny_model("llama")
    engine = CopyEngine(model, skip=lambda name: "q_proj" in name)
    worker, transport = proven(model, engine, wiring=True)

    with pytest.raises(RuntimeError, match="q_proj"):
        transport.publish(0)
    assert (0, True) not in worker.told


class Bf16Engine(CopyEngine):
    """Says what it computes in, as clients of servers do."""

    dtype = "bfloat16"


def test_the_usual_transport_proves_what_can_be_probed():
    model = testing.tiny_model("llama")
    worker = Settled()
    engine = Bf16Engine(model, dtype=torch.bfloat16)

    transport = weights.transport_to(model, engine, worker=worker, wiring=False)
    transport.publish(0)

    assert isinstance(transport, weights.Proven)
    assert transport.canary.dtype == torch.bfloat16  # in float32, its noise would be refused
    assert worker.told == [(0, True)]


def test_the_usual_transport_of_an_engine_in_this_process_is_its_memory():
    class Plain:
        def update_weights(self, tensors, *, version, timeout_s=1.0):
            self.version = version

    engine = Plain()
    transport = weights.transport_to(testing.tiny_model("llama"), engine)
    transport.publish(3)

    assert isinstance(transport, weights.SharedMemory)
    assert engine.version == 3
