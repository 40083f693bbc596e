"""Sizes by hand, refused layouts, properties, and GLM-5's published numbers."""

import functools
import json

import attrs
import pytest
import torch
import transformers
from glm_swe_trainer import load
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl import fp8, models, optim, parallel, planning, testing
from primerl.planning.kv_cache import kv_bytes
from primerl.testing.families import tiny_family

GB = 10**9
SMALL = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "vocab_size": 32,
}
# Queries and outputs, keys and values, norms of both, router, experts, norms.
LAYER = 2 * 16 * 16 + 2 * 8 * 16 + 2 * 8 + 4 * 16 + 4 * (2 * 8 * 16 + 16 * 8) + 2 * 16
SMALL_PARAMETERS = 2 * LAYER + 2 * 32 * 16 + 16
INVERSE_FREQUENCIES = 2 * 4 * 4  # of a head of 8, twice, in float32


def small():
    return tiny_family("qwen3_moe", **SMALL).to("meta")


def prepare(model, mesh):
    parallel.shard(parallel.recompute(model.train()), mesh)
    return torch.optim.AdamW(model.parameters())


def plan(layout, **changed):
    settings = {"tokens": 0, "gpu_bytes": GB, "dtype": torch.float32} | changed
    (found,) = planning.plan_trainers(small, prepare, [layout], **settings)
    return found


def layout(ranks, **sizes):
    return planning.TrainerLayout(nodes=1, gpus_per_node=ranks, **sizes)


def plan_of(family, **changed):
    arguments = {
        "layouts": [planning.TrainerLayout(nodes=1, gpus_per_node=1)],
        "servers": [1],
        "tokens": 64,
        "step_tokens": 1024,
        "steps": 3,
        "max_staleness": 2,
        "gpu_bytes": 10**9,
        "max_num_seqs": 2,
    }
    return planning.plan_run(
        lambda: testing.tiny_model(family).to("meta"),
        lambda model, mesh: torch.optim.SGD(model.parameters(), lr=0.1),
        **arguments | changed,
    )


def test_a_run_is_planned_in_fp8_and_bf16_also_where_there_are_no_experts():
    plan = plan_of("llama", form=fp8.Format.of_blocks(16))
    assert list(plan.servers) == ["FP8, ep=1", "bf16, ep=1"]
    assert plan.refusal is None
    assert "memory" in plan_of("llama", gpu_bytes=1).refusal


@pytest.mark.parametrize("changed", [{"servers": []}, {"servers": [0]}, {"layouts": []}])
def test_a_run_without_servers_or_trainers_is_an_error(changed):
    with pytest.raises(ValueError, match="expected at least one of each"):
        plan_of("llama", **changed)


def test_sizes_are_those_computed_by_hand():
    """Four ranks, two of which hold two experts each: every size is a multiple of what divides."""
    size = planning.model_size(small())
    assert size.total == SMALL_PARAMETERS
    assert size.experts == 2 * 4 * 3 * 8 * 16
    assert size.active == size.total - 32 * 16 - size.experts // 2

    (rank,) = plan(layout(4, ep=2)).ranks
    assert rank.parameters == SMALL_PARAMETERS // 4 * 4 + INVERSE_FREQUENCIES
    assert rank.gradients == SMALL_PARAMETERS // 4 * 4
    assert rank.optimizer == 2 * rank.gradients  # two moments
    around, experts = 2 * 32 * 16 + 16, 4 * 3 * 8 * 16
    gathered_layer = LAYER - experts // 2
    assert rank.gathered == 4 * (around + 2 * gathered_layer)
    assert rank.reduced == 4 * (around + gathered_layer)
    assert rank.unreduced == 4 * (around + 2 * gathered_layer)


def test_only_trained_parameters_are_reduced():
    def trains_queries(model, mesh):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name)
        return prepare(model, mesh)

    (found,) = planning.plan_trainers(small, trains_queries, [layout(2)], tokens=0, gpu_bytes=GB)
    (rank,) = found.ranks
    queries = 16 * 16
    assert rank.reduced == 4 * queries  # of a layer, in float32
    assert rank.unreduced == 2 * 4 * queries


