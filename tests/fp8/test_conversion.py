"""Models whose linear layers are replaced: which, in what order, and what it costs in accuracy."""

import copy

import peft
import pytest
import torch
from torch import nn

from primerl import fp8, loss, parallel, replay, testing
from primerl.parallel.expert_parallel.experts import divide_experts
from primerl.testing.families import tiny_family

FORM = fp8.Format.of_blocks(16)
TOKENS = torch.arange(2, 26)[None]
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def logits(model, tokens=TOKENS):
    return model(input_ids=tokens).logits


def gradients(model):
    model.zero_grad()
    logits(model).log_softmax(-1)[..., 7].sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def cosine(a, b):
    return torch.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_heads_routers_and_norms_are_left_as_they_are(family):
    model = testing.tiny_model(family)
    names = {name: type(module) for name, module in model.named_modules()}
    parameters = dict(model.named_parameters())
    replaced = fp8.convert_linears(model, form=FORM)
    for name, module in model.named_modules():
        assert (name in replaced) == isinstance(module, fp8.Fp8Linear)
        if name not in replaced:
            assert type(module) is names[name]
    kept = {name for name, kind in names.items() if kind is nn.Linear} - set(replaced)
    assert kept == {"lm_head"}
    assert not any("norm" in one or "embed" in one or one.endswith(".gate") for one in replaced)
    assert {name: id(p) for name, p in model.named_parameters()} == {
        name: id(p) for name, p in parameters.items()
    }


def test_each_layer_and_gradient_is_close_and_the_depth_is_reported():
    """Cosines of 2, 4 and 8 layers: the bound is for one product, and errors add up."""
    found = {}
    for layers in (2, 8):
        model = testing.tiny_model("llama", num_hidden_layers=layers, hidden_size=64)
        other = copy.deepcopy(model)
        fp8.convert_linears(other, form=FORM)
        found[layers] = cosine(logits(model), logits(other))
        if layers == 2:
            exact, ours = gradients(model), gradients(other)
            assert exact.keys() == ours.keys()
            worst = min(cosine(exact[name], ours[name]) for name in exact)
            assert worst > 0.98
    assert found[2] > 0.995
    assert found[8] > 0.98
    assert found[8] < 1


def test_where_chooses_by_name():
    model = testing.tiny_model("llama")
    replaced = fp8.convert_linears(model, where=lambda name: "mlp" in name, form=FORM)
    assert len(replaced) == 2 * 3
    assert all("mlp" in name for name in replaced)
    with pytest.raises(ValueError, match="selected none of the linear layers of LlamaForCausalLM"):
        fp8.convert_linears(testing.tiny_model("llama"), where=lambda name: False)
    with pytest.raises(ValueError, match="lm_head is the head: loss.model_logprobs multiplies"):
        fp8.convert_linears(testing.tiny_model("llama"), where=lambda name: True)


@pytest.mark.parametrize(
    ("family", "head"), [("biogpt", "output_projection"), ("modernbert-decoder", "decoder")]
)
def test_a_head_of_another_name_is_left_out(family, head):
    model = tiny_family(family)
    replaced = fp8.convert_linears(model, form=FORM)
    assert replaced
    assert type(model.get_submodule(head)) is nn.Linear
    with pytest.raises(ValueError, match=f"{head} is the head"):
        fp8.convert_linears(tiny_family(family), where=lambda name: True, form=FORM)


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no torch.nn.Linear layers apart"):
        fp8.convert_linears(tiny_family("gpt2"), form=FORM)


def compiled(model):
    model.model.layers[0].compile(backend="eager")
    return model


def adapted(model):
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), model)
    return model


def quantized(model):
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (compiled, "the model is compiled already; apply these steps in the order fp8 -> adapters"),
        (adapted, "the model is adapted already; apply these steps in the order fp8 -> adapters"),
        (lambda m: parallel.recompute(m.train()), "set to recompute activations already"),
        (lambda m: fp8.convert_linears(m, form=FORM) and m, "call convert_linears once"),
        (quantized, r"up_proj has dtype torch.float8_e4m3fn, which can't be trained"),
    ],
)
def test_a_wrong_order_is_refused(change, reason):
    model = change(testing.tiny_model("llama"))
    with pytest.raises(ValueError, match=reason):
        fp8.convert_linears(model, form=FORM)


def test_a_backend_that_cannot_multiply_is_refused_before_training():
    model = testing.tiny_model("llama")
    with pytest.raises(ValueError, match="backend 'torch' can't multiply here"):
        fp8.convert_linears(model, backend="torch")
    assert not any(isinstance(module, fp8.Fp8Linear) for module in model.modules())


def test_shared_weights_are_refused():
    model = testing.tiny_model("llama")
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj shares its weight with .*layers.0"):
        fp8.convert_linears(model, form=FORM)


def test_recomputed_activations_give_the_same_gradients():
    model = testing.tiny_model("llama").train()
    fp8.convert_linears(model, form=FORM, weight_gradient="fp8")
    kept = gradients(model)
    parallel.recompute(model)
    again = gradients(model)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_an_adapter_is_on_a_base_in_fp8():
    """y = Q(x) Q(W)^T + s (x A^T) B^T: the adapter's own products are not in FP8."""
    model = testing.tiny_model("llama")
    replaced = fp8.convert_linears(model, form=FORM)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    layer = model.model.layers[0].self_attn.q_proj
    assert type(layer.base_layer) is fp8.Fp8Linear
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    a, b = layer.lora_A["default"], layer.lora_B["default"]
    assert type(a) is nn.Linear
    expected = layer.base_layer(x) + layer.scaling["default"] * b(a(x))
    torch.testing.assert_close(layer(x), expected)
    logits(model).sum().backward()
    assert layer.base_layer.weight.grad is None
    assert a.weight.grad.abs().sum() > 0
    assert len(replaced) == 2 * len(LINEAR)


def test_experts_multiply_in_fp8_and_replay_their_routes():
    tokens = TOKENS[0]
    positions, labels = torch.arange(len(tokens)), tokens.roll(-1)
    model = testing.tiny_model("qwen3_moe")
    exact = logits(model)
    fp8.convert_linears(model, form=FORM)
    divide_experts(model, matmul=fp8.GroupedMatmul(form=FORM))
    with torch.no_grad(), replay.capture(model) as captured:
        before = loss.model_logprobs(model, tokens, positions, labels)
    with replay.forced(model, captured.rows):
        after = loss.model_logprobs(model, tokens, positions, labels)
        after.sum().backward()
    assert torch.equal(before, after)
    assert 0.95 < cosine(exact, logits(model)) < 1
    assert model.model.layers[0].mlp.experts.down_proj.grad.abs().sum() > 0
