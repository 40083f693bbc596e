"""The parity command: what it compares, on ranks; how it ends; what it refuses.

`pytest -m slow tests/test_parity.py` runs the full matrix (minutes).
"""

import json

import attrs
import pytest
import torch

from primerl import attention
from primerl.testing import parity, parity_checks, parity_training
from primerl.testing.families import tiny_family
from primerl.testing.parity import MeshPlan, Task
from primerl.testing.parity_checks import Finding

ALL = MeshPlan(ep=2, cp=2, recompute=True)
CORE = {
    "qwen3_moe": Task(family="qwen3_moe", meshes=[MeshPlan(replicate=2, ep=2), ALL]),
    "deepseek_v3": Task(family="deepseek_v3", meshes=[MeshPlan(ep=4, recompute=True)]),
    "llama, tied, biases, one key head": Task(
        name="llama, tied, biases, one key head",
        family="llama",
        meshes=[MeshPlan(cp=4, recompute=True)],
        settings={
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 1,
        },
    ),
    "qwen3, three heads": Task(
        name="qwen3, three heads",
        family="qwen3",
        meshes=[MeshPlan(cp=2)],
        settings={"num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "six experts": Task(
        name="six experts",
        family="qwen3_moe",
        meshes=[MeshPlan(ep=4)],
        settings={"num_experts": 6},
    ),
    "gpt_oss": Task(family="gpt_oss", meshes=[ALL]),
}
MATRIX = ["llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "minimax_m2"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model folder: of a model that is small already."""
    folder = tmp_path_factory.mktemp("models") / "olmo"
    tiny_family("olmo2").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def compared(folder):
    """All findings of one launch of four ranks."""
    tasks = [*CORE.values(), Task(family=str(folder), meshes=[MeshPlan()])]
    return parity.compare(tasks, world=4)


def of(findings, family, mesh=None):
    return [f for f in findings if f.family == family and mesh in (None, f.mesh)]


@pytest.mark.parametrize("family", [f for f in CORE if f not in ("gpt_oss", "six experts")])
def test_a_family_trains_on_ranks_as_one_process_does(compared, family):
    for mesh in ["1 process", *(mesh.name for mesh in CORE[family].meshes)]:
        found = of(compared, family, mesh)
        checks = {finding.check for finding in found}
        assert {"logprobs", "gradients", "loss", "gradient norm", "parameters"} <= checks
        assert mesh == "1 process" or {"saved and loaded", "streamed"} <= checks
        assert ("expert choices" in checks) == (family in ("qwen3_moe", "deepseek_v3"))
        assert [f for f in found if f.result != "pass"] == []


def test_a_model_folder_is_compared_by_its_config(compared, folder):
    assert {f.mesh for f in of(compared, folder.name)} == {"1 process", "fsdp"}
    assert {f.result for f in of(compared, folder.name)} == {"pass"}


def test_refusals_come_with_their_reason_and_the_others_go_on(compared):
    (sinks,) = of(compared, "gpt_oss")
    (experts,) = of(compared, "six experts", "ep 4")
    assert (sinks.result, sinks.mesh) == ("refused", "1 process")
    assert "gpt_oss has attention sinks" in sinks.note
    assert experts.result == "refused"
    assert "6 experts, which 4 ranks cannot hold" in experts.note


@pytest.mark.slow
def test_the_whole_matrix():
    """The issue's: six families on all meshes of four ranks, one more without cp; recomputation."""
    tasks = [Task(family=f, meshes=parity.of_use(f, parity.all_kinds(4))) for f in MATRIX]
    without = [mesh for mesh in parity.all_kinds(4) if mesh.cp == 1]
    tasks.append(Task(family="glm_moe_dsa", meshes=without))
    findings = parity.compare(tasks, world=4)
    assert [f for f in findings if f.result != "pass"] == []
    for task in tasks:
        assert {f.mesh for f in of(findings, task.name)} == {
            "1 process",
            *(mesh.name for mesh in task.meshes),
        }


def one_process(family, **settings):
    """How one step on packed documents differs from one on each document alone."""
    trained = [
        parity_training.train(
            model, parity_training.batches_of(model), logprobs_of, trained=100, steps=1
        )
        for logprobs_of in (parity_training.packed, parity_training.each_alone)
        for model in [tiny_family(family, **settings)]
    ]
    return dict(parity_checks.differences(*trained))


def test_a_leak_is_found(monkeypatch):
    """Documents that see those before them, by an attention that takes them for one."""
    found = one_process("llama")
    assert found["logprobs"] <= parity_checks.TOLERANCES["logprobs"]
    real = attention.find_documents
    monkeypatch.setattr(attention, "find_documents", lambda p: real(torch.arange(len(p))))
    found = one_process("llama")
    assert found["logprobs"] > 0.01
    assert found["gradients"] > 0.01


def test_other_experts_are_found(monkeypatch):
    """A token that goes elsewhere in one layer, of one step, is counted."""
    model = tiny_family("qwen3_moe")
    batches = parity_training.batches_of(model)
    ours = parity_training.train(model, batches, parity_training.packed, trained=100, steps=1)
    (name, *_) = ours.choices
    moved = {**ours.choices, name: ours.choices[name].clone()}
    moved[name][0, 5] = torch.tensor([0, 7])
    other = attrs.evolve(ours, choices=moved)
    assert dict(parity_checks.differences(other, ours))["expert choices"] == 1
    assert dict(parity_checks.differences(ours, ours))["expert choices"] == 0


def test_ranks_that_batches_do_not_go_round_get_one_without_trained_rows():
    batches = parity_training.micro_batches(64)

    of_ranks = parity_training.shares(batches, 3)

    assert [len(mine) for mine in of_ranks] == [2, 2, 2]
    flat = [of_ranks[index % 3][index // 3] for index in range(6)]
    assert flat[:4] == batches
    assert not any(filler.loss_mask.any() or (filler.versions >= 0).any() for filler in flat[4:])


def test_a_figure_that_is_not_a_number_fails():
    assert Finding(family="a", mesh="b", check="loss", figure=float("nan")).result == "FAIL"
    assert Finding(family="a", mesh="b", check="loss", figure=2e-6).result == "FAIL"
    assert Finding(family="a", mesh="b", check="loss", figure=1e-6).result == "pass"
    assert Finding(family="a", mesh="b", check="raised", note="x").result == "FAIL"


LEAKING = {
    "gpt_oss": "attention sinks",
    "granitemoe_swa": "attention sinks",
    "gemma2": "capped attention scores",
    "qwen3_5_moe_text": "linear_attention layers",
    "qwen3_next": "linear_attention layers",
    "nemotron_h": "linear_attention layers",
    "mamba": "linear_attention layers",
    "lfm2_moe": "conv layers",
    "llama4_text": "chunked_attention layers",
    "minimax_m3_vl_text": "minimax_m3_sparse layers",
    "recurrent_gemma": "recurrent layers",
    "xlstm": "recurrent layers",
    "bloom": "an attention of its own",
    "trocr": "an attention of its own",
    "roberta": "attends to later tokens too",
}


@pytest.mark.parametrize("family", LEAKING)
def test_what_leaks_is_refused_before_training_and_at_each_call(family):
    model = tiny_family(family)
    batch = parity_training.batches_of(model)[0]
    with pytest.raises(ValueError, match=LEAKING[family]):
        attention.refuse_unpackable(model)
    with pytest.raises(
        ValueError, match="packed attention|packed document|pack one document|later tokens"
    ):
        parity_training.packed(model, batch)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("mixtral", {"sliding_window": 8}, "exceeds the attention window of 8"),
        ("phimoe", {"sliding_window": 8}, "a window shorter than a document"),
        ("doge", {}, "attends by a mask"),
        ("moshi", {}, "is not given the documents"),
    ],
)
def test_what_no_rule_foresees_is_refused_as_it_happens(family, settings, message):
    model = tiny_family(family, **settings)
    with pytest.raises(ValueError, match=message):
        parity_training.packed(model, parity_training.batches_of(model)[0])


def test_a_window_that_no_layer_uses_is_no_reason_to_refuse():
    assert tiny_family("qwen2_moe").config.sliding_window == 0
    assert one_process("qwen2_moe")["logprobs"] < 1e-6


def test_an_attention_that_is_told_only_of_positions_finds_documents_by_them():
    found = one_process("stablelm")
    assert found["logprobs"] <= 1e-6
    assert found["gradients"] <= 1e-5


def test_flash_attention_computes_sinks():
    model = tiny_family("gpt_oss")
    model.config._attn_implementation_internal = "flash_attention_2"
    attention.refuse_unpackable(model)


def test_tiny_families_keep_what_makes_them():
    deepseek = tiny_family("deepseek_v3").config
    assert (deepseek.num_hidden_layers, deepseek.first_k_dense_replace) == (2, 1)
    assert (deepseek.n_group, deepseek.topk_group, deepseek.n_routed_experts) == (2, 1, 8)
    gemma = tiny_family("gemma3").config
    assert gemma.layer_types == ["sliding_attention", "full_attention"]
    qwen = tiny_family("qwen3").config
    assert (qwen.num_attention_heads, qwen.num_key_value_heads) == (4, 4)
    shared = tiny_family("gemma3n").config
    assert (shared.num_hidden_layers, shared.num_kv_shared_layers) == (4, 2)
    parameters = dict(tiny_family("llama").named_parameters())
    assert parameters["model.norm.weight"].std() > 0.05  # all 1 where transformers begins


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no_such", "knows no model_type 'no_such'"),
        ("org/name", "no model folder: it has no config.json"),
        ("vit", "no causal language model of vit"),
        ("bart", "bart is an encoder with a decoder"),
        ("blt", "no tiny version of blt"),
    ],
)
def test_what_is_no_family_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        tiny_family(source)


