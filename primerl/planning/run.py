"""The plan of a run: its trainer on imagined ranks, its servers, and what a step sends."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from primerl import fp8
from primerl._common.expert_modules import expert_modules
from primerl.planning.pairs import refused_pairs
from primerl.planning.report import Plan
from primerl.planning.server import plan_server
from primerl.planning.sizes import model_size
from primerl.planning.traffic import plan_traffic
from primerl.planning.trainer import Prepare, TrainerLayout, plan_trainers


def plan_run(
    build: Callable[[], Any],
    prepare: Prepare,
    *,
    layouts: Iterable[TrainerLayout],
    servers: Sequence[int],
    tokens: int,
    step_tokens: int,
    gpu_bytes: int,
    max_num_seqs: int,
    gpu_memory_utilization: float = 0.9,
    form: fp8.Format | None = None,
) -> Plan:
    """Plan a run: each layout of the trainer, and each size of a server, in FP8 and in bfloat16.

    Args:
        build: makes the model, on the ``meta`` device: ``models.empty_model``.
        prepare: what the recipe does to it, up to the optimizer; see ``plan_trainers``.
        layouts: of the trainer's ranks; the run is to take the first.
        servers: GPUs of a server, which share the experts; the run is to take the first.
        tokens: the most of a rollout, and of a micro-batch.
        step_tokens: of all rollouts of a step, at most.
        gpu_bytes: memory of a GPU.
        max_num_seqs: rollouts at a time on a server's GPU.
        gpu_memory_utilization: the part of a GPU's memory that vLLM takes.
        form: of the FP8 checkpoint that is served; None: servers hold bfloat16.

    Raises:
        ValueError: there is no layout or no server, a server has no GPU, the model's config does
            not say what its keys and values are, or the model can't be in FP8 of this form.
    """
    layouts = list(layouts)
    if not layouts or not servers or min(servers) < 1:
        raise ValueError(
            f"there are {len(layouts)} layouts, and servers of {[*servers]} GPUs; expected at "
            "least one of each, of at least one GPU"
        )
    trainers = plan_trainers(build, prepare, layouts, tokens=tokens, gpu_bytes=gpu_bytes)
    model = build()
    quantizers: dict[str, fp8.CheckpointQuantizer | None] = {}
    if form is not None:
        fp8.convert_linears(model, form=form)
        experts = fp8.GroupedMatmul(form=form) if expert_modules(model) else None
        quantizers["FP8"] = fp8.CheckpointQuantizer(model, experts=experts, dtype=torch.bfloat16)
    quantizers["bf16"] = None
    plans = {
        f"{name}, ep={gpus}": plan_server(
            model,
            gpus=gpus,
            ep=gpus,
            max_model_len=tokens,
            max_num_seqs=max_num_seqs,
            gpu_bytes=gpu_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            quantize=quantize,
        )
        for gpus in servers
        for name, quantize in quantizers.items()
    }
    published = next(iter(plans.values())).published
    return Plan(
        model=model_size(model),
        trainers=trainers,  # type: ignore[arg-type]  # mypy does not infer what tuple converts
        servers=plans,
        traffic=plan_traffic(model, step_tokens=step_tokens, published=published),
        refused_pairs=refused_pairs(),  # type: ignore[arg-type]
    )
