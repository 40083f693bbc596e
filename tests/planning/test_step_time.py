"""Seconds by hand, and those of the flagship's scales, which its page repeats."""

import math
import re

import attrs
import pytest
import torch
from cluster_commands import planned
from glm_swe_trainer import load

from primerl import flops, planning, testing
from primerl.planning.compute_time import compute_seconds
from primerl.planning.rollout_time import rollout_seconds

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
    tcp=1e3,
    copying=1e3,
    threads=2,
    encoding=1e3,
    patching=1e3,
    hashing=1e3,
)
CACHE = 2 * 2 * 2 * 8 * 2  # bytes per token of LLAMA: layers, keys and values, heads, 16 bits
SERVER = planning.ServerPlan(
    gpus=2,
    ep=2,
    weights=1000,
    published=2000,
    kv_token=CACHE,
    kv_asked=0,
    kv_room=20 * 50 * CACHE,
    kv_tokens=1000,
)


def time_of(
    *,
    nodes=2,
    ep=1,
    steps_in_flight=1,
    servers=1,
    prefill_servers=0,
    config=None,
    server=SERVER,
    **changed,
):
    config = config or testing.tiny_model("llama").config
    layout = planning.TrainerLayout(nodes=nodes, gpus_per_node=2, ep=ep)
    rank = planning.RankMemory(
        rank=0,
        parameters=400,
        gradients=400,
        optimizer=100,
        host=300,
        unsharded=5000,
        unreduced=7000,
        activations_on_host=700,
    )
    workload = planning.PlannedStep(
        rollouts=8,
        tokens=100,
        evaluated=2,
        steps_in_flight=steps_in_flight,
        servers=servers,
        prefill_servers=prefill_servers,
    )
    found = planning.plan_step(
        config,
        planning.TrainerPlan(layout=layout, ranks=[rank]),
        server,
        planning.Traffic(route_token=0, routes=0, weights=8000, weights_delta=400),
        workload=workload,
        pack_tokens=100,
        fp8=False,
        gathered=[8000, 4000, 2000, 1000, 1000],
        published=[4000, 2000, 1000, 500, 500],
        checkpoint_bytes=6000,
        **{"hardware": SPEEDS} | changed,
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
    assert seconds["FSDP's traffic"] == 2 * (2 * 5000 + 7000) / 1e3
    assert seconds["offloaded activations"] == 2 * 2 * 700 / 1e3
    assert seconds["optimizer"] == 2 * 300 / 1e3
    assert seconds["experts' dispatch"] == 0
    assert seconds["publication, start"] == 8 + 8000 * 16 / 1e6 + 4
    assert seconds["publication"] == pytest.approx(2 + 0.15 + 0.4 + 0.5 + 1 + 1)
    assert seconds["checkpoint, start"] == 500 / 1e3
    assert seconds["checkpoint"] == 3000 / 1e3
    assert seconds["start of servers"] == 2000 / 1e3
    full = seconds["publication, full version"]
    assert seconds["resume"] == pytest.approx(8 + 3 + 0.5 + seconds["publication, start"] + full)
    # The passes hide nothing of FSDP's traffic here, which takes longer.
    assert found.training == pytest.approx(34 + 0.6 + 12.128)


def experts(**changed):
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2}
    return testing.tiny_model("qwen3_moe", **sizes | changed).config


def test_tokens_go_to_experts_of_other_nodes_by_network():
    speeds = attrs.evolve(SPEEDS, network=1e2)
    # Tokens, layers and their experts, a row of 16 in 16 bits, there and back in three passes.
    each = 800 * 4 * 2 * 16 * 2 * 2 * 3 / 4  # of four ranks
    _, seconds, found = time_of(config=experts(), ep=2, hardware=speeds)
    assert seconds["experts' dispatch"] == pytest.approx(each / 2 / 1e3)
    _, seconds, found = time_of(config=experts(), ep=4, hardware=speeds)
    assert seconds["experts' dispatch"] == pytest.approx(each / 4 * (1 / 1e3 + 2 / 1e2))
    (source,) = (one.source for one in found.phases if one.name == "experts' dispatch")
    assert "50% of them by network, 25% by NVLink" in source
    _, twice, _ = time_of(config=experts(), ep=4, hardware=speeds, dtype=torch.float32)
    assert twice["experts' dispatch"] == pytest.approx(2 * seconds["experts' dispatch"])


@pytest.mark.parametrize("dense", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 3]}])
def test_only_layers_with_experts_dispatch_tokens(dense):
    _, every, _ = time_of(config=experts(), ep=2)
    _, half, _ = time_of(config=experts(**dense), ep=2)
    assert half["experts' dispatch"] == pytest.approx(every["experts' dispatch"] / 2)


