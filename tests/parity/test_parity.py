"""The parity command: comparisons on ranks, exit statuses, refusals.

`pytest -m slow tests/parity/test_parity.py` runs the full matrix (minutes).
"""

import ast
import functools
import json
import math
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch

from primerl import optim
from primerl.attention import masked, refuse_unpackable, switching
from primerl.attention import packed as packed_attention
from primerl.parity import checks as parity_checks
from primerl.parity import command as parity
from primerl.parity import mesh_training as parity_training
from primerl.parity import reference as parity_reference
from primerl.parity.checks import Finding, MeshPlan
from primerl.parity.command import Task
from primerl.parity.rank_program import plain_family
from primerl.testing.families import tiny_family

ALL = MeshPlan(ep=2, cp=2, recompute=True, resume=True)
CORE = {
    "qwen3_moe": Task(
        family="qwen3_moe", meshes=[MeshPlan(replicate=2, ep=2, share_prefixes=True), ALL]
    ),
    "deepseek_v3": Task(
        family="deepseek_v3", meshes=[MeshPlan(ep=4, recompute=True, optimizer="muon")]
    ),
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
    "bloom": Task(family="bloom", meshes=[ALL]),
    "gpt_oss": Task(
        family="gpt_oss",
        meshes=[
            MeshPlan(ep=2, cp=2, context="ulysses", share_prefixes=True),
            MeshPlan(cp=2, context="gathered"),
        ],
    ),
    "gemma2": Task(
        family="gemma2", meshes=[MeshPlan(cp=2, context="ulysses", share_prefixes=True)]
    ),
    "llama4_text": Task(family="llama4_text", meshes=[MeshPlan(cp=2, context="gathered")]),
    "qwen3_5_moe_text": Task(
        family="qwen3_5_moe_text", meshes=[MeshPlan(ep=2, share_prefixes=True, recompute=True)]
    ),
    "nemotron_h": Task(family="nemotron_h", meshes=[MeshPlan(recompute=True)]),
}
WITH_EXPERTS = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_5_moe_text", "nemotron_h")
MATRIX = ["llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "minimax_m2"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The folder of a model that is already small."""
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


@pytest.mark.thorough
@pytest.mark.parametrize("family", [f for f in CORE if f not in ("bloom", "six experts")])
def test_a_family_trains_on_ranks_as_one_process_does(compared, family):
    for mesh in ["1 process", *(mesh.name for mesh in CORE[family].meshes)]:
        found = of(compared, family, mesh)
        checks = {finding.check for finding in found}
        assert {"logprobs", "entropies", "gradients", "clipped gradients"} <= checks
        assert {"loss", "gradient norm", "updates"} <= checks
        assert mesh == "1 process" or {"saved and loaded", "streamed"} <= checks
        assert ("expert choices" in checks) == (family in WITH_EXPERTS)
        assert [f for f in found if f.result != "pass"] == []


@pytest.mark.thorough
def test_a_model_folder_is_compared_by_its_config(compared, folder):
    assert {f.mesh for f in of(compared, folder.name)} == {"1 process", "fsdp"}
    assert {f.result for f in of(compared, folder.name)} == {"pass"}


@pytest.mark.thorough
def test_refusals_have_a_reason_and_the_others_continue(compared):
    (own,) = of(compared, "bloom")
    (experts,) = of(compared, "six experts", "ep 4")
    assert (own.result, own.mesh) == ("refused", "1 process")
    assert "bloom has its own attention implementation" in own.note
    assert experts.result == "refused"
    assert "6 experts, which 4 ranks cannot hold" in experts.note


@pytest.mark.slow
def test_the_whole_matrix():
    """Six families on all meshes of four ranks, one more without cp; with recomputation."""
    kinds = parity.all_kinds(4)
    tasks = [Task(family=f, meshes=parity.applicable(f, kinds)[0]) for f in MATRIX]
    without = [mesh for mesh in kinds if mesh.cp == 1]
    meshes, _ = parity.applicable("glm_moe_dsa", without)
    tasks.append(Task(family="glm_moe_dsa", meshes=meshes))
    findings = parity.compare(tasks, world=4)
    assert [f for f in findings if f.result != "pass"] == []
    for task in tasks:
        assert {f.mesh for f in of(findings, task.name)} == {
            "1 process",
            *(mesh.name for mesh in task.meshes),
        }


@functools.cache
def alone(family, **settings):
    """The training documents, and the reference's training on them."""
    model = plain_family(family, **settings)
    sequences = parity_reference.sampled(model, parity_training.model_documents(model))
    return sequences, parity_reference.train(plain_family(family, **settings), sequences)


def packed(family, sequences, reference, **settings):
    """The same training by this library, in one process."""
    (batches,) = parity_training.make_batches(sequences)
    return parity_training.train(tiny_family(family, **settings), batches, reference)


def one_process(family, *, fault=None, **settings):
    """How training on packed documents differs from training on each document alone.

    The differences that a fault makes are printed as a row of the table in docs/verified.md.
    """
    sequences, reference = alone(family, **settings)
    ours = packed(family, sequences, reference, **settings)
    found = dict(parity_checks.differences(ours, reference))
    if fault:
        apart = (ours.logprobs - reference.logprobs)[~reference.logprobs.isnan()].abs()
        changed = apart > parity_checks.TOLERANCES["logprobs"]
        print(
            f"| `{family}` | {fault} | {changed.double().mean():.0%} | {apart.median():.0e} "
            f"| {apart.max():.0e} | {found['gradients']:.0e} |"
        )
    return found


def test_the_reference_imports_nothing_of_this_package():
    """Neither by name nor indirectly: run by its path, it loads no module of ours."""
    path = Path(parity_reference.__file__)
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.partition(".")[0])
    assert imported <= {"attrs", "collections", "contextlib", "re", "torch", "typing"}
    program = f"import runpy, sys; runpy.run_path({str(path)!r}); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        encoding="utf-8",
        check=True,
        cwd=path.parent,
    ).stdout.split()
    assert "torch" in loaded
    assert [name for name in loaded if name.partition(".")[0] == "primerl"] == []