def test_a_run_is_planned_in_the_dtype_of_its_trainer():
    def found(dtype):
        arguments = {"steps": 1, "max_staleness": 1, "max_num_seqs": 1, "gpu_bytes": GB}
        plan = planning.plan_run(
            small,
            prepare,
            layouts=[layout(2)],
            servers=[1],
            tokens=32,
            step_tokens=32,
            dtype=dtype,
            workload=planning.PlannedStep(rollouts=2, tokens=32),
            **arguments,
        )
        (time,) = plan.times.values()
        return plan.trainers[0].ranks[0], time.seconds("FSDP's traffic")

    speed = planning.Hardware().nvlink
    bf16, seconds = found(torch.bfloat16)
    float32, longer = found(torch.float32)
    assert (bf16.unsharded, bf16.unreduced) == (2 * SMALL_PARAMETERS, 4 * SMALL_PARAMETERS)
    assert seconds == pytest.approx(8 * SMALL_PARAMETERS / speed)
    assert (float32.unsharded, float32.unreduced) == (4 * SMALL_PARAMETERS, 4 * SMALL_PARAMETERS)
    assert longer == pytest.approx(12 * SMALL_PARAMETERS / speed)
    assert float32.activations > 1.5 * bf16.activations


def test_a_layer_keeps_its_input_where_it_is_recomputed():
    (rank,) = plan(layout(2), tokens=32).ranks
    (twice,) = plan(layout(2), tokens=64).ranks
    assert 2 * 32 * 16 * 4 <= rank.activations < twice.activations
    assert rank.working > 32 * 16 * 4
    (halved,) = plan(layout(2, cp=2), tokens=64).ranks
    assert rank.activations <= halved.activations < twice.activations


@settings(max_examples=8)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_parts_cover_the_model_and_shrink_with_ranks(ranks, ep):
    if ranks % ep:
        return
    found = plan(layout(ranks, ep=ep), ranks=range(ranks)).ranks
    held = sum(one.gradients for one in found)
    assert len(found) == ranks
    assert held >= 4 * SMALL_PARAMETERS
    (more,) = plan(layout(2 * ranks, ep=ep)).ranks
    assert more.gradients <= found[0].gradients


@pytest.mark.parametrize(
    ("asked", "changed", "why"),
    [
        (layout(6, ep=3), {}, "4 experts, which 3 ranks cannot hold"),
        (layout(4, ep=3), {}, "ep does not divide"),
        (layout(4, cp=16), {}, "replicate [*] cp is 16, which does not divide 4"),
        (layout(4, cp=4), {"tokens": 30}, "context: 30 tokens are not divisible by cp=4"),
        (layout(1), {"tokens": 2**40}, "context: 1099511627776 tokens are more than can be traced"),
        (
            layout(2),
            {"gpu_bytes": 2**16},
            "memory: rank 0 needs .* GiB, but the limit is 0.0 .*optimizer",
        ),
    ],
)
def test_impossible_layouts_are_refused_by_the_constraint(asked, changed, why):
    found = plan(asked, **changed)
    whole = planning.Plan(model=planning.model_size(small()), trainers=[found])

    assert len(whole.impossible) == 1
    with pytest.raises(ValueError, match=why):
        raise ValueError(whole.impossible[0])


def test_a_second_group_and_ranks_that_are_not_are_refused():
    with pytest.raises(ValueError, match="rank is 2, expected 0 to 1"):
        planning.imagined_ranks(2, rank=2).__enter__()
    with planning.imagined_ranks(2), pytest.raises(RuntimeError, match="is initialized already"):
        planning.imagined_ranks(2).__enter__()
    assert not torch.distributed.is_initialized()


def test_pairs_are_refused_by_the_parts_themselves():
    def accepted():
        pass

    def refused():
        raise ValueError("because")

    found = planning.refused_pairs({("a", "b"): accepted, ("c", "d"): refused})
    reasons = {one.pair: one.reason for one in found}

    assert reasons["c", "d"] == "because"
    assert ("a", "b") not in reasons
    assert len(reasons) == 16  # every attempt of the library's own was refused
    assert (
        "load some of them into the places of others"
        in reasons["weight updates", "expert load balancing (enable_eplb)"]
    )


