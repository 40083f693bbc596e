import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primerl import optim, testing
from primerl.optim.matrix_exchange import _batches, _chunks, _Matrix, _owners
from primerl.optim.newton_schulz import A, B, C, orthogonalize

MESHES = ["fsdp", "hsdp", "ep", "ep of all", "ep, hsdp", "few experts"]
FP32 = {"dtype": torch.float32}


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def parameter(value):
    return torch.nn.Parameter(value.clone())


def update(make, *values, steps=1, seed=0):
    """Parameters after some steps on random gradients."""
    parameters = [parameter(value) for value in values]
    optimizer = make(parameters)
    for step in range(steps):
        for n, one in enumerate(parameters):
            one.grad = random(*one.shape, seed=seed + 100 * step + n).to(one)
        optimizer.step()
    return [one.detach() for one in parameters]


# Orthogonal matrices.


def by_decomposition(matrix, steps):
    """The polynomial on the singular values, to which the iteration is equivalent."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / matrix.norm()
    for _ in range(steps):
        s = A * s + B * s**3 + C * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3), (1, 4)])
@pytest.mark.parametrize("steps", [1, 5])
def test_singular_values_go_through_the_polynomial(shape, steps):
    stack = random(4, *shape, dtype=torch.float64)

    found = orthogonalize(stack, steps=steps, dtype=torch.float64)

    for matrix, one in zip(stack, found, strict=True):
        torch.testing.assert_close(one, by_decomposition(matrix, steps), rtol=1e-9, atol=1e-9)


def test_a_well_conditioned_matrix_becomes_nearly_orthogonal():
    found = orthogonalize(random(1, 16, 64))[0].float()

    assert torch.linalg.svdvals(found).sub(1).abs().max() < 0.35


def test_zeros_stay_zeros_and_no_matrix_is_fine():
    assert not orthogonalize(torch.zeros(2, 3, 4)).any()
    assert orthogonalize(torch.zeros(0, 3, 4)).shape == (0, 3, 4)
    assert orthogonalize(torch.zeros(2, 0, 4)).shape == (2, 0, 4)


def test_matrices_of_a_stack_do_not_matter_to_each_other():
    stack = random(6, 12, 20)
    alone = torch.cat([orthogonalize(one[None], dtype=torch.float32) for one in stack])

    assert torch.equal(orthogonalize(stack, dtype=torch.float32), alone)


# Muon in one process.


def test_one_step_by_hand():
    """m = 0.5 and G: B = 0.5 G, and the next step's momentum is 0.75 G, of G's direction."""
    weight, gradient = random(3, 8, seed=1), random(3, 8)
    expected = by_decomposition(gradient.double(), 5).float()

    def make(parameters):
        return optim.Muon(parameters, lr=0.1, momentum=0.5, weight_decay=0.2, **FP32)

    (found,) = update(make, weight)

    scale = 0.2 * math.sqrt(8)
    torch.testing.assert_close(
        found, weight - 0.1 * (0.2 * weight + scale * expected), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_as_torch_does(adjust, nesterov):
    weights = [random(24, 40), random(40, 24, seed=1), random(16, 16, seed=2)]
    shared = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}

    ours = update(lambda p: optim.Muon(p, adjust_lr=adjust, **shared), *weights, steps=3)
    theirs = update(lambda p: torch.optim.Muon(p, adjust_lr_fn=adjust, **shared), *weights, steps=3)

    for a, b, before in zip(ours, theirs, weights, strict=True):
        moved = (b - before).norm()
        assert (a - b).norm() < 0.02 * moved  # both in bfloat16
        assert moved > 0.1


def test_a_stack_is_updated_matrix_by_matrix():
    stack = random(3, 6, 10)
    make = lambda p: optim.Muon(p, lr=0.1, **FP32)  # noqa: E731

    parameters = [parameter(stack), *(parameter(one) for one in stack)]
    gradient = random(3, 6, 10, seed=5)
    for one, of_one in zip(parameters, [gradient, *gradient], strict=True):
        one.grad = of_one.clone()
    make(parameters).step()

    assert torch.equal(parameters[0], torch.stack(parameters[1:]))


SPLITS = [(6,), (3, 3), (1, 1), (2, 3, 1), (1, 2), (1,) * 6]


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("experts", [None, 3])
def test_split_matrices_are_updated_as_matrices_of_their_own(split, transposed, adjust, experts):
    """Against a parameter for each, whose rows are picked by hand."""
    whole, gradient = random(experts or 1, 6, 4), random(experts or 1, 6, 4, seed=1)
    part_of_row = [part for part, size in enumerate(split) for _ in range(size)] * 6
    rows = [[r for r in range(6) if part_of_row[r] == part] for part in range(len(split))]
    apart = {}
    for expert in range(experts or 1):
        for part, chosen in enumerate(rows):
            one = apart[expert, part] = parameter(whole[expert, chosen])
            one.grad = gradient[expert, chosen].clone()
    lie = (
        (lambda x: x.mT if transposed else x)
        if experts
        else (lambda x: x[0].T if transposed else x[0])
    )
    together = parameter(lie(whole).contiguous())
    together.grad = lie(gradient).contiguous()

    group = {"params": [together], "split": split, "transposed": transposed}
    optim.Muon([group], lr=0.1, adjust_lr=adjust, **FP32).step()
    optim.Muon(list(apart.values()), lr=0.1, adjust_lr=adjust, **FP32).step()

    expected = torch.empty_like(whole)
    for (expert, part), one in apart.items():
        expected[expert, rows[part]] = one.detach()
    torch.testing.assert_close(together.detach(), lie(expected), rtol=1e-5, atol=1e-6)


def test_what_is_no_matrix_is_updated_by_adamw():
    weights = [random(7), random(5, 3), random(2, 2, 2)]
    shared = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}

    ours = update(
        lambda p: optim.Muon([{"params": p, "algorithm": "adamw"}], **shared), *weights, steps=4
    )
    theirs = update(lambda p: torch.optim.AdamW(p, **shared), *weights, steps=4)

    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_parameters_without_gradients_are_left_alone_and_closures_are_called():
    still, moves = parameter(random(3, 3)), parameter(random(3, 3))
    moves.grad = random(3, 3)
    before = still.detach().clone()
    optimizer = optim.Muon([still, moves], lr=0.1)

    assert optimizer.step(lambda: 7) == 7
    assert torch.equal(still, before)
    assert list(optimizer.state) == [moves]


def test_a_learning_rate_of_0_only_gathers_momentum():
    weight = random(4, 4)
    one = parameter(weight)
    one.grad = torch.ones(4, 4)
    optimizer = optim.Muon([one], lr=0.0, momentum=0.75)

    optimizer.step()

    assert torch.equal(one, weight)
    assert torch.equal(optimizer.state[one]["momentum_buffer"], torch.full((4, 4), 0.25))


@pytest.mark.parametrize(
    ("params", "how", "message"),
    [
        ([random(3)], {}, r"shape \(3,\) is not a matrix"),
        ([random(3, 3)], {"lr": -1.0}, "lr is -1.0"),
        ([random(3, 3)], {"momentum": 1.0}, "momentum is 1.0"),
        ([random(3, 3)], {"steps": 0}, "steps is 0"),
        ([random(3, 3)], {"adjust_lr": "best"}, "adjust_lr is 'best'"),
        ([{"params": [random(3, 3)], "algorithm": "sgd"}], {}, "algorithm 'sgd'"),
        ([{"params": [random(3, 3)], "split": (2,)}], {}, r"\(2,\) does not fit .* 3 outputs"),
        ([{"params": [random(3, 3)], "split": (3, 0)}], {}, r"expected sizes above 0"),
        ([{"params": [random(4, 3)], "split": (2, 2), "transposed": True}], {}, "3 outputs"),
    ],
)
def test_errors_of_muon(params, how, message):
    with pytest.raises(ValueError, match=message):
        optim.Muon(params, **{"lr": 0.1, **how})


# Which parameters are matrices.


def test_training_with_it_lowers_a_loss():
    model = testing.tiny_model("qwen3_moe")
    ids = torch.randint(2, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    optimizer = optim.Muon(optim.muon_parameters(model), lr=0.01)
    losses = []
    for _ in range(12):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert losses[-1] < losses[0] - 1


# Over ranks.


@given(st.integers(0, 40), st.integers(1, 9))
def test_parts_are_those_of_chunk(length, ranks):
    chunks = [len(part) for part in torch.arange(length).chunk(ranks)] if length else []

    assert list(_chunks(length, ranks)) == chunks + [0] * (ranks - len(chunks))


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 6))
def test_ranks_get_about_equal_work(costs, ranks):
    costs = sorted(costs, reverse=True)
    owners = _owners(costs, ranks)
    loads = [
        sum(cost for cost, o in zip(costs, owners, strict=True) if o == rank)
        for rank in range(ranks)
    ]

    # Graham's bound for the longest first: 4/3 of what is possible.
    least = max([sum(costs) / ranks, *costs[:1], sum(costs[ranks - 1 : ranks + 1]) * 1.0])
    assert len(owners) == len(costs)
    assert max(loads) <= 4 / 3 * least + 1e-9


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1), st.integers(1, 99))
def test_batches_hold_every_matrix_once_and_not_too_much(shapes, elements):
    matrices = [_Matrix(n, 0, shape) for n, shape in enumerate(shapes)]
    batches = list(_batches(matrices, elements))

    assert sorted(one.tensor for batch in batches for one in batch) == list(range(len(shapes)))
    for batch in batches:
        assert len(batch) == 1 or sum(a * b for a, b in (m.shape for m in batch)) <= elements


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_update_bitwise_as_one_process_does(optimized, mesh):
    """Also where a rank has no row of a matrix, and where experts' matrices are sharded."""
    for found in optimized:
        assert found["muon"][mesh] == 0.0
        assert found["muon in bfloat16"][mesh] < 2e-3