@pytest.mark.thorough
def test_the_command_says_what_it_takes():
    shown = subprocess.run(
        [sys.executable, "-m", "primerl.parity", "--help"],
        capture_output=True,
        encoding="utf-8",
        check=True,
    ).stdout
    assert "--ep INT" in shown
    assert "--cp INT" in shown


def test_the_references_objective_by_hand():
    document = parity_reference.ReferenceDocument(
        token_ids=[5, 6, 7, 8],
        trained=[False, True, True, False],
        advantages=[0.0, 2.0, -1.0, 9.0],
        behavior_logprobs=[0.0, math.log(0.25), math.log(0.5), 0.0],
        temperature=1.0,
    )
    logprobs = torch.tensor([0.5, 0.45, 0.1]).double().log()
    entropies = torch.tensor([1.0, 3.0, 50.0]).double()

    value = parity_reference.objective(document, logprobs, entropies, 0.1)

    # Ratios 2 and 0.9: the first is clipped to 1.2; the second stays, and is bad.
    assert value.item() == pytest.approx(-1.2 * 2.0 + 0.9 * 1.0 - 0.1 * (1.0 + 3.0))


def test_the_references_score_is_a_softmax_at_the_documents_temperature():
    model = tiny_family("llama")
    document = parity_training.model_documents(model)[3]
    logits = model(input_ids=torch.tensor([document.token_ids])).logits[0].double()

    for temperature in (1.0, 0.5):
        one = attrs.evolve(document, temperature=temperature)
        logprobs, entropies = parity_reference.score(model, one)
        p = (logits[4] / temperature).exp()
        p = p / p.sum()
        assert logprobs[4].item() == pytest.approx(p[document.token_ids[5]].log().item())
        assert entropies[4].item() == pytest.approx(-(p * p.log()).sum().item())


