"""Roles of parameters for Muon, against how models use them (``uses_of_weights``)."""

import re

import peft
import pytest
import torch
from admitted_families import ADMITTED, PAGE, often
from torch import nn
from uses_of_weights import Uses

from primerl import optim, testing
from primerl.attention.admission import language_model
from primerl.attention.sparse import attend_sparsely
from primerl.testing.families import tiny_family

UNKNOWN = re.findall(r"^\| `([^`]+)` \| not known", PAGE, re.MULTILINE)
IDS = torch.arange(3, 15)[None]  # more than an indexer chooses
# Roles of parameters that are multiplied with, and not orthogonalized.
MULTIPLIED = ("router", "head", "embedding", "head gate", "vector", "coefficients")
# Its value heads are used in two halves. Heads of one projection are one matrix.
HEADS_APART = {("diffllama", "v_proj")}


def by_name(model, **how):
    return {one.name: one for one in optim.muon_parameters(model, **how).roles}


def followed(model):
    model.set_attn_implementation("eager")
    for part in (model, language_model(model)):  # some models with encoders can't pass it on
        if part._can_set_experts_implementation():
            part.set_experts_implementation("eager")
    with torch.no_grad(), Uses(model) as uses:
        model.eval()(input_ids=IDS, use_cache=False)
    return uses


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", often(ADMITTED))
def test_roles_are_what_parameters_do(family):
    model = tiny_family(family)
    if family in UNKNOWN:
        with pytest.raises(ValueError, match="for Muon is unknown: .* roles="):
            optim.muon_parameters(model)
        return
    roles, uses = by_name(model), followed(model)

    assert roles.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    tables = {name for name, one in roles.items() if one.role == "embedding"}
    assert tables <= uses.looked_up
    assert {name for name, one in roles.items() if one.role == "router"} == uses.choosing
    head = model.get_output_embeddings().weight
    for name, one in roles.items():
        multiplied = name in uses.multiplied
        if one.algorithm == "muon":
            assert multiplied
            assert name not in uses.choosing
            assert name not in uses.looked_up
            assert one.parameter is not head
            if (family, name.split(".")[-2]) not in HEADS_APART:
                assert parts(one) == uses.matrices(name), name
        elif multiplied:
            assert one.role in MULTIPLIED, name


def parts(role):
    """The matrix of each output."""
    outputs = role.parameter.shape[-1 if role.matrices.transposed else -2]
    split = role.matrices.split or (outputs,)
    turn = [part for part, size in enumerate(split) for _ in range(size)]
    return turn * (outputs // len(turn))


class Block(nn.Module):
    """A layer of an unknown family."""

    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)


def model_with(**layers):
    """A known model, with an unknown block in it."""
    model = testing.tiny_model("llama")
    model.model.layers[0].mlp = Block(**layers)
    return model


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class Stack(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"wi": linear(32, 96), "wo": linear(48, 32)}, r"mlp.wi.weight.*take at most 48 inputs"),
        (
            {"mixer": Stack(32, 32)},
            r"mlp.mixer.weight, of shape \(32, 32\).*Stack is an unknown kind of layer",
        ),
        ({"experts": Stack(8, 32, 48), "gate": linear(32, 8)}, "Stack has an unknown layout"),
        ({"experts": Stack(8, 32, 48)}, "router of model.layers.0.mlp .* no layer has one output"),
        (
            {"experts": Stack(8, 32, 48), "gate": linear(32, 8), "latent": linear(32, 8)},
            r"mlp.gate, model.layers.0.mlp.latent has one output",
        ),
    ],
)
def test_unknown_roles_are_refused_and_can_be_stated(layers, message):
    model = model_with(**layers)
    with pytest.raises(ValueError, match=message):
        optim.muon_parameters(model)

    said = {"*.layers.0.mlp.*": "adamw", "*.layers.0.mlp.*i.weight": optim.Matrices(split=(48, 48))}
    said = {pattern: role for pattern, role in said.items() if "wi" in layers or role == "adamw"}
    roles = by_name(model, roles=said)

    for name, one in roles.items():
        if "layers.0.mlp" in name:
            assert one.role == "stated"
            assert one.algorithm == ("muon" if name.endswith("wi.weight") else "adamw")


@pytest.mark.parametrize("holder", ["block", "part", "parameter", "list"])
def test_a_router_is_what_has_an_output_for_each_expert_whatever_its_name(holder):
    router = linear(32, 8)
    layers = {
        "block": {"which": router},
        "part": {"which": Block(way=router)},
        "parameter": {"which": Stack(8, 32)},
        "list": {"which": router},
    }[holder]
    experts = Stack(8, 32, 48)
    if holder == "list":
        experts = nn.ModuleList(Block(up=linear(32, 48), down=linear(48, 32)) for _ in range(8))
    model = model_with(experts=experts, **layers)
    said = {} if holder == "list" else {"*.mlp.experts.weight": optim.Matrices()}

    roles = by_name(model, roles=said)

    (found,) = [name for name, one in roles.items() if one.role == "router"]
    assert "mlp.which" in found
    experts = [one for name, one in roles.items() if "experts" in name]
    assert {one.algorithm for one in experts} == {"muon"}