@pytest.mark.thorough
def test_ranks_update_split_matrices_bitwise_as_one_process_does(optimized):
    for found in optimized:
        assert found["split"] == dict.fromkeys(found["split"], 0.0)
        assert len(found["split"]) == 5


@pytest.mark.thorough
def test_states_are_saved_from_four_shards_and_loaded_into_two(optimized):
    """By torch.distributed.checkpoint; the next step is then that of one process."""
    for found in optimized:
        assert found["resumed"] == {"difference": 0.0, "lr": [0.02] * 3, "shards": 2}


# Host memory.


def muon(parameters):
    matrices = [one for one in parameters if one.ndim > 1]
    vectors = [one for one in parameters if one.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "algorithm": "adamw"}]
    return optim.Muon(groups, lr=0.1)


INNER = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "muon": muon,
}
WEIGHTS = [random(4, 6), random(6, seed=1), random(2, 4, 6, seed=2), random(1, seed=3)]


@pytest.mark.parametrize("kind", INNER)
@pytest.mark.parametrize("elements", [1, 30, 10**6])
def test_an_offloaded_optimizer_updates_bitwise_as_before(kind, elements):
    def offloaded(parameters):
        return optim.Offload(INNER[kind](parameters), part_elements=elements)

    expected = update(INNER[kind], *WEIGHTS, steps=3)
    found = update(offloaded, *WEIGHTS, steps=3)

    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def trained_offload():
    parameters = [parameter(weight) for weight in WEIGHTS]
    optimizer = optim.Offload(INNER["adamw"](parameters), part_elements=30)
    for one in parameters:
        one.grad = random(*one.shape)
    optimizer.step()
    return parameters, optimizer