def test_the_reference_clips_to_half_of_the_first_norm():
    _, reference = alone("llama")
    squares = sum(g.double().square().sum() for g in reference.gradients.values())
    clipped = sum(g.double().square().sum() for g in reference.clipped.values())

    assert reference.norms[0] == pytest.approx(squares.sqrt().item())
    assert clipped.sqrt().item() == pytest.approx(reference.norms[0] / 2, rel=1e-5)
    assert len(reference.norms) == len(parity_reference.ENTROPY_BONUS)


def test_the_references_matrices_are_orthogonal_as_muons_are():
    """Singular values within Newton-Schulz' band, singular vectors as they were."""
    matrix = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    for x in (matrix, matrix.T):
        u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
        inner = u.T @ parity_reference.orthogonal(x).double() @ vh.T
        values = inner.diagonal()
        assert ((values > 0.6) & (values < 1.3)).all()
        torch.testing.assert_close(inner, values.diag(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", parity_reference.MUON_FAMILIES)
def test_the_references_list_of_matrices_is_what_muon_takes(family):
    """Written by hand on one side, found from the modules on the other."""
    model = tiny_family(family)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optim.muon_parameters(model)
    taken = {names[id(p)] for g in groups if g["algorithm"] == "muon" for p in g["params"]}
    assert taken == {name for name in names.values() if parity_reference.MATRIX.search(name)}


def test_documents_are_of_all_kinds():
    made = parity_reference.documents(96, special=[7])
    lengths = [len(one.token_ids) for one in made]
    prompts = [one.token_ids[: parity_reference.PROMPT] for one in made]
    history = [one.token_ids for one in made[-3:]]

    assert {1, 31} <= set(lengths)
    assert max(lengths) < parity_training.MAX_TOKENS
    assert prompts[6] == prompts[7] == prompts[8] != prompts[5]
    assert history[1][:20] == history[0]
    assert history[2][:28] == history[1]
    assert len({one.temperature for one in made}) == 3
    assert not any(7 in one.token_ids for one in made)
    assert not any(one.trained[0] for one in made)
    model = tiny_family("llama")
    shared, whole = (
        sum(len(b.token_ids) for b in parity_training.make_batches(made, share_prefixes=share)[0])
        for share in (True, False)
    )
    assert shared < whole - 2 * parity_reference.PROMPT + 1
    assert model.config.vocab_size == 96


def test_a_leak_is_found(monkeypatch):
    """Documents see those before them, as attention treats them as one."""
    found = one_process("llama")
    assert found["logprobs"] <= parity_checks.TOLERANCES["logprobs"]
    real = switching.find_documents
    monkeypatch.setattr(switching, "find_documents", lambda p: real(torch.arange(len(p))))
    found = one_process("llama")
    assert found["logprobs"] > 0.01
    assert found["gradients"] > 0.01


def test_other_experts_and_other_tokens_are_found():
    """A token that goes elsewhere in one layer of one step, is not trained, or is trained twice."""
    _, reference = alone("qwen3_moe")

    def measured(check, **changed):
        return dict(parity_checks.differences(attrs.evolve(reference, **changed), reference))[check]

    (name, *_) = reference.choices
    moved = {**reference.choices, name: reference.choices[name].clone()}
    trained = reference.logprobs.isfinite().nonzero().flatten()
    moved[name][0, trained[3]] = torch.tensor([-5, 7])
    assert measured("expert choices", choices=moved) == 1
    assert measured("expert choices") == measured("logprobs") == measured("updates") == 0
    for value in (torch.nan, torch.inf):
        logprobs = reference.logprobs.clone()
        logprobs[trained[0]] = value
        assert measured("logprobs", logprobs=logprobs) == torch.inf


def test_a_difference_that_is_not_a_number_fails():
    assert Finding(family="a", mesh="b", check="loss", measured=float("nan")).result == "FAIL"
    assert Finding(family="a", mesh="b", check="loss", measured=2e-6).result == "FAIL"
    assert Finding(family="a", mesh="b", check="loss", measured=1e-6).result == "pass"
    assert Finding(family="a", mesh="b", check="raised", note="x").result == "FAIL"


def test_a_family_whose_plain_code_rounds_more_has_its_own_bound():
    for family, result in (("qwen3_5_text", "pass"), ("qwen3_next", "FAIL")):
        one = Finding(family=family, mesh="fsdp", check="gradient norm", measured=2e-5)
        assert one.result == result


def first_batch(model):
    """Of several documents."""
    batches = parity_training.make_batches(parity_training.model_documents(model))[0]
    return next(batch for batch in batches if len(batch.cu_seqlens) > 2)


LEAKING = {
    "mamba": "linear_attention layers",
    "zaya": "hybrid layers",
    "qwen4_exp_text": "an indexer that primerl does not run document by document",
    "hy_v4": "an indexer that primerl does not run document by document",
    "xlstm": "recurrent layers",
    "bloom": "its own attention implementation",
    "trocr": "its own attention implementation",
    "roberta": "attends to later tokens too",
}


@pytest.mark.parametrize("family", LEAKING)
def test_what_leaks_is_refused_before_training_and_at_each_call(family):
    model = tiny_family(family)
    batch = first_batch(model)
    with pytest.raises(ValueError, match=LEAKING[family]):
        refuse_unpackable(model)
    with pytest.raises(
        ValueError, match="packed attention|packed document|pack one document|later tokens"
    ):
        parity_training.score(model, batch)


def test_what_no_rule_covers_is_refused_when_it_happens():
    model = tiny_family("doge")
    with pytest.raises(ValueError, match="DogeAttention got a mask"):
        parity_training.score(model, first_batch(model))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gpt_oss", {}),
        ("gemma2", {}),
        ("llama4_text", {}),
        ("mimo_v2_flash", {}),
        ("phimoe", {"sliding_window": 8}),  # said only in its mask
    ],
)
def test_documents_several_times_as_long_as_the_window(family, settings):
    """Of 31 tokens, with windows and chunks of 8."""
    text = tiny_family(family, **settings).config
    size = getattr(text, "attention_chunk_size", None) or text.sliding_window
    assert 3 * size < max(parity_reference.ALONE)
    found = one_process(family, **settings)
    assert found["logprobs"] <= 1e-6
    assert found["gradients"] <= 1e-5


