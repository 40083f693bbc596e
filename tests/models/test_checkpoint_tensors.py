import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef

from primerl import models, testing
from primerl._common import checkpoint_tensors as checkpoint
from primerl.testing.families import tiny_family

FAMILIES = ["llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "minimax_m2"]


def saved(model, folder):
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_values_are_those_of_save_pretrained(family, tmp_path):
    model = testing.tiny_model(family)

    tensors = dict(models.checkpoint_tensors(model))

    expected = saved(model, tmp_path)
    assert set(tensors) == set(expected)
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    layout = checkpoint.checkpoint_layout(model)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()} == {
        n: (entry.dtype, entry.shape) for n, entry in layout.items()
    }


def test_a_tied_tensor_comes_once(tmp_path):
    model = testing.tiny_model("llama", tie_word_embeddings=True)
    assert set(dict(models.checkpoint_tensors(model))) == set(saved(model, tmp_path))


def test_parameters_are_cast_and_a_routing_bias_is_not():
    model = testing.tiny_model("glm4_moe")
    tensors = dict(models.checkpoint_tensors(model, dtype=torch.bfloat16))
    kept = {name for name, tensor in tensors.items() if tensor.dtype != torch.bfloat16}
    assert kept == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    layout = checkpoint.checkpoint_layout(model, dtype=torch.bfloat16)
    assert {n: t.dtype for n, t in tensors.items()} == {n: e.dtype for n, e in layout.items()}


def test_no_more_than_a_layer_is_held():
    """In bfloat16 every tensor is a copy; what is alive must never exceed a layer of copies."""
    model = testing.tiny_model("qwen3_moe", num_hidden_layers=6)
    layer = 2 * sum(p.numel() for p in model.model.layers[0].parameters())
    seen, peak = {}, 0
    for _, tensor in models.checkpoint_tensors(model, dtype=torch.bfloat16):
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        del tensor, storage
        peak = max(peak, sum(size for ref, size in seen.values() if not ref.expired()))
    whole = 2 * sum(p.numel() for p in model.parameters())
    assert 0 < peak <= 2 * layer < whole / 2  # experts: one fused and those cut from it


def test_a_sharded_model_has_the_names_of_its_own_class():
    """Those of DeepSeek-V4 depend on the root's class, which FSDP2 replaces by its own."""
    model = tiny_family("deepseek_v4")
    names = [name for name, _ in models.checkpoint_tensors(model)]

    model.__class__ = type("FSDPDeepseekV4ForCausalLM", (FSDPModule, type(model)), {})

    assert "head.weight" in names
    assert [name for name, _ in models.checkpoint_tensors(model)] == names
