"""Expert parallel on four gloo ranks, and models that start without values; one launch."""

import json
import sys
from types import ModuleType, SimpleNamespace

import fake_deep_ep
import pytest
import torch
from forked_ranks import forked_ranks
from safetensors.torch import save_file

from primerl import loss, models, parallel, testing
from primerl._common import forward_passes
from primerl._common.forward_passes import recomputation_method
from primerl.models.placement import ParameterPart, pieces
from primerl.parallel.expert_parallel.dispatch import AllToAll
from primerl.parallel.expert_parallel.experts import divide_experts, grouped_matmul
from primerl.testing.families import tiny_family

RANKS = 4


@pytest.fixture(scope="module")
def found(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    script = root / "tests/ranks/expert_parallel.py"
    done = forked_ranks(script, folder, ranks=RANKS, cwd=folder)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "Warning" not in done.stderr, done.stderr[-5000:]
    assert "suboptimal" not in done.stderr, done.stderr[-5000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("kind", ["even", "all to one rank", "one rank has no tokens"])
@pytest.mark.parametrize("dispatch", ["AllToAll", "DeepEP"])
def test_divided_experts_compute_what_the_family_does(found, family, kind, dispatch):
    """Outputs, and the gradients of tokens, of mixing weights and of every expert's matrices."""
    for rank_found in found:
        gap, counted = rank_found[f"{family}, {kind}, {dispatch}"]
        assert gap < 4 * 2e-4  # the sum of four ranks' largest; values are of the order of 100
        assert counted


@pytest.mark.thorough
def test_a_model_without_values_loads_what_was_saved(found):
    keys = [key for key in found[0] if key.startswith("load ")]
    assert len(keys) == 2 * 2 + 3 * 5
    for rank_found in found:
        for key in keys:
            equal, streamed, gap = rank_found[key]
            assert equal, key
            assert streamed, key
            assert gap < 2e-6, key


@pytest.mark.thorough
def test_it_computes_in_16_bits_and_accumulates_in_32(found):
    gap, kinds = found[0]["halved"]
    assert 1e-5 < gap < 0.1
    assert kinds == ["torch.float32"]


@pytest.mark.thorough
def test_what_does_not_fit_is_refused_on_every_rank(found):
    expected = {
        "too many": "mesh(replicate=1, fsdp=3, ep=1, cp=1) needs 3 ranks, but there are 4",
        "too few": "replicate * cp is 3, which does not divide 4",
        "ep": "ep does not divide fsdp * cp, which is 4",
        "ep over a replica": "ep does not divide fsdp * cp, which is 2",
        "zero": "cp is 0, expected at least 1",
        "dense": "LlamaForCausalLM has no experts that can be divided",
        "experts": "has 6 experts, which 4 ranks cannot hold in equal numbers",
        "dtypes": "lm_head.weight is torch.float16",
        "other": "lacks 4 tensors of the model, such as ['model.layers.0.self_attn.k_norm.weight'",
        "empty": "has no model.safetensors and no model.safetensors.index.json",
        "shape": "has shape [64, 32], but the model's configuration requires [128, 32]",
    }
    for rank_found in found:
        assert rank_found["refusals"].keys() == expected.keys()
        for name, message in expected.items():
            assert message in (rank_found["refusals"][name] or ""), rank_found["refusals"][name]


@pytest.mark.thorough
def test_a_routing_bias_moves_towards_an_even_load(found):
    assert found[0]["balanced"] == [-0.5, 0.5, 0.0, 0.0]
    with pytest.raises(ValueError, match="rate is -1"):
        parallel.balance_experts(testing.tiny_model("glm4_moe"), {}, rate=-1)
    counts = {"model.layers.1.mlp.experts": torch.ones(4)}
    with pytest.raises(ValueError, match="model.layers.1.mlp has no routing bias"):
        parallel.balance_experts(testing.tiny_model("qwen3_moe"), counts, rate=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["adapters", "adapted experts"])
def test_adapters_of_a_sharded_model_learn_as_alone(found, case):
    expected, ours, kept, gap = found[0][case]
    assert ours == pytest.approx(expected, abs=1e-5)
    assert expected[1] < expected[0]
    assert kept
    assert gap < 1e-5


def test_load_metrics():
    counts = {"a": torch.tensor([4, 0, 2, 2]), "b": torch.tensor([1, 1]), "c": torch.zeros(2)}

    metrics = parallel.load_statistics(counts)

    assert metrics["expert_load_max"] == 2
    assert metrics["expert_load_cv"] == pytest.approx(((1 + 1) / 4) ** 0.5 / 2)
    assert metrics["experts_idle"] == pytest.approx(1 / 6)
    assert parallel.load_statistics({}) == {}


def test_in_a_world_of_one_experts_are_computed_alone():
    expected, ours = testing.tiny_model("qwen3_moe"), testing.tiny_model("qwen3_moe")
    divide_experts(ours)
    ids = torch.arange(2, 14).unsqueeze(0)

    torch.testing.assert_close(ours(ids).logits, expected(ids).logits)

    counts = parallel.take_expert_counts(ours)
    assert [int(c.sum()) for c in counts.values()] == [24, 24]
    with pytest.raises(ValueError, match="has no experts that can be divided"):
        divide_experts(testing.tiny_model("llama"))


RECOMPUTATION = {
    "none": lambda model: None,
    "primerl": parallel.recompute,
    "primerl, selective": lambda model: parallel.recompute(model, selective=True),
    "transformers": lambda model: recomputation_method(model)(),
    "transformers, reentrant": lambda model: recomputation_method(model)({"use_reentrant": True}),
}


@pytest.mark.filterwarnings("ignore:.*use_reentrant:UserWarning")
@pytest.mark.parametrize("how", RECOMPUTATION)
@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe"])
def test_each_forward_pass_of_each_micro_batch_is_counted_once(family, how):
    """granitemoe scales its logits, so that model_logprobs runs it twice on its first call."""
    model = tiny_family(family)
    RECOMPUTATION[how](model)
    divide_experts(model)
    ids, positions = torch.arange(2, 14), torch.arange(12)

    for batches in (1, 2):
        for _ in range(batches):
            loss.model_logprobs(model, ids, positions, ids.roll(-1)).sum().backward()
        counts = parallel.take_expert_counts(model)
        assert [int(c.sum()) for c in counts.values()] == [12 * 2 * batches] * 2
    assert parallel.take_expert_counts(model) == {}

    model(ids[None]).logits.sum().backward()
    assert [int(c.sum()) for c in parallel.take_expert_counts(model).values()] == [24, 24]


def test_a_discarded_forward_pass_is_not_counted():
    model = testing.tiny_model("qwen3_moe")
    divide_experts(model)
    ids = torch.arange(2, 14).unsqueeze(0)

    for discard in (True, False, True):
        with forward_passes.attempt() as this:
            model(ids)
            model(ids)
        this.discarded = discard

    assert [int(c.sum()) for c in parallel.take_expert_counts(model).values()] == [48, 48]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("inner", [6, 8])
def test_rows_are_multiplied_by_their_experts_matrix(dtype, inner):
    """Also inputs that grouped_mm rejects: float64, and rows of 24 bytes."""
    x, matrices = torch.randn(7, inner, dtype=dtype), torch.randn(3, inner, 8, dtype=dtype)

    y = grouped_matmul(x, matrices, torch.tensor([2, 2, 7], dtype=torch.int32))

    expected = torch.cat([x[:2] @ matrices[0], x[2:] @ matrices[2]])
    torch.testing.assert_close(y, expected)


def test_without_a_group_all_experts_are_here():
    hidden, mixing = torch.randn(3, 2), torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]])
    indices = torch.tensor([[2, 0], [0, 1], [2, 1]])

    def compute(tokens, counts):
        assert counts.tolist() == [2, 2, 2]
        scale = torch.repeat_interleave(torch.tensor([1.0, 10.0, 100.0]), counts)
        return tokens * scale.unsqueeze(1)

    mixed = AllToAll(3)(hidden, indices, mixing, compute)

    factors = torch.tensor([[50.5], [1.0], [32.5]])
    torch.testing.assert_close(mixed, factors * hidden)