def around_attention(monkeypatch, **changed):
    """Change what attention is asked for: the leaks that parity must find."""
    real = packed_attention.attend

    def changed_attend(*tensors, **options):
        new = {name: change(options[name]) for name, change in changed.items()}
        return real(*tensors, **(options | new))

    monkeypatch.setattr(packed_attention, "attend", changed_attend)


@pytest.mark.parametrize(
    ("family", "fault", "changed"),
    [
        ("gpt_oss", "a window one longer", {"window": lambda window: window and window + 1}),
        ("gpt_oss", "a window one shorter", {"window": lambda window: window and window - 1}),
        ("gpt_oss", "no sinks", {"sinks": lambda _: None}),
        ("gemma2", "no cap", {"softcap": lambda _: None}),
        ("llama4_text", "chunks one longer", {"chunk": lambda chunk: chunk and chunk + 1}),
    ],
)
def test_a_wrong_window_sink_or_cap_is_found(monkeypatch, family, fault, changed):
    settings = {"attn_logit_softcapping": 2.0} if family == "gemma2" else {}  # near the scores
    around_attention(monkeypatch, **changed)
    found = one_process(family, fault=fault, **settings)
    assert found["logprobs"] > 10 * parity_checks.TOLERANCES["logprobs"]
    assert found["gradients"] > 10 * parity_checks.TOLERANCES["gradients"]


