"""Optimizers with states in host memory, on a GPU and, with the same tests, on a pretended one."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from primerl import optim
from primerl.optim import offload, pinned_memory
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


@pytest.fixture
def copied(monkeypatch):
    """Return the list of states that are copied to the device."""
    states = []
    plain = offload._Copies.copied

    def noted(copies, value):
        states.append(value)
        return plain(copies, value)

    monkeypatch.setattr(offload._Copies, "copied", noted)
    return states


@pytest.mark.parametrize(("kind", "first", "all_states"), [("momentum", 1, 5), ("fused", 2, 10)])
def test_the_first_states_are_copied_before_the_step_and_only_once(
    gpu, copied, kind, first, all_states
):
    expected, found = parameters_on(gpu), parameters_on(gpu)
    train(gpu, INNER[kind](expected), expected, range(4))
    optimizer = optim.Offload(INNER[kind](found), part_elements=100)
    optimizer.prefetch()  # there are no states yet
    train(gpu, optimizer, found, [0])
    copied.clear()
    for step in range(1, 4):
        optimizer.prefetch()
        optimizer.prefetch()  # before another micro-batch
        assert len(copied) == first
        train(gpu, optimizer, found, [step])
        assert len(copied) == all_states
        copied.clear()

    assert equal(expected, found)


def test_states_that_were_copied_for_nothing_are_dropped(gpu, copied):
    """The first parameter gets no gradient."""
    expected, found = parameters_on(gpu), parameters_on(gpu)
    straight = INNER["fused"](expected)
    optimizer = optim.Offload(INNER["fused"](found), part_elements=100)
    train(gpu, straight, expected, [0])
    train(gpu, optimizer, found, [0])
    train(gpu, straight, expected, [1], without=[0])
    optimizer.prefetch()
    copied.clear()
    train(gpu, optimizer, found, [1], without=[0])

    assert len(copied) == 8
    assert not optimizer._ahead
    assert equal(expected, found)


@pytest.mark.parametrize("change", ["write", "load", "load in place"])
def test_states_that_change_after_they_were_copied_are_copied_again(gpu, change):
    expected, found = parameters_on(gpu), parameters_on(gpu)
    straight = INNER["fused"](expected)
    optimizer = optim.Offload(INNER["fused"](found), part_elements=100)
    train(gpu, straight, expected, [0])
    train(gpu, optimizer, found, [0])
    optimizer.prefetch()
    for one, parameters in ((straight, expected), (optimizer, found)):
        state = one.state_dict()
        if change == "load":
            state = copy.deepcopy(state)
        if change == "write":
            one.state[parameters[0]]["exp_avg"].zero_()
        else:
            state["state"][0]["exp_avg_sq"].mul_(2)
        if change != "write":
            one.load_state_dict(state)
        train(gpu, one, parameters, [1])

    assert equal(expected, found)


def test_pinned_memory_is_not_rounded_up_for_each_tensor(gpu, monkeypatch):
    monkeypatch.setattr(pinned_memory, "MOST_BYTES", 2**16)
    memory = pinned_memory.PinnedMemory()
    shaped = gpu.on_gpu(torch.zeros(64, 48).t())  # 12 KiB, of which torch would make 16
    memory.expect([shaped] * 80)
    tensors = [memory.like(shaped).fill_(n) for n in range(80)]
    larger = memory.like(shaped, dtype=torch.float64)

    assert all(bool((one == n).all()) for n, one in enumerate(tensors))
    assert {one.stride() for one in (*tensors, larger)} == {shaped.stride()}
    assert larger.dtype == torch.float64
    assert all(gpu.is_pinned(one) for one in tensors)
    assert sum(map(len, memory._blocks)) < 1.1 * 82 * 12 * 2**10
    assert [memory.like(gpu.on_gpu(torch.zeros(n))).shape for n in (0, 1)] == [(0,), (1,)]


class PageableMemory(pinned_memory.PinnedMemory):
    def _allocate(self, length):
        return torch.empty(length, dtype=torch.uint8)


def test_sharded_states_share_blocks_too():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = random(8, 12)
        sharded = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        memory = PageableMemory()

        state = memory.like(sharded.detach())
        state.copy_(sharded.detach())

        assert state.placements == sharded.placements
        assert torch.equal(state.full_tensor(), whole)
        (block,) = memory._blocks
        assert state.to_local().untyped_storage().data_ptr() == block.data_ptr()
        assert torch.equal(block[: whole.nbytes].view(torch.float32), whole.flatten())
    finally:
        dist.destroy_process_group()
