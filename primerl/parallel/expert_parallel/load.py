"""Balance of experts: metrics, and the routing bias that evens out their load."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

BIAS = "e_score_correction_bias"


def load_statistics(counts: Mapping[str, Tensor]) -> dict[str, float]:
    """Metrics of expert balance over all layers, from how often each expert was chosen.

        counts = parallel.all_sum(parallel.take_expert_counts(model))
        metrics |= parallel.load_statistics(counts)

    ``expert_load_max``: the largest load as a multiple of its layer's mean, over all layers; 1 is
    even, and expert-parallel ranks wait for it. ``expert_load_cv``: the standard deviation of loads
    divided by their mean, averaged over layers. ``experts_idle``: the share of experts that were
    never chosen. Empty if there are no counts.
    """
    loads = [c.double() / c.double().mean() for c in counts.values() if c.sum() > 0]
    if not loads:
        return {}
    return {
        "expert_load_max": max(load.max().item() for load in loads),
        "expert_load_cv": sum(load.std(correction=0).item() for load in loads) / len(loads),
        "experts_idle": torch.cat([load == 0 for load in loads]).double().mean().item(),
    }


@torch.no_grad()
def balance_experts(model: nn.Module, counts: Mapping[str, Tensor], *, rate: float) -> None:
    """Move each expert's routing bias by ``rate`` towards an even load, after an optimizer step.

        b_e  +=  rate * sign(mean_e(c) - c_e)

    for the number of times c_e that expert e was chosen (arXiv:2408.15664; DeepSeek-V3,
    arXiv:2412.19437, section 2.1.2). The bias affects which experts are chosen, not their weights.
    In reinforcement learning it is best left alone, as recipes do: a sampler with the bias of an
    earlier version routes differently.

    Args:
        model: with a buffer ``e_score_correction_bias`` in each router.
        counts: of all ranks, by the name of the experts' module: ``all_sum`` of
            ``take_expert_counts``.
        rate: 1e-3 in DeepSeek-V3's pre-training.

    Raises:
        ValueError: the rate is negative, or a layer with counts has no such bias.
    """
    if rate < 0:
        raise ValueError(f"rate is {rate}, expected at least 0")
    buffers = dict(model.named_buffers())
    for name, chosen in counts.items():
        block = name.rpartition(".")[0]
        biases = [b for n, b in buffers.items() if n.startswith(f"{block}.") and n.endswith(BIAS)]
        if len(biases) != 1:
            raise ValueError(
                f"{block} has no routing bias ({BIAS}) that could balance its experts; only "
                "families with one, such as glm4_moe or deepseek_v3, can be balanced so"
            )
        load = chosen.double().to(biases[0].device)
        biases[0].add_(rate * torch.sign(load.mean() - load).to(biases[0].dtype))
