"""Fine-grained FP8 checkpoints, and the bytes that engines get: those the trainer multiplies by."""

import functools
import json

import pytest
import torch
import transformers
from copy_engine import ReadableEngine
from publishing import Replicas, train

from primerl import fp8, models, testing, weights
from primerl._common.checkpoint_tensors import checkpoint_tensors
from primerl._common.digests import digest_of
from primerl._common.tensor_files import map_tensors
from primerl.fp8.quantization import weight
from primerl.parallel.expert_parallel.experts import divide_experts
from primerl.weights.verification.served_tensors import TensorSlice, as_builtins, reading_of

BLOCK = 16
FORMS = {scale: fp8.Format.of_blocks(BLOCK, scale=scale) for scale in ("float32", "ue8m0")}
dequantize = functools.partial(fp8.dequantize, block=BLOCK)


class NoTokenizer:
    def save_pretrained(self, folder):
        pass


def converted(family="llama", scale="float32", **config):
    model = testing.tiny_model(family, **config)
    fp8.convert_linears(model, form=FORMS[scale])
    return model


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def quantized_names(tensors):
    return {name.removesuffix("_scale_inv") for name in tensors if name.endswith("_scale_inv")}


def saved(folder, model, quantize):
    models.save_pretrained(model, folder, tokenizer=NoTokenizer(), quantize=quantize)
    return map_tensors(folder / "model.safetensors")


@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
def test_a_checkpoint_has_the_bytes_that_the_trainer_multiplies_with(tmp_path, scale):
    model = converted(scale=scale)
    quantize = fp8.CheckpointQuantizer(model)
    tensors = saved(tmp_path / "model", model, quantize)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, fp8.Fp8Linear)}
    for name, layer in layers.items():
        operand = weight(layer.weight, layer.form)
        assert torch.equal(bits(tensors[f"{name}.weight"]), bits(operand.values))
        assert tensors[f"{name}.weight_scale_inv"].dtype == operand.scales.dtype
        assert torch.equal(bits(tensors[f"{name}.weight_scale_inv"]), bits(operand.scales))
    others = {n for n in tensors if "_proj" not in n}
    assert {tensors[name].dtype for name in others} == {torch.float32}
    assert len(tensors) == len(others) + 2 * len(layers)
    config = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    assert config["weight_block_size"] == [BLOCK, BLOCK]
    assert config.get("scale_fmt") == {"float32": None, "ue8m0": "ue8m0"}[scale]
    assert config["modules_to_not_convert"] == ["lm_head"]


@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
def test_it_is_loaded_again_and_saved_with_the_same_values(tmp_path, scale):
    model = converted(scale=scale)
    tensors = saved(tmp_path / "first", model, fp8.CheckpointQuantizer(model))
    again = models.empty_model(tmp_path / "first")
    models.load_shards(again, tmp_path / "first", dequantize=dequantize)
    state = again.state_dict()
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        scales = tensors.get(f"{name}_scale_inv")
        expected = tensor if scales is None else dequantize(tensor, scales)
        assert torch.equal(state[name], expected)
    fp8.convert_linears(again, form=FORMS[scale])
    second = saved(tmp_path / "second", again, fp8.CheckpointQuantizer(again))
    assert second.keys() == tensors.keys()
    for name in tensors.keys() & quantized_names(tensors):
        # Scales in float32 may be a rounding apart: 448 * (amax / 448) / 448. Powers of two may be
        # half as large, with values twice as large.
        first, other = (dequantize(t[name], t[f"{name}_scale_inv"]) for t in (tensors, second))
        torch.testing.assert_close(other, first, rtol=2.0**-23 if scale == "float32" else 0, atol=0)
    models.save_pretrained(again, tmp_path / "plain", tokenizer=NoTokenizer())
    assert "quantization" not in (tmp_path / "plain" / "config.json").read_text()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_transformers_loads_it(tmp_path, family):
    """On a CPU, it dequantizes to the dtype that is asked for."""
    model = converted(family)
    matmul = fp8.GroupedMatmul(form=FORMS["float32"]) if family == "qwen3_moe" else None
    tensors = saved(tmp_path / "model", model, fp8.CheckpointQuantizer(model, experts=matmul))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    )
    plain = models.empty_model(tmp_path / "model")
    models.load_shards(plain, tmp_path / "model", dequantize=dequantize)
    state = loaded.state_dict()
    assert len(quantized_names(tensors)) >= 14
    for name, tensor in plain.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_experts_have_the_bytes_that_they_are_multiplied_by():
    form = FORMS["float32"]
    model = converted("qwen3_moe", moe_intermediate_size=32)
    matmul = fp8.GroupedMatmul(form=form)
    divide_experts(model, matmul=matmul)
    quantize = fp8.CheckpointQuantizer(model, experts=matmul)
    sent = dict(checkpoint_tensors(model, quantize=quantize))
    experts = model.model.layers[1].mlp.experts
    up, down = weight(experts.gate_up_proj, form), weight(experts.down_proj, form)
    prefix = "model.layers.1.mlp.experts.3"
    assert torch.equal(bits(sent[f"{prefix}.gate_proj.weight"]), bits(up.values[3, :32]))
    assert torch.equal(bits(sent[f"{prefix}.up_proj.weight"]), bits(up.values[3, 32:]))
    assert torch.equal(sent[f"{prefix}.up_proj.weight_scale_inv"], up.scales[3, 2:])
    assert torch.equal(sent[f"{prefix}.down_proj.weight_scale_inv"], down.scales[3])
    assert "model.layers.1.mlp.gate" in quantize.config["modules_to_not_convert"]
    without = fp8.CheckpointQuantizer(model)
    assert "model.layers.1.mlp.experts" in without.config["modules_to_not_convert"]
    plain = dict(checkpoint_tensors(model, quantize=without))
    assert plain[f"{prefix}.down_proj.weight"].dtype == torch.float32