def test_an_unusable_deep_ep_is_refused(monkeypatch):
    with pytest.raises(ImportError, match="not installed: build it from"):
        parallel.DeepEP(8, None)
    placeholder, older = ModuleType("deep_ep"), ModuleType("deep_ep")
    older.Buffer = SimpleNamespace(
        get_dispatch_layout=fake_deep_ep.Buffer.get_dispatch_layout, dispatch=lambda x, handle: x
    )
    monkeypatch.setitem(sys.modules, "deep_ep", older)
    with pytest.raises(ValueError, match=r"no Buffer.dispatch with num_tokens_per_rank"):
        parallel.DeepEP(8, None)
    monkeypatch.setitem(sys.modules, "deep_ep", placeholder)
    with pytest.raises(ValueError, match=r"no Buffer.get_dispatch_layout"):
        parallel.DeepEP(8, None)
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deep_ep)
    with pytest.raises(ValueError, match="use a mesh with ep > 1"):
        parallel.DeepEP(8, None)


def test_the_layout_of_a_checkpoints_tensors():
    """By hand: qwen3_moe's experts are saved one by one, gate and up apart."""
    model = testing.tiny_model("qwen3_moe")
    found = pieces(model)
    prefix = "model.layers.0.mlp.experts"

    fused = {piece.source: piece for piece in found[f"{prefix}.gate_up_proj"]}

    assert len(fused) == 2 * 4
    shape = model.model.layers[0].mlp.experts.gate_up_proj.shape  # [4, 2 * 16, 32]
    up = fused[f"{prefix}.3.up_proj.weight"].region(shape, (16, 32))
    assert up == (slice(3, 4), slice(16, 32), slice(0, 32))
    gate = fused[f"{prefix}.1.gate_proj.weight"].region(shape, (16, 32))
    assert gate == (slice(1, 2), slice(0, 16), slice(0, 32))
    (norm,) = found["model.norm.weight"]
    assert norm == ParameterPart("model.norm.weight", (0,), (0.0,), (1.0,))
    with pytest.raises(
        ValueError, match=r"has shape \[20, 32\], but the model's configuration requires \[16, 32\]"
    ):
        fused[f"{prefix}.3.up_proj.weight"].region(shape, (20, 32))