def test_a_model_without_output_embeddings_is_refused():
    with pytest.raises(ValueError, match="Sequential has no get_output_embeddings"):
        optim.muon_parameters(nn.Sequential(nn.Linear(3, 3)))


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"*.nothing": "adamw"}, "matches no parameter"),
        ({"*.down_proj.weight": "sgd"}, "expected 'adamw' or optim.Matrices"),
        ({"*.down_proj.weight": optim.Matrices(split=(7,))}, r"parts of \(7,\)"),
        ({"model.norm.weight": optim.Matrices()}, "model.norm.weight"),
    ],
)
def test_roles_that_do_not_fit_are_refused(roles, message):
    with pytest.raises(ValueError, match=message):
        optim.muon_parameters(testing.tiny_model("llama"), roles=roles)


def test_heads_can_be_stated_to_be_matrices():
    model = testing.tiny_model("llama")
    size = model.config.head_dim
    roles = by_name(model, roles={"*.q_proj.weight": optim.Matrices(split=(size, size))})

    assert roles["model.layers.0.self_attn.q_proj.weight"].matrices.split == (size, size)


def test_what_is_tied_or_frozen():
    model = testing.tiny_model("llama", tie_word_embeddings=True)
    model.model.layers[0].requires_grad_(False)
    roles = by_name(model)

    assert roles["model.embed_tokens.weight"].algorithm == "adamw"
    assert "lm_head.weight" not in roles
    assert not [name for name in roles if "layers.0" in name]


def test_norms_with_a_weight_for_each_head():
    roles = by_name(tiny_family("cohere", use_qk_norm=True))

    norm = roles["model.layers.0.self_attn.q_norm.weight"]
    assert norm.parameter.ndim == 2
    assert (norm.role, norm.algorithm) == ("norm", "adamw")


@pytest.mark.parametrize("family", ["gpt_oss", "gemma4_text"])
def test_experts_of_other_layouts(family):
    """Families that are not admitted, or whose class has no experts by default."""
    settings = {
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24,
    } if family == "gemma4_text" else {}  # fmt: skip
    model = tiny_family(family, **settings)
    roles, uses = by_name(model), followed(model)

    assert {name for name, one in roles.items() if one.role == "router"} == uses.choosing != set()
    experts = {name: one for name, one in roles.items() if one.role == "experts"}
    assert len(experts) == 2 * model.config.num_hidden_layers
    for name, one in experts.items():
        assert parts(one) == uses.matrices(name)


def test_adapters_are_split_as_the_layers_that_they_adapt():
    model = tiny_family("phi3")
    settings = peft.LoraConfig(r=4, target_modules=["qkv_proj", "gate_up_proj", "down_proj"])
    peft.inject_adapter_in_model(settings, model)
    whole = by_name(tiny_family("phi3"))
    roles = by_name(model)

    assert roles
    for name, one in roles.items():
        layer, _, half = name.partition(".lora_")
        split = whole[f"{layer}.weight"].matrices.split if half.startswith("B") else None
        assert one.algorithm == "muon"
        assert one.matrices.split == split


def test_adapters_of_routers_and_heads_are_left_to_adamw_and_those_of_stacks_refused():
    model = tiny_family("hunyuan_v1_moe")
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["wg", "lm_head"]), model)
    roles = by_name(model)
    assert {one.role for one in roles.values()} == {"router", "head"}
    assert {one.algorithm for one in roles.values()} == {"adamw"}

    model = tiny_family("qwen3_moe")
    settings = peft.LoraConfig(r=4, target_parameters=["mlp.experts.down_proj"])
    peft.inject_adapter_in_model(settings, model)
    with pytest.raises(ValueError, match="it adapts a Qwen3MoeExperts"):
        optim.muon_parameters(model)


def test_the_grouping_can_be_printed():
    text = str(optim.muon_parameters(tiny_family("aria_text")))

    # Its name depends on the version of transformers.
    (line,) = [line for line in text.splitlines() if "layers.0" in line and "gate | up" in line]
    assert re.split(r"  +", line)[1:] == [
        "8 x 64 x 192", "experts", "muon", "8 x gate | up, transposed",
    ]  # fmt: skip
    assert len(text.splitlines()) == 1 + len(list(tiny_family("aria_text").parameters()))


def test_groups_hold_each_parameter_once():
    for family in ("aria_text", "phi3", "longcat_flash"):
        model = tiny_family(family)
        groups = optim.muon_parameters(model)
        held = [id(one) for group in groups for one in group["params"]]
        assert sorted(held) == sorted(id(one) for one in model.parameters() if one.requires_grad)
        optim.Muon(groups, lr=0.1)


def test_an_indexer_has_the_same_roles_when_it_chooses_by_document():
    model = testing.tiny_model("glm_moe_dsa")
    before = str(optim.muon_parameters(model))
    assert "head gate" in before

    attend_sparsely(model)

    assert str(optim.muon_parameters(model)) == before
