"""Expert load: balance metrics, and balancing through the routing bias."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

BIAS = "e_score_correction_bias"


def load_statistics(counts: Mapping[str, Tensor]) -> dict[str, float]:
    """Return metrics of expert balance over all layers, given how often each expert was chosen.

        counts = parallel.all_sum(parallel.take_expert_counts(model))
        metrics |= parallel.load_statistics(counts)

    ``expert_load_max`` is the largest load of any expert, divided by the mean of its layer: 1 is
    perfectly even, and expert-parallel ranks wait for the most loaded. ``expert_load_cv`` is the
    standard deviation of loads divided by their mean, averaged over layers. ``experts_idle`` is the
    fraction of experts that were never chosen. The result is empty if there are no counts.
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
    """Move each expert's routing bias by ``rate`` toward an even load, after an optimizer step.

        b_e  +=  rate * sign(mean_e(c) - c_e)

    Here c_e is the number of times that expert e was chosen (arXiv:2408.15664; DeepSeek-V3,
    arXiv:2412.19437, section 2.1.2). The bias affects which experts are chosen, not their weights.
    In reinforcement learning it is best left unchanged, as in the recipes, because a sampler with
    the bias of an earlier version routes differently.

    Args:
        model: a model with a buffer ``e_score_correction_bias`` in each router.
        counts: counts over all ranks, by the name of the experts' module: ``all_sum`` of
            ``take_expert_counts``.
        rate: step size of the bias; DeepSeek-V3's pre-training used 1e-3.

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
                f"{block} has no routing bias ({BIAS}), which balance_experts needs; only model "
                "families with this bias, such as glm4_moe or deepseek_v3, are supported"
            )
        load = chosen.double().to(biases[0].device)
        biases[0].add_(rate * torch.sign(load.mean() - load).to(biases[0].dtype))