def test_publications_are_as_fast_as_the_rank_and_the_node_that_own_most():
    """Rank 0 owns the layer of 4000 bytes, so node 0 owns 6000 of 8000; ranks 2 and 3 own 1000."""
    _, _, found = time_of()
    start = {"gather": 8.0, "convert": 8 * 16e-3, "copy to host memory": 4.0}
    full = {"encode": 4 + 4, "write": 3, "read": 2, "patch and hash": (2 + 2) / 4, "pause": 1}
    delta = {"encode": 4 / 2, "write": 0.15, "read": 0.4, "patch and hash": 2 / 4 + 1, "pause": 1}
    for kind, beside in (("full", full), ("delta", delta)):
        planned = found.publications[kind]
        assert planned.start == pytest.approx(start)
        assert planned.beside == pytest.approx(beside)


def test_publications_on_one_host_are_files_in_its_memory():
    _, _, found = time_of(nodes=1)
    full = found.publications["full"].beside
    assert full["write"] == 8 / 2  # by two ranks
    assert full["read"] == 2 / 2  # by two workers


def test_the_node_that_owns_most_sends_its_part_to_all_servers():
    """Node 0 owns 6000 of 8000 bytes. A server needs 2000 of all bytes, or a delta of 400."""
    seconds = []
    for servers in ({"servers": 1}, {"servers": 4}, {"servers": 1, "prefill_servers": 3}):
        _, _, found = time_of(**servers)
        seconds.append([found.publications[kind].beside["read"] for kind in ("full", "delta")])
    assert seconds == [[2.0, 0.4], [6.0, 1.2], [6.0, 1.2]]
    _, _, found = time_of(servers=4, server=attrs.evolve(SERVER, gpus=4))
    assert found.publications["full"].beside["read"] == 12.0, "each on two nodes"


def test_a_node_reads_the_experts_of_its_own_workers():
    """Each of four GPUs has 500 bytes of experts and 500 bytes of other weights."""
    server = attrs.evolve(SERVER, gpus=4, ep=4, published=2500)
    assert [server.weights_of(workers) for workers in (1, 2, 4, 8)] == [1000, 1500, 2500, 2500]
    _, _, found = time_of(server=server)
    full = found.publications["full"].beside
    assert full["read"] == 2 * 1.5 * 6 / 8, "two nodes read 6 of 8 bytes from node 0"
    assert full["patch and hash"] == (1.5 + 2) / 4


def test_a_full_version_that_takes_longer_than_a_step_is_shown():
    _, seconds, found = time_of()
    full = seconds["publication, full version"]
    assert full == 8 + 3 + 2 + 1 + 1
    assert found.full_version_step == found.step > full
    slow = attrs.evolve(SPEEDS, tcp=1e1)
    _, seconds, found = time_of(hardware=slow)
    assert found.full_version_step == seconds["publication, full version"] == 8 + 3 + 200 + 1 + 1
    plan = planning.Plan(
        model=planning.model_size(testing.tiny_model("llama")), times={"here": found}
    )
    text = plan.text()
    assert f"{found.full_version_step - found.step:.1f} s longer than others" in text
    assert re.search(r"here +gather +8\.0 +8\.0 +training waits", text)


def played(rollouts, *, config=None, server=SERVER, bf16=1e30, updates=0, **changed):
    """Seconds of rollouts of 100 tokens, 25 of them sampled, by default without prefill."""
    config = config or testing.tiny_model("llama").config
    workload = planning.PlannedStep(**{"rollouts": 8, "tokens": 100} | changed)
    return rollout_seconds(
        *(config, server, workload, attrs.evolve(SPEEDS, bf16=bf16)),
        rollouts=rollouts,
        updates=updates,
        gpus_per_node=2,
        fp8=False,
    )


def test_an_update_computes_again_what_is_played():
    config = testing.tiny_model("llama").config
    whole, half = (float(flops.forward(config, tokens)) / 1e9 for tokens in (100, 50))
    step = (1000 + 4 * 50 * CACHE) / 1e6
    # 8 rollouts on 2 GPUs; three updates, each of them with half of a rollout's tokens.
    expected = 4 * 0.75 * whole + 3 * 4 * half + 25 * step
    assert played(8, bf16=1e9, updates=3) == pytest.approx(expected)
    # 40 of 80 rollouts fit at once.
    step = (1000 + 20 * 50 * CACHE) / 1e6
    expected = 40 * 0.75 * whole + 20 * half + 2 * 25 * step
    assert played(80, bf16=1e9, updates=1) == pytest.approx(expected)