def test_weights_are_quantized_from_what_the_trainer_computes_in():
    """Other tensors travel in the engine's dtype; these from their masters, or the trainer's."""
    model = converted()
    name = "model.layers.0.mlp.up_proj.weight"
    master = model.get_parameter(name)
    for dtype in (None, torch.bfloat16):
        quantize = fp8.CheckpointQuantizer(model, dtype=dtype)
        sent = dict(checkpoint_tensors(model, dtype=torch.bfloat16, quantize=quantize))
        q, scales = fp8.quantize_weight(master.to(dtype or torch.float32), block=BLOCK)
        assert torch.equal(bits(sent[name]), bits(q))
        assert torch.equal(sent[f"{name}_scale_inv"], scales)
        assert sent["lm_head.weight"].dtype == torch.bfloat16


def test_what_a_checkpoint_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="nothing in FP8; call fp8.convert_linears first"):
        fp8.CheckpointQuantizer(testing.tiny_model("llama"))
    moe = converted("qwen3_moe", moe_intermediate_size=24)
    matmul = fp8.GroupedMatmul(form=FORMS["float32"])
    with pytest.raises(ValueError, match="fuses two matrices of 24 rows.*a block of 16 rows"):
        fp8.CheckpointQuantizer(moe, experts=matmul)
    with pytest.raises(ValueError, match="stores its matrices transposed"):
        fp8.CheckpointQuantizer(converted("gpt_oss"), experts=matmul)
    other = fp8.GroupedMatmul(form=FORMS["ue8m0"])
    with pytest.raises(ValueError, match="has several FP8 formats"):
        fp8.CheckpointQuantizer(converted("qwen3_moe"), experts=other)
    with pytest.raises(ValueError, match="has no stacked experts"):
        fp8.CheckpointQuantizer(converted(), experts=matmul)
    model = testing.tiny_model("llama")
    fp8.convert_linears(model, form=fp8.MXFP8)
    with pytest.raises(ValueError, match="blocks of 1 x 32.*have square blocks"):
        fp8.CheckpointQuantizer(model)
    model = converted()
    import peft

    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), model)
    with pytest.raises(ValueError, match="publish only the adapter"):
        fp8.CheckpointQuantizer(model)


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_engines_receive_those_bytes(tmp_path, encoding):
    model = converted()
    quantize = fp8.CheckpointQuantizer(model)
    engines = Replicas(2)
    transport = weights.Disk(
        model, engines, folder=tmp_path, encoding=encoding, dtype=torch.bfloat16, quantize=quantize
    )
    sizes = []
    for version in range(3):
        receipt = transport.publish(version)
        sizes.append(receipt.bytes)
        sent = dict(checkpoint_tensors(model, dtype=torch.bfloat16, quantize=quantize))
        for server in engines.workers.values():
            assert server.tensors.keys() == sent.keys()
            assert all(digest_of(server.tensors[n]) == digest_of(t) for n, t in sent.items())
        train(model, scale=1e-3, fraction=1e-3, seed=version)
    kinds = [server.kinds for server in engines.workers.values()]
    assert kinds == [["full", *[encoding] * 2]] * 2
    if encoding == "delta":
        assert max(sizes[1:]) < sizes[0]
    engines.close()


def test_an_engine_in_this_process_is_refused():
    model = converted()
    with pytest.raises(ValueError, match="copies the trainer's master weights"):
        weights.SharedMemory(model, ReadableEngine(model), quantize=fp8.CheckpointQuantizer(model))
    with pytest.raises(ValueError, match="quantize= needs publish="):
        weights.transport_to(
            model, None, publish="adapter", quantize=fp8.CheckpointQuantizer(model)
        )


class QuantizedEngine(ReadableEngine):
    """Says what it holds as a server of an FP8 checkpoint does."""

    def __init__(self, model, quantize):
        super().__init__(model)
        self.quantize, self.fault = quantize, lambda name, tensor: tensor

    def read_weights(self, names, *, turn=0, timeout_s=60.0):
        return {
            server: as_builtins(
                reading_of(self.fault(name, tensor), TensorSlice(name=name))
                for name, tensor in checkpoint_tensors(one.model, quantize=self.quantize)
                if name in names
            )
            for server, one in self.servers.items()
        }


def test_the_canary_compares_values_and_scales():
    model = converted()
    quantize = fp8.CheckpointQuantizer(model)
    engine = QuantizedEngine(model, quantize)
    canary = weights.Canary(
        model, engine, length=40, count=1, dtype=torch.bfloat16, quantize=quantize
    )
    first = canary.check(0)
    assert first.passed, first.reason
    name = "model.layers.1.mlp.up_proj.weight"
    faults = {
        f"{name}_scale_inv": lambda t: t.bfloat16().float(),
        name: lambda t: (bits(t) ^ 1).view(t.dtype),
    }
    for wrong, change in faults.items():
        engine.fault = lambda n, t, wrong=wrong, change=change: change(t) if n == wrong else t
        verdict = canary.check(1)
        assert not verdict.passed
        assert wrong in verdict.reason
