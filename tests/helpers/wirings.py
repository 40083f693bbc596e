"""A recipe's model and optimizer setup in small, called by both a real run and a plan."""

import torch

from primerl import optim, parallel, planning
from primerl.testing.families import tiny_family

FAMILIES = ("qwen3_moe", "glm_moe_dsa")
LAYOUTS = {
    "ep": planning.TrainerLayout(nodes=1, gpus_per_node=2, ep=2),
    "cp": planning.TrainerLayout(nodes=1, gpus_per_node=2, cp=2),
}
OPTIMIZERS = ("AdamW", "Muon", "CPUAdamW", "Offload")
TOKENS = 64
LONG = 512
"""A document of 8 times the keys that sparse attention chooses, in ``make_long``."""


def make(family):
    return tiny_family(family)


def make_long():
    """Make a model of several layers, with sparse attention to 64 keys."""
    layers = 4
    return tiny_family(
        "glm_moe_dsa",
        num_hidden_layers=layers,
        layer_types=["indexed_attention"] * layers,
        indexer_types=["full"] * layers,
        mlp_layer_types=["dense"] + ["sparse"] * (layers - 1),
        index_topk=64,
    )


def prepare(model, mesh, *, optimizer="AdamW", recompute=True):
    if model.config.model_type == "glm_moe_dsa":
        parallel.freeze_indexer(model)
    if recompute:
        parallel.recompute(model.train())
    parallel.shard(model, mesh)
    if optimizer == "Muon":
        return optim.Muon(optim.muon_parameters(model), lr=0.01)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer == "CPUAdamW":
        return optim.CPUAdamW(parameters, lr=0.01)
    adamw = torch.optim.AdamW(parameters, lr=0.01)
    return optim.Offload(adamw) if optimizer == "Offload" else adamw
