"""weights.Adapter: what it writes, what it sends, what it keeps and what it refuses."""

import gc
import time
from pathlib import Path

import peft
import pytest
import torch
from adapter_holder import Holder, adapted

from primerl import models, rollout, testing, weights


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_adapter_alone_is_sent_and_arrives(tmp_path, dtype):
    model, engine = adapted(), Holder()

    receipt = weights.Adapter(model, engine, folder=tmp_path, dtype=dtype).publish(3)

    (update,) = engine.updates
    folder = Path(update["adapter"])
    assert folder.parent == tmp_path
    assert update["rank"] == 4
    assert update["layers"] == [
        f"model.layers.{layer}.self_attn.{name}"
        for layer in (0, 1)
        for name in ("q_proj", "v_proj")
    ]
    assert (receipt.version, receipt.kind, receipt.tensors) == (3, "adapter", 8)
    assert receipt.bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert set(receipt.seconds) == {"gather", "encode", "write", "load"}
    own = model.model.layers[1].self_attn.v_proj.lora_B["default"].weight
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    assert torch.equal(engine.tensors[name], own.to(dtype or torch.float32))


def test_another_scale_is_caught(tmp_path):
    class Doubling(Holder):
        def load_weights(self, update, **options):
            path = Path(update["adapter"]) / "adapter_config.json"
            path.write_text(path.read_text().replace('"lora_alpha": 3', '"lora_alpha": 6'))
            return super().load_weights(update, **options)

    with pytest.raises(RuntimeError, match="version 0 did not arrive: digest"):
        weights.Adapter(adapted(), Doubling(), folder=tmp_path).publish(0)


def test_folders_stay_as_long_as_a_request_may_need_them(tmp_path):
    engine = Holder()
    transport = weights.Adapter(adapted(), engine, folder=tmp_path)
    for version in range(3):
        transport.publish(version)
    assert len(list(tmp_path.iterdir())) == 3
    engine.request_timeout_s = 0.01
    time.sleep(0.02)
    transport.publish(2)  # again, in a folder of its own
    left = sorted(path.name.split("-")[0] for path in tmp_path.iterdir())
    assert left == ["00000002", "00000002"]  # the one before was replaced just now
    assert Path(engine.updates[-1]["adapter"]).is_dir()


def test_without_a_folder_it_is_in_memory_and_removed_at_the_end():
    engine = Holder()
    transport = weights.Adapter(adapted(), engine)
    transport.publish(0)
    folder = Path(engine.updates[0]["adapter"])
    assert folder.is_dir()
    del transport
    gc.collect()
    assert not folder.exists()


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_one_adapter_of_two(tmp_path):
    model, engine = adapted(), Holder()
    config = peft.LoraConfig(r=2, lora_alpha=1, target_modules=["k_proj"])
    peft.inject_adapter_in_model(config, model, adapter_name="second")

    receipt = weights.Adapter(model, engine, folder=tmp_path, adapter="second").publish(0)

    assert receipt.tensors == 4
    assert all(".k_proj.lora_" in name for name in engine.tensors)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "not a plain, unmerged LoRA"),
        ({"target_modules": ["embed_tokens"]}, "not a plain, unmerged LoRA"),
        ({"bias": "all", "target_modules": ["q_proj"]}, "trained too"),
        ({"modules_to_save": ["lm_head"]}, "a copy that is trained"),
    ],
)
def test_what_engines_cannot_add_is_refused(tmp_path, config, message):
    model = adapted(**{"target_modules": ["q_proj"]} | config)
    if config.get("bias"):
        model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=message):
        weights.Adapter(model, Holder(), folder=tmp_path)


def test_weights_that_are_trained_beside_it_are_refused_when_they_begin_to_be(tmp_path):
    model = adapted()
    transport = weights.Adapter(model, Holder(), folder=tmp_path)
    model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"model.norm.weight is trained too \(1 parameters"):
        transport.publish(0)


def test_engines_and_transports_that_do_not_fit_are_refused(tmp_path):
    model, engine = adapted(), Holder()
    for merged in (weights.SharedMemory, lambda *a: weights.Disk(*a, folder=tmp_path)):
        with pytest.raises(ValueError, match="samples under the adapter 'policy', so it takes"):
            merged(model, engine)
    with rollout.TransformersEngine(testing.tiny_model("qwen3")) as here:
        with pytest.raises(ValueError, match="an engine in this process takes merged weights"):
            weights.transport_to(model, here, publish="adapter")
    with pytest.raises(ValueError, match="the model has no adapter 'default'; its adapters: none"):
        weights.Adapter(testing.tiny_model("qwen3"), engine)
    with pytest.raises(ValueError, match=r'publish=.both.; expected "merged" or "adapter"'):
        weights.transport_to(model, engine, publish="both")
    with pytest.raises(ValueError, match="adapters are sent whole"):
        weights.transport_to(model, engine, publish="adapter", encoding="delta")


def test_the_weights_without_adapters():
    """What a canary compares with the base model of a server."""
    sent = dict(models.checkpoint_tensors(adapted(), merge_adapters=False))
    plain = dict(models.checkpoint_tensors(testing.tiny_model("qwen3")))
    assert sent.keys() == plain.keys()
    assert all(torch.equal(sent[name], plain[name]) for name in plain)
