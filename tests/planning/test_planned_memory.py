"""A plan's bytes are those of a real step on two gloo ranks, wired by the same function."""

import functools
import json

import pytest
import torch
from forked_ranks import forked_ranks
from wirings import FAMILIES, LAYOUTS, LONG, OPTIMIZERS, TOKENS, make, make_long, prepare

from primerl import parallel, planning

CASES = [f"{family}, {layout}" for family in FAMILIES for layout in LAYOUTS]


@pytest.fixture(scope="module")
def real(root, tmp_path_factory):
    """What each of two ranks held, in one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    done = forked_ranks(root / "tests/ranks/planned_memory.py", folder, ranks=2, cwd=folder)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]


@functools.cache
def planned(case, tokens=TOKENS, **wiring):
    family, layout = case.split(", ")
    (plan,) = planning.plan_trainers(
        lambda: make(family).to("meta"),
        functools.partial(prepare, **wiring),
        [LAYOUTS[layout]],
        tokens=tokens,
        dtype=make(family).dtype,
        gpu_bytes=10**9,
        ranks=(0, 1),
    )
    assert plan.refusal is None
    return plan.ranks


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_gradients_and_states_are_those_of_a_real_step(real, case, optimizer):
    for rank, one in enumerate(planned(case, tokens=0, optimizer=optimizer)):
        held = real[rank][case][optimizer]
        assert one.parameters == held["parameters"]
        assert one.gradients == held["gradients"]
        assert one.optimizer + one.host == held["states"]
        on_host = optimizer in ("CPUAdamW", "Offload")
        assert (one.host > one.optimizer) == on_host


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_kept_activations_are_those_of_a_real_step(real, case):
    one, _ = planned(case)
    # With cp=2, the layout of the document differs by two rows. Sparse attention caches the rows of
    # documents: they were there before the pass that is measured.
    tolerance = 128 * case.endswith("cp") + 768 * ("dsa" in case)
    for found in real:
        assert one.activations == pytest.approx(found[case]["kept"], rel=0, abs=tolerance)


@pytest.mark.thorough
@pytest.mark.parametrize("case", [f"{family}, ep" for family in FAMILIES])
def test_without_recomputation_about_as_much_over_all_ranks(real, case):
    """Measured 1 % above and 3 % below: experts' products are imagined expert by expert in
    float32, and sparse attention with short documents. Experts get other numbers of tokens than
    planned, but all tokens go to some.
    """
    one, _ = planned(case, recompute=False)
    whole = sum(found[case]["kept whole"] for found in real)
    assert 2 * one.activations == pytest.approx(whole, rel=0.05)


@pytest.fixture(scope="module")
def long_plans():
    """Plans of a document of 8 times the keys that are chosen, by layout."""
    plans = planning.plan_trainers(
        lambda: make_long().to("meta"),
        prepare,
        LAYOUTS.values(),
        tokens=LONG,
        dtype=torch.float32,
        gpu_bytes=10**10,
        allowances=planning.Allowances(),
    )
    return {name: plan.ranks[0] for name, plan in zip(LAYOUTS, plans, strict=True)}


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_peak_of_each_rank_is_that_of_a_real_step(real, long_plans, layout):
    """Parameters, states, gathered and reduced buffers, kept activations, and what is alive within
    a layer. Each expert gets as many tokens as the others, as the plan assumes.
    """
    planned = long_plans[layout]
    traced = planned.device - sum(planned.allowed.values())
    for found in real:
        assert traced == pytest.approx(found["peak"][layout], rel=0.03)


@pytest.mark.thorough
def test_the_allowance_covers_a_rank_whose_experts_get_a_fifth_more_tokens(real, long_plans):
    planned = long_plans["ep"]
    traced = planned.device - sum(planned.allowed.values())
    even = max(found["peak"]["ep"] for found in real)
    more = max(found["peak with 20% more"] for found in real)
    assert even < more < traced + planned.allowed["allowed: imbalance of experts"]


def long_document(*, tokens=1024, offload=False):
    def prepared(model, mesh):
        parallel.recompute(model.train(), offload=offload)
        parallel.shard(model, mesh)
        return torch.optim.SGD(model.parameters(), lr=0.1)

    (plan,) = planning.plan_trainers(
        lambda: make_long().to("meta"),
        prepared,
        [planning.TrainerLayout(nodes=1, gpus_per_node=2, cp=2)],
        tokens=tokens,
        dtype=torch.float32,
        gpu_bytes=10**9,
    )
    return plan.ranks[0]


def test_offloaded_activations_are_in_host_memory():
    on_device, offloaded = long_document(), long_document(offload=True)
    inputs = 4 * 512 * 64 * 4  # layers, rows, hidden size, bytes
    assert on_device.activations_on_host == 0
    assert inputs <= offloaded.activations_on_host <= 2 * inputs
    assert offloaded.activations <= on_device.activations - inputs
    assert offloaded.device < on_device.device


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_shapes_are_those_of_a_real_rank(real, case):
    for rank, one in enumerate(planned(case)):
        shapes = [tuple(shape) for shape in real[rank][case]["AdamW"]["shapes"].values()]
        assert sorted(shapes) == sorted(s for p in one.parts for s in [p.local_shape] * p.count)