def test_states_keep_their_host_memory_and_gradients_are_kept():
    parameters, optimizer = trained_offload()
    places = [optimizer.state[one]["exp_avg"].data_ptr() for one in parameters]

    optimizer.step()

    assert places == [optimizer.state[one]["exp_avg"].data_ptr() for one in parameters]
    assert all(torch.equal(one.grad, random(*one.shape)) for one in parameters)
    optimizer.zero_grad()
    assert not any(one.grad is not None for one in parameters)


def test_a_schedule_reaches_the_optimizer_within():
    parameters, optimizer = trained_offload()
    before = [one.detach().clone() for one in parameters]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)

    optimizer.step()

    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def test_offloaded_states_are_loaded_into_host_memory():
    parameters, optimizer = trained_offload()
    others, again = trained_offload()
    optimizer.step()
    for one, other in zip(parameters, others, strict=True):
        other.data.copy_(one)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (optimizer, again):
        one.step()

    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
    assert again.state[others[0]] is not optimizer.state[parameters[0]]
    assert again.param_groups[0]["params"][0] is others[0]


def test_parameters_that_are_added_later_are_updated():
    _, optimizer = trained_offload()
    late = parameter(torch.ones(2))
    late.grad = torch.ones(2)
    optimizer.add_param_group({"params": [late], "lr": 0.5})

    optimizer.step()

    assert late.tolist() == pytest.approx([0.495, 0.495])  # and 1 % of weight decay
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert len(optimizer.state_dict()["state"]) == len(WEIGHTS) + 1