def test_with_prefill_servers_the_slower_kind_determines_the_time():
    config = testing.tiny_model("llama").config
    whole, half = (float(flops.forward(config, tokens)) for tokens in (100, 50))
    step = (1000 + 4 * 50 * CACHE) / 1e6
    # 8 rollouts: 2 GPUs sample, and 4 compute prompts.
    slow = played(8, bf16=1e6, updates=1, prefill_servers=2)
    assert slow == pytest.approx(max(2 * 0.75 * whole + 2 * half, 4 * half + 25e6 * step) / 1e6)
    # With 16 GPUs for prompts, the others are slower: they compute the update's prefills.
    slow = played(8, bf16=1e6, updates=1, prefill_servers=8)
    assert slow == pytest.approx((4 * half + 25e6 * step) / 1e6)
    fast = played(8, bf16=1e12, updates=1, prefill_servers=2)
    assert fast == pytest.approx(0.75 * whole / 1e12 + 25 * step, rel=1e-3)
    # One rollout is computed by one kind after the other.
    step = (1000 + 50 * CACHE) / 1e6
    one = played(1, bf16=1e9, prefill_servers=1)
    assert one == pytest.approx(0.75 * whole / 1e9 + 25 * step)


def test_decoded_tokens_travel_to_their_experts():
    config = testing.tiny_model("qwen3_moe").config
    layers = [one for one in flops.chosen_experts(config) if one]
    sent = 4 * sum(layers) * config.hidden_size * 3 / 4  # four tokens, a quarter to each rank
    server = attrs.evolve(SERVER, gpus=4, ep=4)
    alone = played(16, config=config, server=attrs.evolve(server, ep=1))
    # One of the other three GPUs is in the same node.
    seconds = sent / 1e3 + 2 * sent / 1e3 + 2 * len(layers) * planning.Hardware().exchange_s
    assert played(16, config=config, server=server) == pytest.approx(alone + 25 * seconds)


def test_prefill_servers_store_keys_and_values():
    _, seconds, _ = time_of(prefill_servers=1)
    # Prompts of 8 rollouts, and half of the 8 rollouts that are played, by one node to another.
    assert seconds["keys and values"] == (8 * 75 + 8 * 50) * CACHE / 1e3
    assert "keys and values" not in time_of()[1]


def test_rollouts_share_a_gpu_as_far_as_there_are_rollouts_and_memory():
    # Each rollout has 50 tokens on average. A step reads 1000 bytes of weights, at 1e6 bytes/s.
    assert played(8) == pytest.approx(25 * (1000 + 4 * 50 * CACHE) / 1e6)
    assert played(9) == pytest.approx(25 * (1000 + 5 * 50 * CACHE) / 1e6)
    # 20 rollouts fit into each of two GPUs.
    full = 25 * (1000 + 20 * 50 * CACHE) / 1e6
    assert played(80) == pytest.approx(2 * full)
    assert played(80, max_num_seqs=8) == pytest.approx(5 * 25 * (1000 + 8 * 50 * CACHE) / 1e6)


def test_idle_gpus_do_not_make_a_rollout_faster():
    serial = 25 * (1000 + 50 * CACHE) / 1e6
    assert played(1) == played(2) == played(1, servers=12) == pytest.approx(serial)
    assert played(1, steps_in_flight=9) == pytest.approx(serial)


def test_a_step_has_its_share_of_the_steps_that_are_played_at_once():
    config, seconds, found = time_of(steps_in_flight=3)
    prefill = 0.75 * float(flops.forward(config, 100)) / 1e9
    again = float(flops.forward(config, 50)) / 1e9
    step = (1000 + 12 * 50 * CACHE) / 1e6  # 24 rollouts on 2 GPUs
    # A step has one update, which computes half of the 24 rollouts again.
    assert seconds["rollouts"] == pytest.approx((12 * prefill + 25 * step) / 3 + 12 * again)
    # Two rollouts, one on each GPU.
    assert seconds["evaluation"] == pytest.approx(prefill + 25 * (1000 + 50 * CACHE) / 1e6)
    assert found.longest == "training"


