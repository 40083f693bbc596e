"""The page docs/families.md: its cells, remarks, kinds of refused families and facts about vLLM."""

import re

import pytest

from primerl import parallel
from primerl.parity.checks import EXCEPTIONS, TOLERANCES, Finding
from primerl.parity.command import applicable
from primerl.testing.families import tiny_config, tiny_family
from tools import families

PLANS = list(families.MESHES.values())
NO_EXPERTS = "X has no experts that can be divided"
LARGE_EPSILON = (
    "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "kimi_linear",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_checks_of_one_process(monkeypatch):
    for name in ("sampled", "replayed", "quantized"):
        monkeypatch.setattr(families, name, lambda _family: ("pass", ""))


def findings(family, *, refused=None):
    """All meshes that apply to a family pass, but for those of an ep of 2."""
    found = [Finding(family=family, mesh="1 process", check="loss", measured=1.26e-8)]
    for plan in applicable(family, PLANS)[0]:
        if plan.ep == 2 and refused:
            found.append(Finding(family=family, mesh=plan.name, check="refused", note=refused))
        else:
            found.append(
                Finding(family=family, mesh=plan.name, check="gradient norm", measured=2e-7)
            )
    return found


def row(text, family):
    (cells,) = re.findall(rf"^\| `{family}` \| (.*) \|$", text, re.MULTILINE)
    (heads,) = re.findall(r"^\| family \| (packed .*) \|$", text, re.MULTILINE)
    return dict(zip(heads.split(" | "), cells.split(" | "), strict=True))


def test_cells_of_a_family():
    cells = row(families.markdown_table(findings("qwen3_moe")), "qwen3_moe")
    assert {cells[column] for column in ("packed", *families.MESHES, "engine", "vllm")} == {"pass"}
    assert (cells["loss"], cells["gradient norm"]) == ("1.3e-08", "2.0e-07")
    assert row(families.markdown_table(findings("llama")), "llama")["ep 2"] == ""


@pytest.mark.parametrize("family", ["llama4_text", "jetmoe", "longcat_flash"])
def test_experts_that_cannot_be_divided_are_refused_and_not_left_out(family):
    with pytest.raises(ValueError, match="no experts that can be divided"):
        parallel.divide_experts(tiny_family(family))
    text = families.markdown_table(findings(family, refused=NO_EXPERTS))
    assert row(text, family)["ep 2"] == "refused"
    assert f"- `{family}`, ep 2: {NO_EXPERTS}" in text


def test_options_that_transformers_or_a_family_lacks():
    text = families.markdown_table(findings("ctrl"))
    assert "- `ctrl`, recomputation: transformers can't recompute its activations" in text
    assert row(text, "ctrl")["fsdp"] == "pass"
    assert row(families.markdown_table(findings("glm_moe_dsa")), "glm_moe_dsa")["gathered"] == (
        "pass"  # the same mesh as cp 2: it always gathers keys
    )


def test_the_page_has_the_bounds_and_the_refused_families():
    refused = Finding(family="bert", mesh="1 process", check="refused", note="attends | later")
    text = families.page([*findings("llama"), refused])
    assert f"| {TOLERANCES['loss']:.0e}, relative" in text
    assert f"| {TOLERANCES['gradient norm']:.0e}, relative" in text
    assert EXCEPTIONS.keys() <= set(LARGE_EPSILON)
    assert f"with and without encoders, is {EXCEPTIONS['qwen3_5']['gradient norm']:.0e}." in text
    assert "1 families are refused. 0 of them are decoder-only" in text
    assert r"| `bert` | encoder | attends \| later |" in text


def test_refused_decoders_are_counted_by_a_list():
    text = (families.VLLM.parent / "families.md").read_text().split("## Refused")[1]
    refused = re.findall(r"^\| `([^`]+)` \|", text.split("\n## ")[0], re.MULTILINE)
    assert families.OTHER_KINDS.keys() <= set(refused)
    decoders = [family for family in refused if family not in families.OTHER_KINDS]
    assert {"blt", "phi4_multimodal", "mamba2", "dbrx"} <= set(decoders)
    assert len(decoders) <= 40


def test_results_with_vllm_are_those_of_its_page():
    found = families.published_to_vllm(families.VLLM.read_text())
    results = {family: result for family, (result, _) in found.items()}
    assert results["llama"] == results["qwen3_next"] == "pass"
    assert (results["nemotron_h"], results["gpt_oss"]) == ("receipts", "refused")
    assert results["qwen3_5"] == results["qwen3_5_moe"] == ""
    assert found["qwen3_next"] == ("pass", "")
    assert "16 bits" in found["gpt_oss"][1]
    tested = (families.VLLM.parents[1] / "tests/vllm/test_families.py").read_text()
    assert set(re.findall(r'parametrize\("served", \["(\w+)"\]', tested)) <= found.keys()


def test_the_reason_of_an_unknown_role():
    text = families.muon_table(["bamba"])
    assert re.search(r"\| `bamba` \| not known: `\w+\.in_proj`: .*so it may hold several", text)


@pytest.mark.parametrize("family", LARGE_EPSILON)
def test_families_with_a_larger_epsilon_are_named(family):
    assert tiny_config(family).get_text_config().rms_norm_eps == 1e-2
    assert "Qwen3-Next, Qwen3.5 (all its types) and Kimi Linear have `rms_norm_eps" in (
        families.PAGE
    )


@pytest.mark.parametrize("family", [*families.WITH_ENCODERS, "minimax_m3_vl"])
def test_models_with_encoders(family):
    model = tiny_family(family)
    assert type(model).__name__.endswith("ForConditionalGeneration")
    assert model.config.model_type == type(model).config_class.model_type  # not shieldgemma2
    frozen = [name for name, one in model.named_parameters() if not one.requires_grad]
    assert any("vision" in name or "visual" in name for name in frozen)
    assert not any("language_model" in name for name in frozen)