def test_a_model_in_one_process_is_loaded_too(tmp_path):
    saved = testing.tiny_model("mixtral", seed=1)
    saved.save_pretrained(tmp_path)

    other = testing.tiny_model("mixtral", seed=2)
    models.load_shards(other, tmp_path)

    for name, tensor in saved.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    empty = models.empty_model(tmp_path, dtype=torch.bfloat16)
    models.load_shards(empty, tmp_path)
    assert {p.dtype for p in empty.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="cannot read the configuration of"):
        models.empty_model(tmp_path / "nowhere")


def test_a_quantized_checkpoint_is_refused(tmp_path):
    model = testing.tiny_model("llama")
    state = {n: t.clone() for n, t in model.state_dict().items()}
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].to(torch.float8_e4m3fn)
    save_file(state, tmp_path / "model.safetensors")

    with pytest.raises(ValueError, match=f"{name} is quantized .torch.float8_e4m3fn."):
        models.load_shards(model, tmp_path)


def test_a_world_of_one_has_a_mesh_of_one():
    mesh = parallel.mesh()

    assert (mesh.world_size, mesh.batches, mesh.expert_group, mesh.context_group) == (
        1,
        1,
        None,
        None,
    )
    x = torch.ones(2)
    assert mesh.context_sum(x) is x
    with pytest.raises(ValueError, match="needs 2 ranks, but there are 1.*under torchrun"):
        parallel.mesh(fsdp=2)