@pytest.mark.parametrize("family", ["qwen3_5_text", "jamba", "minimax", "lfm2", "falcon_h1"])
def test_a_state_begins_anew_at_each_document(monkeypatch, family):
    found = one_process(family)
    assert found["logprobs"] <= 1e-6
    assert found["gradients"] <= 1e-5
    monkeypatch.setattr(switching, "mix_by_document", lambda _model: None)
    found = one_process(family, fault="a state carried over")
    assert found["logprobs"] > 0.01
    assert found["gradients"] > 0.01


@pytest.mark.parametrize(
    "family", ["minimax_m3_vl_text", pytest.param("deepseek_v4", marks=pytest.mark.thorough)]
)
def test_blocks_of_keys_are_counted_in_each_document(monkeypatch, family):
    found = one_process(family)
    assert found["logprobs"] <= 1e-6
    assert found["gradients"] <= 1e-5

    def mix_as_one_document(_attention, hidden, _documents, mix):
        return mix(hidden, None)

    monkeypatch.setattr(masked.DocumentAttention, "mix_documents", mix_as_one_document)
    found = one_process(family, fault="keys are chosen or compressed over the pack")
    assert found["logprobs"] > 0.01
    assert found["gradients"] > 0.01


def test_positions_in_the_pack_do_not_scale_the_queries_of_llama_4(monkeypatch):
    monkeypatch.setattr(packed_attention, "scaled_by_position", lambda _module, query, _own: query)
    assert one_process("llama4_text")["logprobs"] > 1e-4


def test_a_window_that_no_layer_uses_is_no_reason_to_refuse():
    assert tiny_family("qwen2_moe").config.sliding_window == 0
    assert one_process("qwen2_moe")["logprobs"] < 1e-6


def test_attention_that_is_given_only_positions_finds_documents_by_them():
    found = one_process("stablelm")
    assert found["logprobs"] <= 1e-6
    assert found["gradients"] <= 1e-5


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
        ("org/name", "not a model folder: it has no config.json"),
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
    logprobs, entropies = parity_reference.score(model, parity_training.model_documents(model)[3])
    assert logprobs.isfinite().all()
    assert entropies.isfinite().all()


def test_a_folder_that_no_version_of_transformers_knows_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such"}))
    with pytest.raises(ValueError, match="no configuration that can be read"):
        tiny_family(tmp_path)


PASSED = Finding(family="qwen3", mesh="fsdp", check="loss", measured=0.0)
WRONG = Finding(family="qwen3", mesh="ep 2", check="loss", measured=0.5)
NOT_TAKEN = Finding(family="qwen3", mesh="cp 2", check="refused", note="because")
WITHOUT = Finding(family="qwen3", mesh="ep 2", check="not applicable", note="no experts to divide")


@pytest.mark.parametrize(
    ("findings", "status", "last"),
    [
        ([PASSED], 0, "admitted: qwen3"),
        ([PASSED, WITHOUT], 0, "admitted: qwen3"),
        ([PASSED, NOT_TAKEN], 3, "refused: qwen3, cp 2: because"),
        ([NOT_TAKEN, WRONG], 1, "failed: qwen3, ep 2: loss 0.5"),
    ],
)
def test_exit_status_and_last_line(monkeypatch, capsys, findings, status, last):
    monkeypatch.setattr(parity, "compare", lambda *_, **__: findings)
    assert parity.main(("qwen3",)) == status
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_the_command_names_the_meshes():
    names = [mesh.name for mesh in parity.parts(ep=2, cp=2)]
    assert names == [
        "fsdp, prefixes, resume",
        "fsdp, muon",
        "fsdp",
        "ep 2, prefixes",
        "cp 2, ulysses, prefixes",
        "cp 2, gathered",
        "ep 2, cp 2, gathered, prefixes, recompute",
        "ep 2, cp 2",
        "ep 2, cp 2, muon, resume, recompute",
    ]
    kinds = parity.all_kinds(4)
    assert len({mesh.name for mesh in kinds}) == len(kinds)
    sizes = {(m.replicate, m.ep, m.cp) for m in kinds}
    assert sizes == {(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 4, 1), (1, 1, 2), (1, 2, 2)}
    for size in sizes:  # each with all that recipes may switch on
        mine = [m for m in kinds if (m.replicate, m.ep, m.cp) == size]
        assert {m.recompute for m in mine} == {m.share_prefixes for m in mine} == {True, False}
        assert {m.optimizer for m in mine} == {"adamw", "muon"}
        assert any(m.resume for m in mine)
        for method in ("ulysses", "gathered") if size[2] > 1 else ():
            assert {m.recompute for m in mine if m.context == method} == {True, False}


