"""A model with an adapter, and an engine that holds the adapter's tensors like vLLM."""

import json
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file

from primerl import testing
from primerl._common.digests import digest_of, digest_of_all


def adapted(**config):
    model = testing.tiny_model("qwen3")
    settings = {"r": 4, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]} | config
    peft.inject_adapter_in_model(peft.LoraConfig(**settings), model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


class Holder:
    """An engine that holds an adapter like vLLM: A, and B times the scale from its files."""

    adapter = "policy"
    request_timeout_s = 600.0

    def __init__(self):
        self.updates = []

    def load_weights(self, update, *, version, timeout_s=600.0, send=None):
        self.updates.append(update)
        folder = Path(update["adapter"])
        config = json.loads((folder / "adapter_config.json").read_text())
        self.tensors = load_file(folder / "adapter_model.safetensors")
        scale = config["lora_alpha"] / config["r"]
        held = {}
        for name, tensor in self.tensors.items():
            layer = name.removeprefix("base_model.model.").partition(".lora_")[0]
            if "lora_A" in name:
                held[f"{layer}.A"] = digest_of(tensor)
            else:
                held[f"{layer}.B"] = digest_of(tensor * scale)
        digest = digest_of_all(held)
        receipt = {"version": version, "digest": digest, "tensors": len(held), "ignored": []}
        return {"http://here": [receipt]}
