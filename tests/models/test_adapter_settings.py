"""Each setting of ``peft``: right when merged, saved alone and resumed, or refused before a run."""

import peft
import pytest
import torch
from adapter_holder import Holder

from primerl import checkpoint, models, parallel, weights
from primerl.testing.families import tiny_family

IDS = torch.arange(2, 14).unsqueeze(0)
TARGETS = ["q_proj", "v_proj", "down_proj"]


def adapted(family="qwen3", *, base=None, name="default", **config):
    model = base or tiny_family(family)
    settings = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS} | config)
    peft.inject_adapter_in_model(settings, model, adapter_name=name)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if f".{name}." in parameter_name and parameter.ndim > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS, use_cache=False).logits


class Tokenizer:
    def save_pretrained(self, folder):
        """Nothing: the model's tensors are compared."""


def check_exact(model, family, folder, *, adapter="default"):
    """Merged, alone in plain ``peft``, and resumed: the logits are those of the trainer."""
    expected = logits(model)
    assert (expected - logits(tiny_family(family))).abs().max() > 0.01 * expected.abs().max()
    close = {"rtol": 0, "atol": 1e-5 * expected.abs().max().item()}

    models.save_pretrained(model, folder / "merged", tokenizer=Tokenizer())
    merged = type(model).from_pretrained(folder / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), expected, **close)

    models.save_adapters(model, folder / "alone", adapter=adapter)
    alone = peft.PeftModel.from_pretrained(tiny_family(family), folder / "alone")
    torch.testing.assert_close(logits(alone), expected, **close)


def check_resumed(model, fresh, folder):
    def saves(one):
        trained = [parameter for parameter in one.parameters() if parameter.requires_grad]
        return checkpoint.Checkpoints(folder, one, torch.optim.SGD(trained, lr=0.1))

    with saves(model) as first:
        first.load(None)
        first.save(1, wait=True)
    with saves(fresh) as second:
        assert second.load(checkpoint.last_good(folder)) == 1
    assert torch.equal(logits(fresh), logits(model))


RIGHT = {
    "rank-stabilized": {"use_rslora": True},
    "patterns": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"down_proj": 5}},
    "some layers": {"layers_to_transform": [1]},
    "without some modules": {"exclude_modules": r".*layers\.0\..*"},
    "dropout": {"lora_dropout": 0.5},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "eva": {"init_lora_weights": "eva", "eva_config": peft.EvaConfig()},
    "the head": {"target_modules": ["lm_head", "q_proj"]},
    "every linear layer": {"target_modules": "all-linear"},
    "biases of adapted layers": {"bias": "lora_only"},
    "all biases": {"bias": "all"},
}


@pytest.mark.parametrize("setting", RIGHT)
def test_a_setting_is_exact(setting, tmp_path):
    family = "qwen2" if "bias" in setting else "qwen3"  # qwen2 has biases
    model = adapted(family, **RIGHT[setting])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter.add_(0.3)

    check_exact(model, family, tmp_path)
    fresh = adapted(family, **RIGHT[setting])
    check_resumed(model, fresh, tmp_path / "run")


def test_a_checkpoint_of_another_scale_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\{'2.0': 6\}\} saved, \{'default': \{'3.0': 6\}\} here"):
        check_resumed(adapted(), adapted(lora_alpha=12), tmp_path)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
def test_conv1d_layers_which_store_the_transposed_weight(tmp_path):
    model = adapted("gpt2", target_modules=["c_attn", "c_fc"])
    check_exact(model, "gpt2", tmp_path)


def test_parameters_that_are_trained_beside_the_adapter(tmp_path):
    """Also a whole module, which is the advice that is given instead of ``modules_to_save``."""
    model = adapted()
    with torch.no_grad():
        for parameter in (model.lm_head.weight, model.model.norm.weight):
            parameter.requires_grad_(True).mul_(1.3)
    check_exact(model, "qwen3", tmp_path)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_adapters_of_other_layers(tmp_path):
    """Two are active, but each only where it is; then one is, and the other is left out."""
    model = adapted("qwen3")
    adapted(base=model, name="second", target_modules=["k_proj"])
    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            layer.set_adapter(["default", "second"])
    expected = logits(model)
    models.save_pretrained(model, tmp_path / "both", tokenizer=Tokenizer())
    merged = type(model).from_pretrained(tmp_path / "both", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="k_proj also applies the adapter 'second', and engines"):
        weights.Adapter(model, Holder())

    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            layer.set_adapter(["second"])
    check_exact(model, "qwen3", tmp_path, adapter="second")


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize("family", ["qwen3_moe", "aria_text", "granitemoe"])
@pytest.mark.parametrize("parameters", [EXPERTS, EXPERTS[1:]], ids=["both stacks", "one stack"])
def test_adapters_of_experts(family, parameters, tmp_path):
    """Of stacks ``[e, o, i]``, and of aria's ``[e, i, o]``."""
    config = {"target_modules": ["q_proj"], "target_parameters": parameters}
    model = adapted(family, **config, rank_pattern={"q_proj": 2}, use_rslora=True)

    check_exact(model, family, tmp_path)

    fresh = adapted(family, **config, rank_pattern={"q_proj": 2}, use_rslora=True)
    check_resumed(model, fresh, tmp_path / "run")
    with pytest.raises(ValueError, match="experts is of experts, which engines don't receive alon"):
        weights.Adapter(model, Holder())
    with pytest.raises(ValueError, match=r"experts has an adapter, .* use a mesh with ep=1"):
        parallel.divide_experts(model)