def test_what_a_family_lacks_is_left_out_and_named():
    plans = parity.parts(ep=2, cp=2)
    kept, lost = parity.applicable("llama", plans)
    assert not any(plan.ep > 1 for plan in kept)
    assert {(plan.ep, reason) for plan, reason in lost} == {(2, "no experts to divide")}
    assert MeshPlan(cp=2, context="gathered", recompute=True, share_prefixes=True) in kept
    assert parity.applicable("qwen3_moe", plans) == (plans, [])
    kept, lost = parity.applicable("jetmoe", [MeshPlan(ep=2)])  # has experts, which shard refuses
    assert (kept, lost) == ([MeshPlan(ep=2)], [])
    _, lost = parity.applicable("llama", [MeshPlan(cp=3, context="ulysses")])
    assert [reason for _, reason in lost] == ["4 heads, which 3 ranks cannot share"]
    kept, lost = parity.applicable("ctrl", parity.all_kinds(4))
    assert not any(plan.recompute or plan.optimizer == "muon" for plan in kept)
    assert any("transformers can't recompute" in reason for _, reason in lost)


def test_a_dense_family_with_ep_is_compared_without(monkeypatch, capsys):
    def compare(tasks, **_):
        return [
            Finding(family=task.name, mesh=mesh.name, check="loss", measured=0.0)
            for task in tasks
            for mesh in task.meshes
        ]

    monkeypatch.setattr(parity, "compare", compare)
    assert parity.main(("llama", "qwen3_moe"), ep=2) == 0
    said = capsys.readouterr().out
    assert "not applicable: no experts" in said
    assert said.splitlines()[-1] == "admitted: llama, qwen3_moe"


def test_the_next_launch_continues_after_one_that_dies(monkeypatch):
    """Rank 1 dies on the first family's second mesh; all else is compared."""
    launches = []

    def launch(world, plan, results, *, timeout_s):
        tasks = json.loads(plan.read_text())["tasks"]
        launches.append([(task["name"], task["done"]) for task in tasks])
        with results.open("a") as file:
            for task in tasks:
                meshes = [MeshPlan(**mesh).name for mesh in task["meshes"]][task["done"] :]
                for mesh in [*(["1 process"] if not task["done"] else []), *meshes]:
                    if (len(launches), mesh) == (1, "ep 2"):
                        return "rank 1 failed: KeyError: 'x'"
                    line = {"family": task["name"], "mesh": mesh, "check": "loss", "measured": 0.0}
                    file.write(json.dumps(line) + "\n")
        return ""

    monkeypatch.setattr(parity, "_launch", launch)
    meshes = [MeshPlan(), MeshPlan(ep=2), MeshPlan(cp=2)]
    found = parity.compare([Task(family="a", meshes=meshes), Task(family="b", meshes=meshes)])
    assert launches == [[("a", 0), ("b", 0)], [("a", 2), ("b", 0)]]
    assert [(f.family, f.mesh) for f in found if f.result == "FAIL"] == [("a", "ep 2")]
    assert found[2].note == "rank 1 failed: KeyError: 'x'"
    assert len(found) == 8
