"""Optimizers with states in host memory, on a GPU and, with the same tests, on a pretended one."""

import copy

import pytest
import torch

from primerl import optim
from tests.helpers.pretended_gpu import PretendedGPU

WEIGHTS = [(8, 12), (12,), (2, 4, 6), (1,), (16, 4)]


class RealGPU:
    def on_gpu(self, x):
        return x.cuda()

    def is_pinned(self, x):
        return x.is_pinned()


@pytest.fixture(params=["pretended", pytest.param("real", marks=pytest.mark.gpu)])
def gpu(request, monkeypatch):
    if request.param == "real":
        yield RealGPU()
        return
    pretended = PretendedGPU()
    pretended.replace_streams(monkeypatch)
    with pretended:
        yield pretended


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameters_on(gpu):
    return [
        torch.nn.Parameter(gpu.on_gpu(random(*shape, seed=n))) for n, shape in enumerate(WEIGHTS)
    ]


def train(gpu, optimizer, parameters, steps, *, without=()):
    for step in steps:
        for n, one in enumerate(parameters):
            gradient = gpu.on_gpu(random(*one.shape, seed=100 * step + n))
            one.grad = None if n in without else gradient
        optimizer.step()


def equal(some, others):
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(some, others, strict=True))


def muon(parameters):
    matrices = [one for one in parameters if one.ndim > 1]
    vectors = [one for one in parameters if one.ndim == 1]
    return optim.Muon(
        [{"params": matrices}, {"params": vectors, "algorithm": "adamw"}],
        lr=0.1,
    )


INNER = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "muon": muon,
}


@pytest.mark.parametrize(
    ("kind", "elements"), [(kind, 100) for kind in INNER] + [("fused", 1), ("fused", 10**6)]
)
def test_offloaded_states_update_bitwise_as_states_on_the_gpu(gpu, kind, elements):
    expected, found = parameters_on(gpu), parameters_on(gpu)
    train(gpu, INNER[kind](expected), expected, range(4))
    optimizer = optim.Offload(INNER[kind](found), part_elements=elements)
    train(gpu, optimizer, found, range(4))

    assert equal(expected, found)
    states = [s for of in optimizer.state.values() for s in of.values() if s.ndim]
    assert len(states) == {"sgd": 0, "momentum": 5}.get(kind, 7 if kind == "muon" else 10)
    assert all(state.device.type == "cpu" and gpu.is_pinned(state) for state in states)
    assert all(one.is_cuda and one.grad.is_cuda for one in found)


@pytest.mark.parametrize("kind", ["momentum", "fused", "muon"])
def test_a_resumed_run_with_a_schedule_and_frozen_parameters_updates_bitwise_as_before(gpu, kind):
    """Two steps, a checkpoint, two more; the second parameter gets its first gradient then."""

    def schedule(optimizer, last=-1):
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", 0.1)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step, last)

    expected, found = parameters_on(gpu), parameters_on(gpu)
    straight, first = INNER[kind](expected), optim.Offload(INNER[kind](found), part_elements=100)
    for optimizer, parameters in ((straight, expected), (first, found)):
        rates = schedule(optimizer)
        for step in range(2):
            train(gpu, optimizer, parameters, [step], without=[1])
            rates.step()
    rates = schedule(straight, 1)
    for step in range(2, 4):
        train(gpu, straight, expected, [step])
        rates.step()

    resumed = optim.Offload(INNER[kind](found), part_elements=30)
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    assert found[1] not in resumed.state
    rates = schedule(resumed, 1)
    for step in range(2, 4):
        train(gpu, resumed, found, [step])
        rates.step()

    assert equal(expected, found)
    states = [s for of in resumed.state.values() for s in of.values() if s.ndim]
    assert all(state.device.type == "cpu" and gpu.is_pinned(state) for state in states)


def test_adamw_on_the_cpu_updates_parameters_on_a_gpu(gpu):
    """With parameters that get no gradient, and a checkpoint after two steps."""
    on_cpu = [torch.nn.Parameter(random(*shape, seed=n)) for n, shape in enumerate(WEIGHTS)]
    found = parameters_on(gpu)
    expected = torch.optim.AdamW(on_cpu, lr=0.1, fused=True)
    for step in range(4):
        for n, one in enumerate(on_cpu):
            one.grad = None if n == 2 else random(*one.shape, seed=100 * step + n)
        expected.step()

    first = optim.CPUAdamW(found, lr=0.1)
    train(gpu, first, found, range(2), without=[2])
    resumed = optim.CPUAdamW(found, lr=1.0)
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    train(gpu, resumed, found, range(2, 4), without=[2])

    assert equal(on_cpu, found)
    states = [s for of in resumed.state.values() for s in of.values() if s.ndim]
    assert len(states) == 12
    assert all(state.device.type == "cpu" and gpu.is_pinned(state) for state in states)
