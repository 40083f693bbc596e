"""Seconds by hand, and those of the flagship's scales, which its page repeats."""

import re
import types

import pytest
from cluster_commands import planned

from primerl import flops, planning, testing
from primerl.planning.step_time import compute_seconds, decoded_per_second

# Every speed is a round number, and every fraction 1.
SPEEDS = planning.Hardware(
    bf16=1e9,
    products=1,
    fp8_products=1,
    grouped=1,
    attention=1,
    attention_backward=1,
    sparse_attention=1,
    indexer=1,
    head=1,
    memory=1e6,
    memory_fraction=1,
    pcie=1e3,
    nvlink=1e3,
    network=1e3,
    disk=1e3,
    encoding=1e3,
)
SERVER = types.SimpleNamespace(gpus=2, weights=1000, published=2000, kv_token=10, kv_room=10_000)


def time_of(**changed):
    config = testing.tiny_model("llama").config
    layout = planning.TrainerLayout(nodes=2, gpus_per_node=2)
    rank = planning.RankMemory(
        rank=0,
        parameters=400,
        gradients=400,
        optimizer=100,
        host=300,
        unsharded=5000,
        activations_on_host=700,
    )
    workload = planning.PlannedStep(rollouts=8, tokens=100, evaluated=2)
    found = planning.plan_step(
        config,
        planning.TrainerPlan(layout=layout, ranks=[rank]),
        SERVER,
        planning.Traffic(route_token=0, routes=0, weights=8000, weights_delta=400),
        workload=workload,
        pack_tokens=100,
        fp8=False,
        checkpoint_bytes=6000,
        hardware=SPEEDS,
        **changed,
    )
    return config, {one.name: one.seconds for one in (*found.phases, *found.others)}, found


def test_times_are_those_computed_by_hand():
    config, seconds, found = time_of()

    forward = 8 / 4 * float(flops.forward(config, 100)) / 1e9
    head = 8 / 4 * float(flops.breakdown(config, 100).head) / 1e9
    assert seconds["forward"] == pytest.approx(forward)
    assert seconds["recomputation"] == pytest.approx(forward - head)
    assert seconds["backward"] == pytest.approx(8 / 4 * float(flops.backward(config, 100)) / 1e9)
    # 8 documents of 100 tokens, in packs of 100, on 4 ranks: 2 micro-batches.
    assert found.micro_batches == 2
    assert seconds["FSDP's traffic"] == 2 * 4 * 5000 / 1e3
    assert seconds["offloaded activations"] == 2 * 2 * 700 / 1e3
    assert seconds["optimizer"] == 2 * 300 / 1e3
    assert seconds["experts' dispatch"] == 0
    assert seconds["publication, start"] == 2 * 2000 / 1e3
    assert seconds["publication"] == 2000 / 1e3 + 200 / 1e3 + 400 / 1e3 + 1000 / 1e3
    assert seconds["checkpoint, start"] == 500 / 1e3
    assert seconds["checkpoint"] == 3000 / 1e3
    assert seconds["resume"] == 3000 / 1e3 + 500 / 1e3 + 2000 / 1e3
    # The passes hide nothing of FSDP's traffic here, which takes longer.
    assert found.training == pytest.approx(40 + 0.6 + 4)


def test_rollouts_share_a_gpu_as_far_as_there_are_rollouts_and_memory():
    workload = planning.PlannedStep(rollouts=8, tokens=100)
    # 8 rollouts on 2 GPUs, each with 50 tokens on average.
    assert decoded_per_second(SERVER, workload, SPEEDS) == 4 * 1e6 / (1000 + 4 * 50 * 10)
    more = planning.PlannedStep(rollouts=8, tokens=100, steps_in_flight=100)
    assert decoded_per_second(SERVER, more, SPEEDS) == 20 * 1e6 / (1000 + 20 * 50 * 10)
    _, seconds, found = time_of()
    prefill = 0.75 * 8 * float(flops.forward(testing.tiny_model("llama").config, 100)) / 1e9 / 2
    assert seconds["rollouts"] == pytest.approx(prefill + 200 / (2 * 4 * 1e6 / 3000))
    assert seconds["evaluation"] == pytest.approx(seconds["rollouts"] / 4)
    assert found.longest == "training"


def test_a_slow_phase_beside_the_step_is_what_it_waits_for():
    phase = planning.PlannedPhase(name="rollouts", seconds=9.0, source="", beside="the step")
    waited = planning.PlannedPhase(name="optimizer", seconds=2.0, source="")
    found = planning.StepTime(phases=(waited, phase), others=(), micro_batches=1)
    assert (found.training, found.step, found.longest) == (2.0, 9.0, "rollouts")


def test_experts_and_attention_have_speeds_of_their_own():
    config = testing.tiny_model("glm_moe_dsa").config
    parts = flops.breakdown(config, 64)
    forward, backward = compute_seconds(config, 64, planning.Hardware(), fp8=True)
    speeds = planning.Hardware()
    assert forward["experts"] == pytest.approx(
        float(parts.experts) / (speeds.bf16 * speeds.fp8_products * speeds.grouped)
    )
    assert "indexer" not in backward
    assert backward["attention_scores"] > 2 * forward["attention_scores"]


@pytest.mark.thorough
@pytest.mark.parametrize("scale", ["glm5", "8xh200"])
def test_the_page_says_what_is_planned(root, scale):
    plan = planned(root, scale)
    (time,) = plan.times.values()
    (rank,) = plan.trainers[0].ranks
    assert plan.refusal is None
    assert rank.device < planning.H200_BYTES

    page = (root / "docs/glm_swe.md").read_text()
    column = {"glm5": 1, "8xh200": 2}[scale]
    rows = [re.split(r" *\| *", line) for line in page.splitlines() if line.startswith("| ")]
    said = {cells[1]: cells[1 + column] for cells in rows if len(cells) == 6}
    phases = {one.name: one.seconds for one in (*time.phases, *time.others)}
    phases |= {"training": time.training, "**step**": time.step}
    for name, seconds in phases.items():
        assert said[name] == f"{seconds:.1f}", name
    sizes = {name: size for name, size in rank.by_name.items() if name != "optimizer"}
    sizes |= {"sum, of 150.1": rank.device}
    for name, size in sizes.items():
        assert said[name] == f"{size / 1e9:.1f}", name


def test_a_plan_prints_times_and_their_sources(root):
    text = " ".join(planned(root).text().split())
    assert "FLOPs as coded, 256 rollouts of 50,000 tokens" in text
    assert "the longest: rollouts" in text
