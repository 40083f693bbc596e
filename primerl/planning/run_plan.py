"""``plan_run``: plans of a run's trainer, servers, traffic and refused combinations."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from primerl import fp8
from primerl._common.expert_modules import expert_modules
from primerl.planning.incompatibilities import refused_pairs
from primerl.planning.report import Plan
from primerl.planning.server_memory import plan_server
from primerl.planning.sizes import model_size
from primerl.planning.traffic import plan_traffic
from primerl.planning.trainer_memory import Prepare, TrainerLayout, plan_trainers


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
        build: builds the model, on the ``meta`` device: ``models.empty_model``.
        prepare: the recipe's setup code, up to the optimizer; see ``plan_trainers``.
        layouts: layouts of the trainer's ranks; the run uses the first.
        servers: numbers of GPUs of a server, which share the experts; the run uses the first.
        tokens: the maximum number of tokens of a rollout, and of a micro-batch.
        step_tokens: the maximum number of tokens of all rollouts of a step.
        gpu_bytes: memory per GPU.
        max_num_seqs: the number of concurrent rollouts per GPU of a server.
        gpu_memory_utilization: the fraction of a GPU's memory that vLLM uses.
        form: the format of the FP8 checkpoint that is served; None: servers hold bfloat16.

    Raises:
        ValueError: there is no layout or no server, a server has no GPU, the size of the KV cache
            can't be derived from the model's config, or the model can't be in this FP8 format.
    """
    layouts = list(layouts)
    if not layouts or not servers or min(servers) < 1:
        raise ValueError(
            f"got {len(layouts)} layouts, and servers of {[*servers]} GPUs; expected at least one "
            "of each, and at least one GPU per server"
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