RELEASED = {
    "phi3": {
        "hidden_size": 3072,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0] * 48,
            "long_factor": [2.0] * 48,
        },
        "partial_rotary_factor": 0.75,
    },
    "deepseek_v3": {"hidden_size": 7168, "quantization_config": {"quant_method": "fp8"}},
    "smollm3": {"num_hidden_layers": 36, "no_rope_layers": [1, 1, 1, 0] * 9},
}


@pytest.mark.parametrize("kind", RELEASED)
def test_the_configuration_of_a_large_model_is_shrunk(tmp_path, kind):
    written = {"model_type": kind, "architectures": ["X"], **RELEASED[kind]}
    (tmp_path / "config.json").write_text(json.dumps(written))
    model = tiny_family(tmp_path)
    assert model.num_parameters() < 500_000
    if kind == "phi3":
        assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (4, 2)
    if kind == "smollm3":
        assert model.config.no_rope_layers == [1, 0]
    assert parity_training.each_alone(model, parity_training.batches_of(model)[0]).isfinite().all()


def test_a_folder_that_no_version_of_transformers_knows_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such"}))
    with pytest.raises(ValueError, match="no configuration that can be read"):
        tiny_family(tmp_path)


PASSED = Finding(family="a", mesh="fsdp", check="loss", figure=0.0)
WRONG = Finding(family="a", mesh="ep 2", check="loss", figure=0.5)
NOT_TAKEN = Finding(family="a", mesh="cp 2", check="refused", note="because")