def test_decoding_with_an_indexer_reads_its_keys_and_the_chosen_latents():
    config = testing.tiny_model("glm_moe_dsa", index_topk=8).config
    latent = 2 * (config.kv_lora_rank + config.qk_rope_head_dim)
    key = config.index_head_dim + 4 * (config.index_head_dim // 128)
    read = config.num_hidden_layers * (8 * latent + 50 * key)
    server = attrs.evolve(SERVER, ep=1)
    assert played(2, config=config, server=server) == pytest.approx(25 * (1000 + read) / 1e6)


def test_a_refused_server_has_no_time_of_rollouts():
    refused = attrs.evolve(SERVER, kv_room=-5, kv_tokens=0, refusal="memory: because")
    _, seconds, found = time_of(server=refused)
    assert "rollouts" not in seconds
    assert "evaluation" not in seconds
    assert found.unknown["rollouts"] == "the server is refused: memory: because"
    plan = planning.Plan(
        model=planning.model_size(testing.tiny_model("llama")), times={"here": found}
    )
    text = " ".join(plan.text().split())
    assert "here rollouts - the server is refused: memory: because" in text
    assert "the longest: training, without rollouts and evaluation" in text
    with pytest.raises(ValueError, match="plays no rollouts: memory: because"):
        played(1, server=refused)


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
    phases |= {"step of a full version": time.full_version_step}
    for name, seconds in phases.items():
        assert said[name] == f"{seconds:.1f}", name
    sizes = {name: size for name, size in rank.by_name.items() if name != "optimizer"}
    sizes |= {"sum, of 150.1": rank.device}
    for name, size in sizes.items():
        assert said[name] == f"{size / 1e9:.1f}", name
    words = " ".join(page.split())
    assert f"a step of `{scale}` takes {time.step / 60:.1f} minutes" in words.lower()
    if scale == "glm5":
        assert f"trainer needs {time.training / 60:.1f} minutes" in words


def test_the_page_of_weights_has_the_phases_of_the_plan(root):
    """``planning.Hardware`` is the only table of bandwidths."""
    plan = planned(root)
    (time,) = plan.times.values()
    full, delta = (time.publications[kind] for kind in ("full", "delta"))
    page = (root / "docs/weights.md").read_text()
    _, section = page.split("## At 744 billion parameters")
    rows = [re.split(r" *\| *", line) for line in section.splitlines() if line.startswith("| ")]
    said = {cells[1]: cells[3:5] for cells in rows if len(cells) == 6}
    planned_s = {name: [full.phases[name], delta.phases[name]] for name in full.phases}
    planned_s["sum"] = [sum(one.phases.values()) for one in (full, delta)]
    for name, seconds in planned_s.items():
        assert said[name] == [f"{one:.1f}" for one in seconds], name
    assert time.full_version_step == time.step
    assert f"shorter than a step of {time.step:.0f} s" in section
    copied = sum(plan.storage.serving_node.values()) / 2
    needs = f"A node reads {copied / 1e9:.0f} of the {plan.traffic.weights / 1e9:.0f} GB"
    assert needs in " ".join(section.split())
    tcp = planning.Hardware().tcp
    read = full.phases["read"]
    others = sum(full.phases.values()) - read
    assert f"{math.ceil(tcp * read / (60 - others) / 1e8) / 10} GB/s instead of 8" in section
    (start,) = (one.seconds for one in time.phases if one.name == "publication, start")
    assert f"| training | {start:.1f} s |" in page
    unseen = [sum(one.beside.values()) - one.beside["pause"] for one in (delta, full)]
    assert f"| {unseen[0]:.0f} s, or {unseen[1]:.0f} s in full |" in page


def test_the_page_of_clusters_says_what_a_failure_costs(root):
    (time,) = planned(root).times.values()
    seconds = {one.name: one.seconds for one in (*time.phases, *time.others)}
    page = (root / "docs/clusters.md").read_text()
    table = dict(re.findall(r"(?m)^\| ([^|]+) \| ([^|]+) \|", page))
    every = load(root / "recipes/glm_swe.py").SCALES["glm5"].save_every
    most = (every + 1) * time.step / 60
    assert f"{seconds['checkpoint']:.0f} s beside a step of {time.step:.0f} s" in page
    assert seconds["checkpoint"] < time.step  # so one more step is lost
    assert table["lost steps, repeated"].endswith(f"at most {most:.0f}")
    assert table["lost steps, repeated"].startswith(f"{most / 2:.0f} minutes")
    minutes = {name: f"{one / 60:.1f} minutes" for name, one in seconds.items()}
    assert table["servers read their checkpoint"].startswith(minutes["start of servers"])
    resuming = "the trainer resumes: reads model and checkpoint, publishes a full version"
    assert table[resuming] == minutes["resume"]


def test_a_plan_prints_times_and_their_sources(root):
    text = " ".join(planned(root).text().split())
    assert "FLOPs as coded, 256 rollouts of 50,000 tokens" in text
    assert "the longest: keys and values" in text
