"""``plan_run``: plans of a run's trainer, servers, traffic, storage and refused combinations."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from primerl import fp8
from primerl._common.expert_modules import expert_modules
from primerl.planning.allowances import Allowances
from primerl.planning.hardware import Hardware
from primerl.planning.incompatibilities import refused_pairs
from primerl.planning.report import Plan
from primerl.planning.rollout_time import PlannedStep, stored_bytes
from primerl.planning.server_memory import plan_server, published_layers
from primerl.planning.sizes import model_size
from primerl.planning.step_time import plan_step
from primerl.planning.storage import StoragePlan, plan_storage
from primerl.planning.traffic import Traffic, plan_traffic
from primerl.planning.trainer_memory import Prepare, TrainerLayout, TrainerPlan, plan_trainers


def plan_run(
    build: Callable[[], Any],
    prepare: Prepare,
    *,
    layouts: Iterable[TrainerLayout],
    servers: Sequence[int],
    tokens: int,
    step_tokens: int,
    steps: int,
    max_staleness: int,
    gpu_bytes: int,
    max_num_seqs: int,
    gpu_memory_utilization: float = 0.9,
    dtype: torch.dtype = torch.bfloat16,
    form: fp8.Format | None = None,
    workload: PlannedStep | None = None,
    allowances: Allowances | None = None,
    hardware: Hardware | None = None,
) -> Plan:
    """Plan a run: each layout of the trainer, and each size of a server, in FP8 and in bfloat16.

    Args:
        build: builds the model, on the ``meta`` device: ``models.empty_model``.
        prepare: the recipe's setup code, up to the optimizer; see ``plan_trainers``.
        layouts: layouts of the trainer's ranks; the run uses the first.
        servers: numbers of GPUs of a server, which share the experts; the run uses the first.
        tokens: the maximum number of tokens of a rollout, and of a micro-batch.
        step_tokens: the maximum number of tokens of all rollouts of a step.
        steps: the number of policy steps.
        max_staleness: the maximum staleness of trained tokens, in policy steps.
        gpu_bytes: memory per GPU.
        max_num_seqs: the number of concurrent rollouts per GPU of a server.
        gpu_memory_utilization: the fraction of a GPU's memory that vLLM uses.
        dtype: dtype that the trainer's layers compute in, as in ``parallel.shard``.
        form: the format of the FP8 checkpoint that is served; None: servers hold bfloat16.
        workload: the rollouts of a step, for its time; None: no times.
        allowances: what a GPU needs beside tensors; None: nothing.
        hardware: the speeds of the machines; None: the defaults of ``Hardware``.

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
    trainers = plan_trainers(
        build,
        prepare,
        layouts,
        tokens=tokens,
        gpu_bytes=gpu_bytes,
        dtype=dtype,
        allowances=allowances,
    )
    model = build()
    quantizers = _quantizers(model, form)
    plans = {
        f"{name}, ep={gpus}": plan_server(
            model,
            gpus=gpus,
            ep=gpus,
            max_model_len=tokens,
            max_num_seqs=max_num_seqs,
            gpu_bytes=gpu_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            reserved=0 if allowances is None else allowances.server,
            quantize=quantize,
        )
        for gpus in servers
        for name, quantize in quantizers.items()
    }
    published = next(iter(plans.values())).published
    traffic = plan_traffic(model, step_tokens=step_tokens, published=published)
    layers = {
        name: [sum(one) for one in published_layers(model, dtype=torch.bfloat16, quantize=quantize)]
        for name, quantize in quantizers.items()
    }
    server = next(iter(plans.values()))
    stored = 0
    if workload is not None and workload.prefill_servers and server.refusal is None:
        stored = stored_bytes(model.config, server, workload)
    storage = _storage(
        model,
        trainers[0],
        traffic,
        layers,
        step_tokens=step_tokens,
        steps=steps,
        max_staleness=max_staleness,
        served=server.weights_of(min(server.gpus, trainers[0].layout.gpus_per_node)),
        keys_and_values=stored,
    )
    times = {}
    if workload is not None:
        times = {
            str(one.layout): plan_step(
                *(model.config, one, server, traffic),
                workload=workload,
                pack_tokens=tokens,
                fp8=form is not None,
                dtype=dtype,
                gathered=layers["bf16"],
                published=next(iter(layers.values())),
                checkpoint_bytes=0 if storage is None else storage.checkpoint,
                hardware=hardware,
            )
            for one in trainers
            if one.ranks
        }
    return Plan(
        model=model_size(model),
        trainers=trainers,  # type: ignore[arg-type]  # mypy does not infer what tuple converts
        servers=plans,
        traffic=traffic,
        storage=storage,
        times=times,
        refused_pairs=refused_pairs(),  # type: ignore[arg-type]
    )


def _quantizers(
    model: nn.Module, form: fp8.Format | None
) -> dict[str, fp8.CheckpointQuantizer | None]:
    """Return the forms in which servers may hold the model, by name; the first is that of a run."""
    if form is None:
        return {"bf16": None}
    fp8.convert_linears(model, form=form)
    experts = fp8.GroupedMatmul(form=form) if expert_modules(model) else None
    quantizer = fp8.CheckpointQuantizer(model, experts=experts, dtype=torch.bfloat16)
    return {"FP8": quantizer, "bf16": None}


def _storage(
    model: nn.Module,
    trainer: TrainerPlan,
    traffic: Traffic,
    layers: Mapping[str, Sequence[int]],
    **sizes: int,
) -> StoragePlan | None:
    """Plan the storage of a run whose first layout is ``trainer``; None if that was not measured.

    ``layers`` has the bytes of each layer by form. Servers are updated in the first form, and the
    trainer starts in the last one.
    """
    if not trainer.ranks:
        return None
    return plan_storage(
        trainer,
        traffic,
        published=next(iter(layers.values())),
        final_model=sum(sum(one) for one in published_layers(model, dtype=None)),
        models={name: sum(one) for name, one in layers.items()},
        **sizes,
    )
