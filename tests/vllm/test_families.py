"""Publication to vLLM servers of families with recurrent layers, or with attention sinks.

    python -m pytest tests/vllm/test_families.py -m slow

What vLLM 0.32 cannot serve on a CPU is in docs/vllm.md. These servers take half a minute each.
"""

import pytest
import torch
import transformers

from primerl import models, serving, testing, weights
from primerl.testing.families import tiny_config

pytestmark = pytest.mark.slow

FAMILIES = {
    "qwen3_next": {
        "head_dim": 64,
        "moe_intermediate_size": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "gpt_oss": {},
    "nemotron_h": {"head_dim": 64, "layers_block_type": ["mamba", "attention", "mlp"]},
}
DTYPE = torch.bfloat16  # vLLM's delta rule for CPUs has no other


@pytest.fixture
def served(request, tmp_path, serve_family):
    """A trainer's model of a family, and an engine of a server that started with it."""
    family = request.param
    config = tiny_config(
        family, vocab_size=512, max_position_embeddings=1024, initializer_range=0.1,
        **FAMILIES[family],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(DTYPE)
    models.save_pretrained(model, tmp_path, tokenizer=testing.chat_tokenizer())
    with serve_family(str(tmp_path)) as server:
        with serving.VLLMEngine([server], run="families") as engine:
            yield model, engine


def move(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("served", ["qwen3_next"], indirect=True)
def test_the_canary_sees_what_was_published(served):
    model, engine = served
    transport = weights.SharedMemory(model, engine)
    canary = weights.Canary(model, engine, count=3, length=64, new_tokens=6, dtype=DTYPE)
    transport.publish(0)
    first = canary.check(0)
    move(model)
    transport.publish(1)
    second = canary.check(1)

    for verdict in (first, second):
        assert verdict.passed, verdict.reason
        assert "tensors are the trainer's bit for bit" in verdict.reason
    assert "of the change seen" in second.reason


@pytest.mark.parametrize("served", ["nemotron_h"], indirect=True)
def test_names_of_state_space_layers_are_those_of_vllm(served):
    """Receipts cover every tensor; the forward pass needs a GPU."""
    model, engine = served
    assert engine.cache_block > 288, "longer than a canary that ignores it"
    transport = weights.SharedMemory(model, engine)
    for version in range(2):
        move(model)
        assert transport.publish(version)


@pytest.mark.parametrize("served", ["gpt_oss"], indirect=True)
def test_experts_that_vllm_does_not_reload_are_named(served):
    model, engine = served
    with pytest.raises(RuntimeError, match=r"mlp\.experts\.routed_experts \(0 of"):
        weights.SharedMemory(model, engine).publish(0)
