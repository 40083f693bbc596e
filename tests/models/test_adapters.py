"""Low-rank adapters: what is published, and what is saved. Sharded ones: test_expert_parallel."""

import json

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from primerl import loss, models, parallel, testing
from primerl._common.checkpoint_tensors import checkpoint_layout

IDS = torch.arange(2, 14)
ROWS = (IDS, torch.arange(12), IDS.roll(-1))


def adapted(family="qwen3", **config):
    model = testing.tiny_model(family)
    settings = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | config
    )
    peft.inject_adapter_in_model(settings, model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_stream_has_adapters_added_to_the_weights(family):
    """Against a model whose weights are those of the stream."""
    model, plain = adapted(family), testing.tiny_model(family)

    sent = dict(models.checkpoint_tensors(model))

    assert sent.keys() == dict(models.checkpoint_tensors(plain)).keys()
    layer = model.model.layers[1].self_attn.q_proj
    by_hand = layer.base_layer.weight + 2.0 * (
        layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    )
    torch.testing.assert_close(sent["model.layers.1.self_attn.q_proj.weight"], by_hand)
    own = plain.state_dict()
    plain.load_state_dict({n: sent.get(n, t) for n, t in own.items()})
    expected = loss.model_logprobs(model, *ROWS)
    torch.testing.assert_close(loss.model_logprobs(plain, *ROWS), expected, atol=2e-6, rtol=0)
    assert (expected - loss.model_logprobs(testing.tiny_model(family), *ROWS)).abs().max() > 1e-3


def test_the_sum_is_rounded_once():
    model = adapted()
    name = "model.layers.0.self_attn.v_proj.weight"

    whole = dict(models.checkpoint_tensors(model))[name]
    rounded = dict(models.checkpoint_tensors(model, dtype=torch.bfloat16))[name]

    assert torch.equal(rounded, whole.to(torch.bfloat16))


def test_the_folder_can_be_loaded_by_peft(tmp_path):
    model = adapted()

    models.save_adapters(model, tmp_path / "adapter")

    loaded = peft.PeftModel.from_pretrained(testing.tiny_model("qwen3"), tmp_path / "adapter")
    ids = IDS.unsqueeze(0)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    models.save_adapters(model, tmp_path / "adapter")  # in place of the earlier one
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_what_cannot_be_merged_or_saved_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a plain, unmerged LoRA"):
        dict(models.checkpoint_tensors(adapted(use_dora=True)))
    with pytest.raises(ValueError, match="has no adapter 'default'; its adapters: none. Add one"):
        models.save_adapters(testing.tiny_model("qwen3"), tmp_path / "adapter")
    with pytest.raises(ValueError, match="folder is None"):
        models.save_adapters(adapted(), None)
    testing.tiny_model("qwen3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="load the checkpoint before"):
        models.load_shards(adapted(), tmp_path)


def prompt_tuned(kind):
    """A model with an adapter of a type that puts tokens before a sequence."""
    settings = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    if kind == "CPT":
        ids = list(range(4))
        settings = {
            "task_type": "CAUSAL_LM", "cpt_token_ids": ids, "cpt_mask": [1] * 4,
            "cpt_tokens_type_mask": [1] * 4,
        }  # fmt: skip
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind](**settings)
    return peft.get_peft_model(testing.tiny_model("qwen3"), config)


VIRTUAL = sorted(
    kind.value
    for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()
    if issubclass(config, peft.PromptLearningConfig)
)


@pytest.mark.parametrize("kind", VIRTUAL)
def test_adapters_that_add_tokens_are_refused_by_name(kind):
    model = prompt_tuned(kind)

    for use in (
        lambda: loss.model_logprobs(model, *ROWS),
        lambda: loss.model_logprobs_and_entropy(model, *ROWS),
        lambda: parallel.shard(model),
        lambda: parallel.recompute(model),
        lambda: dict(models.checkpoint_tensors(model)),
        lambda: checkpoint_layout(model),
    ):
        with pytest.raises(
            ValueError, match=f"adapter 'default' is of peft's type {kind} .*tokens"
        ):
            use()


@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(target_modules=["v_proj"], feedforward_modules=[]),
        peft.LoHaConfig(target_modules=["v_proj"]),
        peft.LoKrConfig(target_modules=["q_proj"]),
    ],
)
def test_adapters_that_cannot_be_added_to_weights_are_not_published(config):
    model = testing.tiny_model("qwen3")
    peft.inject_adapter_in_model(config, model)

    with pytest.raises(ValueError, match=f"peft's type {config.peft_type.value}, which cannot"):
        dict(models.checkpoint_tensors(model))
