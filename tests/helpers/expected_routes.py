"""The expert routes that a plain forward pass of a model takes."""

import torch

from primerl.parity.reference import recorded

NEAR_TIE = 1e-5  # of router logits, far above their rounding


def expected(model, token_ids):
    """Each token's experts in order, whether they are near a tie, and the layers that have some."""
    gaps = []
    k = model.config.num_experts_per_tok

    def note(gate, args):
        logits = torch.nn.functional.linear(args[0].flatten(0, -2), gate.weight)
        best = logits.topk(k + 1).values
        gaps.append(best[:, k - 1] - best[:, k])

    gates = [module for name, module in model.named_modules() if name.endswith(".gate")]
    hooks = [gate.register_forward_pre_hook(note) for gate in gates]
    with recorded(model) as choices, torch.no_grad():
        model(torch.tensor([token_ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    layers = [int(name.split(".")[2]) for name in choices]
    experts = torch.stack([chosen for [chosen] in choices.values()], dim=1).sort(-1).values
    return experts.numpy(), (torch.stack(gaps, dim=1) < NEAR_TIE).numpy(), layers