def test_a_model_that_peft_wrapped_is_unwrapped(tmp_path):
    config = peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)
    wrapped = peft.get_peft_model(tiny_family("qwen3"), config)
    with pytest.raises(ValueError, match=r"in peft's PeftModel.* call get_base_model\(\) on"):
        parallel.shard(wrapped)
    check_exact(wrapped.get_base_model(), "qwen3", tmp_path)


# ---- refused ----


def all_linear():
    """Adapters of all layers that ``peft`` calls linear; in a mixture, also of the routers."""
    return adapted("qwen3_moe", target_modules="all-linear")


def with_other_method(config):
    model = tiny_family("qwen3")
    peft.inject_adapter_in_model(config, model)
    return model


def wrapped(config):
    """A method whose layers share state, which ``peft`` keeps in a wrapper of the model."""
    return peft.get_peft_model(tiny_family("qwen3"), config)


def merged_layers():
    model = adapted()
    model.model.layers[1].self_attn.q_proj.merge()
    return model


def disabled_layers():
    model = adapted()
    model.model.layers[1].self_attn.q_proj.enable_adapters(False)
    return model


def scaled_layers():
    model = adapted()
    model.model.layers[1].self_attn.q_proj.set_scale("default", 3)
    return model


def added_by_transformers():
    model = tiny_family("qwen3")
    model.add_adapter(peft.LoraConfig(r=4, target_modules=TARGETS))
    return model


REFUSED = {
    "routers": (all_linear, r"mlp.gate is not .*such as a router.*models.adapter_targets"),
    "DoRA": (lambda: adapted(use_dora=True), r"q_proj is not .*use_dora.*adapter_targets"),
    "activated LoRA": (
        lambda: adapted(task_type="CAUSAL_LM", alora_invocation_tokens=[3]),
        r"q_proj is not .*variant",
    ),
    "bias of the adapter": (lambda: adapted(lora_bias=True), r"q_proj is not .*\(lora_bias\)"),
    "copies of modules": (
        lambda: adapted(modules_to_save=["lm_head"]),
        r"lm_head is not .*\(modules_to_save\).* call requires_grad_\(True\) on the module",
    ),
    "tokens": (
        lambda: adapted(trainable_token_indices=[1, 2]),
        r"embed_tokens is not .*\(trainable_token_indices\)",
    ),
    "embeddings": (
        lambda: adapted(target_modules=["embed_tokens", "q_proj"]),
        r"embed_tokens is not .*LoRA of an embedding; leave it out of target_modules",
    ),
    "tied head": (
        lambda: adapted(
            base=tiny_family("qwen3", tie_word_embeddings=True), target_modules=["lm_head"]
        ),
        r"lm_head is not .*another module shares \(tie_word_embeddings\)",
    ),
    "PiSSA": (lambda: adapted(init_lora_weights="pissa"), "init_lora_weights='pissa', which can"),
    "OLoRA": (lambda: adapted(init_lora_weights="olora"), "init_lora_weights='olora', which can"),
    "more layers": (
        lambda: adapted(layer_replication=[(0, 2), (1, 2)]),
        r"repeats layers \(layer_replication\)",
    ),
    "merged": (merged_layers, r"layers.1.self_attn.q_proj is not .*but merged \(call unmerge"),
    "disabled": (disabled_layers, r"layers.1.self_attn.q_proj is not .*but disabled"),
    "scaled": (scaled_layers, r"layers.1.self_attn.q_proj is not .*scale was changed"),
    "transformers": (added_by_transformers, r"transformers added the model's adapters"),
    "VERA": (
        lambda: wrapped(peft.VeraConfig(target_modules=["o_proj"])),
        "peft's type VERA, which",
    ),
    "embeddings that stay tied": (
        lambda: adapted(
            base=tiny_family("qwen3", tie_word_embeddings=True),
            target_modules=["lm_head", "embed_tokens"],
            ensure_weight_tying=True,
        ),
        "embed_tokens is not .*LoRA of an embedding",
    ),
    **{
        config.peft_type.value: (
            lambda config=config: with_other_method(config),
            f"adapter 'default' is of peft's type {config.peft_type.value}, which cannot be merged",
        )
        for config in (
            peft.IA3Config(target_modules=["v_proj"], feedforward_modules=[]),
            peft.LoHaConfig(target_modules=["v_proj"]),
            peft.LoKrConfig(target_modules=["q_proj"]),
            peft.OFTConfig(target_modules=["q_proj"], oft_block_size=8, r=0),
            peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10),
        )
    },
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
def test_a_setting_is_refused_before_the_first_step(kind, tmp_path):
    make, message = REFUSED[kind]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for use in (
        lambda: parallel.shard(model),
        lambda: checkpoint.Checkpoints(tmp_path / "run", model, optimizer),
        lambda: weights.Disk(model, Merged(), folder=tmp_path),
        lambda: weights.SharedMemory(model, Merged()),
        lambda: weights.Adapter(model, Holder()),
        lambda: models.save_pretrained(model, tmp_path / "final", tokenizer=Tokenizer()),
        lambda: models.save_adapters(model, tmp_path / "adapter"),
    ):
        with pytest.raises(ValueError, match=message):
            use()


class Merged:
    """An engine that takes merged weights."""