def test_a_server_is_refused_by_the_constraint():
    serve = functools.partial(
        planning.plan_server, small(), max_model_len=1024, max_num_seqs=2, gpu_bytes=GB
    )
    token = 2 * 2 * 8 * 2  # layers, keys and values, a head, bytes
    found = serve(gpus=4, ep=4)
    experts = 2 * 4 * 3 * 8 * 16
    assert found.weights == 2 * (SMALL_PARAMETERS - experts + experts // 4)
    assert found.published == 2 * SMALL_PARAMETERS
    assert found.kv_token == token
    assert found.kv_asked == 2048 * token
    assert found.refusal is None

    assert "4 experts are not divisible by ep=3" in serve(gpus=3, ep=3).refusal
    assert "does not divide the server's 3 GPUs" in serve(gpus=3, ep=2).refusal
    refusal = serve(gpus=1, gpu_bytes=1000, reserved=3 * 2**30).refusal
    assert "memory: weights take 0.0 GiB, and 3.0 GiB are allowed for activations" in refusal
    assert "memory: a sequence of" in serve(gpus=1, gpu_bytes=2**15).refusal


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gpus", 0),
        ("ep", -1),
        ("max_model_len", 0),
        ("max_num_seqs", 0),
        ("gpu_bytes", 0),
        ("gpu_memory_utilization", 3.0),
        ("gpu_memory_utilization", float("nan")),
        ("reserved", -1),
    ],
)
def test_wrong_arguments_of_a_server_are_named(name, wrong):
    arguments = {"gpus": 1, "max_model_len": 64, "max_num_seqs": 1, "gpu_bytes": GB}
    with pytest.raises(ValueError, match=f"{name} is {wrong}, expected"):
        planning.plan_server(small(), **arguments | {name: wrong})


@pytest.mark.parametrize(
    ("kind", "name", "wrong"),
    [
        (planning.PlannedStep, "rollouts", -1),
        (planning.PlannedStep, "tokens", 0),
        (planning.PlannedStep, "sampled", 1.5),
        (planning.PlannedStep, "servers", 0),
        (planning.PlannedStep, "evaluated", -1),
        (planning.PlannedStep, "steps_in_flight", 0),
        (planning.PlannedStep, "max_num_seqs", 0),
        (planning.Hardware, "bf16", float("nan")),
        (planning.Hardware, "memory", float("inf")),
        (planning.Hardware, "nvlink", 0.0),
        (planning.Hardware, "memory_fraction", 5.0),
        (planning.Hardware, "threads", 0),
        (planning.TrainerLayout, "cp", 0),
        (planning.TrainerLayout, "ep", -2),
        (planning.TrainerLayout, "nodes", 0),
        (planning.TrainerLayout, "gpus_per_node", 0),
        (planning.TrainerLayout, "replicate", 0),
    ],
)
def test_wrong_fields_are_named(kind, name, wrong):
    required = {
        planning.PlannedStep: {"rollouts": 1, "tokens": 1},
        planning.TrainerLayout: {"nodes": 1},
    }
    with pytest.raises(ValueError, match=f"'{name}' must be .*: {wrong}"):
        kind(**required.get(kind, {}) | {name: wrong})


def test_a_plan_is_a_value_json_and_text():
    traffic = planning.plan_traffic(small(), step_tokens=1000, published=10**6, changed=0.01)
    assert traffic.route_token == 2 * 2  # layers, experts of a token
    assert traffic.routes == 4000
    assert 0.01 * 10**6 < traffic.weights_delta < 0.02 * 10**6
    with pytest.raises(ValueError, match="changed is 2"):
        planning.plan_traffic(small(), step_tokens=1, published=1, changed=2)

    whole = planning.Plan(
        model=planning.model_size(small()),
        trainers=[plan(layout(4, ep=2)), plan(layout(6, ep=3))],
        traffic=traffic,
        refused_pairs=[planning.Incompatibility(("a", "b"), "because [of] c")],
    )
    values = json.loads(whole.json())
    assert values["trainers"][0]["ranks"][0]["gradients"] == 4 * SMALL_PARAMETERS // 4
    assert values["impossible"] == whole.impossible
    text = " ".join(whole.text().split())
    assert "because [of] c" in text
    assert "does not fit: 1 x 6 GPUs, ep=3, cp=1" in text


@pytest.fixture(scope="module")
def glm5(root):
    return root / "recipes/configs/glm5"


def test_glm5_has_its_published_sizes(glm5):
    model = models.empty_model(glm5)
    size = planning.model_size(model)
    assert round(size.total / GB, 1) == 743.9
    assert round(size.active / GB, 1) == 40.8

    serve = functools.partial(
        planning.plan_server,
        model,
        gpus=32,
        ep=32,
        max_model_len=131072,
        max_num_seqs=2,
        gpu_bytes=141 * GB,
    )
    experts = 75 * 256 * 3 * 2048 * 6144
    others = model.num_parameters() - experts
    assert serve().weights == 2 * experts // 32 + 2 * others + 75 * 256 * 4
    fp8.convert_linears(model)
    quantize = fp8.CheckpointQuantizer(model, experts=fp8.GroupedMatmul(), dtype=torch.bfloat16)
    in_fp8 = serve(quantize=quantize, kv_cache_dtype="fp8")
    # Experts: a byte for each weight, and 4 for each block of 128 x 128.
    assert in_fp8.published > experts + 4 * experts // 128**2
    assert round(in_fp8.weights / GB, 1) == 44.5
    assert planning.plan_traffic(model, step_tokens=1, published=1).routes == 600