def test_a_failing_step_leaves_the_gradients():
    parameters, optimizer = trained_offload()
    optimizer.param_groups[0]["lr"] = "high"
    with pytest.raises(TypeError):
        optimizer.step()

    assert all(one.grad is not None for one in parameters)


def test_no_part_is_refused():
    with pytest.raises(ValueError, match="part_elements is 0"):
        optim.Offload(INNER["sgd"]([parameter(random(2))]), part_elements=0)


def test_adamw_on_the_cpu_is_bitwise_torchs():
    shared = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    ours = update(lambda p: optim.CPUAdamW(p, **shared), *WEIGHTS, steps=4)
    theirs = update(lambda p: torch.optim.AdamW(p, fused=True, **shared), *WEIGHTS, steps=4)

    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_updates_too_small_for_bfloat16_add_up():
    one = parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = optim.CPUAdamW([one], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        one.grad = torch.ones_like(one)
        optimizer.step()

    assert one.tolist() == pytest.approx([0.99] * 8, abs=2e-3)  # bfloat16 steps by 0.004 there
    assert optimizer.state[one]["weight"].tolist() == pytest.approx([0.99] * 8, abs=1e-5)


WRITES = {
    "copied": lambda p: p.data.copy_(random(*p.shape, seed=9)),
    "assigned": lambda p: setattr(p, "data", random(*p.shape, seed=9).to(p.dtype)),
    "one element": lambda p: p.data.view(-1)[:1].fill_(0.5),
    "clamped": lambda p: p.data.clamp_(-0.5, 0.5),
    "averaged": lambda p: p.data.lerp_(torch.ones_like(p), 0.25),
    "not a number": lambda p: p.data.view(-1)[-1:].fill_(float("nan")),
    "nothing": lambda p: None,
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.CPUAdamW(p, lr=0.01),
        lambda p: optim.Offload(torch.optim.AdamW(p, lr=0.01, fused=True)),
        lambda p: optim.Muon([{"params": p, "algorithm": "adamw"}], lr=0.01, weight_decay=0.01),
    ],
)
def test_a_step_starts_from_what_was_written_into_a_parameter(make, dtype, write):
    """Against float32 AdamW into whose parameters the same elements are written."""
    one, reference = parameter(random(4, 6).to(dtype)), parameter(random(4, 6).to(dtype).float())
    optimizers = make([one]), torch.optim.AdamW([reference], lr=0.01, fused=True)
    for step in range(3):
        if step:
            before = one.detach().clone()
            WRITES[write](one)
            changed = one != before  # NaN is
            reference.data = torch.where(changed, one.detach().float(), reference.detach())
        one.grad = random(4, 6, seed=step).to(dtype)
        reference.grad = one.grad.float()
        for optimizer in optimizers:
            optimizer.step()

    found, expected = one.detach().float(), reference.detach()
    close = 1e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found, expected, rtol=close, atol=close, equal_nan=True)
    if isinstance(optimizers[0], optim.CPUAdamW):  # bitwise, also below the precision of bfloat16
        weight = optimizers[0].state[one]["weight"]
        torch.testing.assert_close(weight, expected, rtol=0, atol=0, equal_nan=True)


def test_its_states_stay_float32_when_they_are_loaded():
    def trained():
        one = parameter(random(8).bfloat16())
        optimizer = optim.CPUAdamW([one], lr=1e-3)
        for step in range(3):
            one.grad = random(8, seed=step).bfloat16()
            optimizer.step()
        return one, optimizer

    (_, optimizer), other = trained(), parameter(torch.zeros(8, dtype=torch.bfloat16))
    again = optim.CPUAdamW([other], lr=1.0)
    again.load_state_dict(optimizer.state_dict())

    (state,) = optimizer.state.values()
    assert again.param_groups[0]["lr"] == 1e-3
    assert again.state[other].keys() == state.keys()
    for name, value in state.items():
        assert again.state[other][name].dtype == torch.float32
        assert torch.equal(again.state[other][name], value)
        assert again.state[other][name] is not value


@pytest.mark.parametrize("how", [{"lr": -1.0}, {"weight_decay": -0.1}, {"betas": (0.9, 1.0)}])
def test_errors_of_cpu_adamw(how):
    with pytest.raises(ValueError, match="expected"):
        optim.CPUAdamW([parameter(random(2))], **{"lr": 0.1, **how})


@pytest.mark.thorough
def test_sharded_states_are_offloaded_too(optimized):
    assert all(found["offloaded"] == 0.0 for found in optimized)