@pytest.mark.parametrize(
    ("findings", "status", "last"),
    [
        ([PASSED], 0, "admitted: a"),
        ([PASSED, NOT_TAKEN], 3, "refused: a, cp 2: because"),
        ([NOT_TAKEN, WRONG], 1, "failed: a, ep 2: loss 0.5"),
    ],
)
def test_exit_status_and_last_line(monkeypatch, capsys, tmp_path, findings, status, last):
    monkeypatch.setattr(parity, "compare", lambda *_, **__: findings)
    assert parity.main(("a",), table=tmp_path / "t.md") == status
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_the_command_names_the_meshes():
    names = [mesh.name for mesh in parity.parts(ep=2, cp=2)]
    assert names == ["fsdp", "ep 2", "cp 2", "ep 2, cp 2", "ep 2, cp 2, recompute"]
    kinds = [mesh.name.removesuffix(", recompute") for mesh in parity.all_kinds(4)]
    assert kinds == ["fsdp", "hsdp 2", "ep 2", "ep 4", "cp 2", "ep 2, cp 2"]
    assert all(mesh.recompute for mesh in parity.all_kinds(4))
    of_llama = parity.of_use("llama", parity.all_kinds(4))
    assert [(m.ep, m.recompute) for m in of_llama] == [(1, True)] * 3
    assert not any(m.recompute for m in parity.of_use("ctrl", parity.all_kinds(4)))


def test_a_launch_that_dies_is_gone_on_with(monkeypatch):
    """Rank 1 dies on the first family's second mesh; all else is compared."""
    launches = []

    def launch(world, plan, results, *, timeout_s):
        tasks = json.loads(plan.read_text())["tasks"]
        launches.append([(task["name"], task["done"]) for task in tasks])
        with results.open("a") as file:
            for task in tasks:
                meshes = [mesh["name"] for mesh in task["meshes"]][task["done"] :]
                for mesh in [*(["1 process"] if not task["done"] else []), *meshes]:
                    if (len(launches), mesh) == (1, "ep 2"):
                        return "rank 1 failed: KeyError: 'x'"
                    line = {"family": task["name"], "mesh": mesh, "check": "loss", "figure": 0.0}
                    file.write(json.dumps(line) + "\n")
        return ""

    monkeypatch.setattr(parity, "_launch", launch)
    meshes = [MeshPlan(), MeshPlan(ep=2), MeshPlan(cp=2)]
    found = parity.compare([Task(family="a", meshes=meshes), Task(family="b", meshes=meshes)])
    assert launches == [[("a", 0), ("b", 0)], [("a", 2), ("b", 0)]]
    assert [(f.family, f.mesh) for f in found if f.result == "FAIL"] == [("a", "ep 2")]
    assert found[2].note == "rank 1 failed: KeyError: 'x'"
    assert len(found) == 8