def test_glm5_2_takes_the_bytes_that_others_measured(glm5, tmp_path):
    """82.501 GB on each of 32 GPUs, of an RDMA transfer (prime-rl, pull request 3341)."""
    shared = {"index_topk_freq": 4, "index_skip_topk_offset": 3}  # indexers of 21 layers
    config = json.loads((glm5 / "config.json").read_text()) | shared
    (tmp_path / "config.json").write_text(json.dumps(config))
    server = planning.plan_server(
        models.empty_model(tmp_path),
        gpus=32,
        ep=32,
        max_model_len=131072,
        max_num_seqs=2,
        gpu_bytes=141 * GB,
    )
    assert round(server.weights / GB, 3) == 82.501


def test_glm5_keeps_what_vllm_keeps_of_a_token(glm5):
    config = models.empty_model(glm5).config
    latent, indexer = 512 + 64, 128 + 4
    assert kv_bytes(config) == 78 * (2 * latent + indexer)
    assert kv_bytes(config, "fp8") == 78 * (656 + indexer)  # vLLM's fp8_ds_mla


def test_latent_attention_without_an_indexer_keeps_a_byte_for_each_number():
    config = transformers.DeepseekV3Config()
    assert kv_bytes(config) == 61 * 2 * (512 + 64)
    assert kv_bytes(config, "fp8") == 61 * (512 + 64)


def test_layers_keep_keys_of_their_own_sizes():
    config = transformers.Gemma4TextConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=64,
        layer_types=["sliding_attention", "full_attention"],
    )
    assert kv_bytes(config) == 2 * 2 * 2 * (16 + 64)


@pytest.mark.slow
def test_glm5_on_twelve_and_sixteen_nodes(glm5):
    """Run with: pytest -m slow tests/planning."""

    def wire(model, mesh):
        fp8.convert_linears(model)
        parallel.recompute(model.train())
        parallel.freeze_indexer(model)
        parallel.shard(model, mesh, dtype=torch.bfloat16, matmul=fp8.GroupedMatmul())
        trained = [one for one in model.parameters() if one.requires_grad]
        return optim.Offload(torch.optim.AdamW(trained, lr=1e-6))

    twelve, sixteen, impossible = planning.plan_trainers(
        lambda: models.empty_model(glm5),
        wire,
        [
            planning.TrainerLayout(nodes=nodes, ep=ep, cp=4)
            for nodes, ep in ((12, 8), (16, 8), (12, 48))
        ],
        tokens=131072,
        gpu_bytes=planning.H200_BYTES,
    )
    # Twelve nodes need offloaded activations, too.
    assert twelve.refusal.startswith("memory: rank 0 needs 146.1 GiB")
    assert sixteen.refusal is None
    for found, size, host in ((twelve, 62.0, 496), (sixteen, 46.5, 372)):
        (rank,) = found.ranks
        assert round((rank.parameters + rank.gradients) / GB, 1) == size
        assert round(found.host_per_node / GB) == host
        # Each layer's input, at least: rows, hidden size, 16 bits.
        assert rank.activations >= 78 * 131072 // 4 * 6144 * 2
    assert "256 experts, which 48 ranks cannot hold" in impossible.refusal


def test_differences_of_two_settings():
    @attrs.frozen
    class Settings:
        nodes: int
        keep: tuple = ()
        dtype: str = "bfloat16"

    text = planning.differences(Settings(1), Settings(28, (len, abs)), names=("here", "there"))

    rows = [line.split() for line in text.splitlines()]
    assert ["nodes", "1", "28"] in rows
    assert ["keep", "none", "len,", "abs"] in rows
    assert "dtype" not in text


def test_the_recipe_plans_in_the_dtype_that_it_trains_in(root):
    recipe = load(root / "recipes/glm_swe.py")
    args = attrs.evolve(
        recipe.SCALES["laptop"], model="tiny:glm4_moe", gpus_per_node=2, dry_run=True
    )
    assert args.dtype == "float32"
    (rank,) = recipe.plan(args).trainers[0].ranks
    (half,) = recipe.plan(attrs.evolve(args, dtype="bfloat16")).trainers[0].ranks
    assert rank.unsharded == 2 * half.unsharded > 0
