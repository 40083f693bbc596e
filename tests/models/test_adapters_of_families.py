"""``models.adapter_targets`` of every admitted family: exact when merged, and alone in ``peft``."""

import peft
import pytest
import torch
from admitted_families import ADMITTED, MIXTURES, often

from primerl import models, parallel
from primerl.testing.families import tiny_family

# Transposed weights, tied embeddings, adapters outside the layers, and kinds of mixtures.
SOME = ["gpt2", "gemma4_text", "modernbert-decoder", "qwen2_moe", "glm4_moe", "longcat_flash"]
IDS = torch.arange(2, 14).unsqueeze(0)


class Tokenizer:
    def save_pretrained(self, folder):
        """Nothing: the model's tensors are compared."""


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS, use_cache=False).logits


def check_exact(model, family, folder, **config):
    plain = logits(model)
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **config)
    peft.inject_adapter_in_model(config, model)
    parallel.shard(model)  # refuses what could not be saved
    expected = logits(model)
    assert (expected - plain).abs().max() > 0.01 * expected.abs().max()
    close = {"rtol": 0, "atol": 1e-4 * expected.abs().max().item()}

    models.save_adapters(model, folder / "alone")
    alone = peft.PeftModel.from_pretrained(tiny_family(family), folder / "alone")
    torch.testing.assert_close(logits(alone), expected, **close)
    models.save_pretrained(model, folder / "merged", tokenizer=Tokenizer())
    merged = type(model).from_pretrained(folder / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), expected, **close)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", often(ADMITTED, always=SOME))
def test_logits_are_those_of_the_trainer(family, tmp_path):
    model = tiny_family(family)
    targets = models.adapter_targets(model)

    check_exact(model, family, tmp_path, target_modules=targets)

    adapted = {name for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    assert adapted == set(targets)


@pytest.mark.parametrize("family", often(MIXTURES, always=SOME))
def test_adapters_of_routed_experts(family, tmp_path):
    stacks = [f"experts.{name}" for name in ("gate_up_proj", "up_proj", "down_proj")]
    check_exact(tiny_family(family), family, tmp_path, target_modules=[], target_parameters=stacks)


def test_the_layers_of_a_mixture_and_of_a_dense_model():
    assert set(SOME) <= set(ADMITTED)
    mixture = {name.split(".", 3)[3] for name in models.adapter_targets(tiny_family("qwen2_moe"))}
    assert mixture == {f"self_attn.{name}_proj" for name in "qkvo"}
    dense = {name.split(".", 3)[3] for name in models.adapter_targets(tiny_family("qwen2"))}
    assert dense == mixture | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    with pytest.raises(ValueError, match="ReLU has no linear layer to adapt, except its head"):
        models.adapter_targets(torch.nn.ReLU())
