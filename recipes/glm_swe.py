"""A GLM-5-class mixture of experts learns software engineering from the tests of repositories.

The policy reads code, edits it and runs commands in a sandbox, for hundreds of turns; hidden tests
give the reward. Rollouts, training and weight updates overlap. First a rehearsal on a laptop's CPU,
with all parts but a tiny model; then the plan of the run on 28 nodes, for which nothing starts:

    torchrun --nproc-per-node 2 recipes/glm_swe.py --scale debug --steps 3
    python recipes/glm_swe.py --scale glm5 --dry-run

Copy this file and edit it: ``SCALES`` says where it runs, ``build_environment`` is the problem,
``prepare`` makes the trainer, ``backward`` is the algorithm. ``recipes/slurm/glm_swe.sbatch``
starts it on a cluster. Ctrl-C and SIGTERM save; ``--resume RUN_DIR`` continues.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
from attrs.validators import optional

from primerl import track

with track.interruptible():  # Ctrl-C ends it with one line
    print("importing torch", flush=True)  # which takes seconds
    import torch

    from primerl import (
        advantage,
        checkpoint,
        filters,
        fp8,
        loss,
        models,
        optim,
        packing,
        parallel,
        planning,
        replay,
        rollout,
        serving,
        testing,
        weights,
    )

from primerl.track import number
from primerl.types import SamplingParams


@attrs.frozen(kw_only=True)
class Scale:
    """What a laptop and a cluster do not share. The rest of this file is the same for both."""

    # a model folder or hub id; a tiny random one for "tiny:FAMILY"; None: --model says it
    model: str | None
    # its configuration, a folder of recipes/configs, to plan without the model's files
    config: str | None = None
    # the learning rate
    lr: float
    # numbers of nodes that train: a run uses the first, --dry-run compares all
    nodes: tuple[int, ...] = (1,)
    gpus_per_node: int
    # bytes of a GPU's memory
    gpu_bytes: int
    # expert and context parallelism: ranks that share the experts of each layer, and the tokens of
    # each micro-batch
    ep: int
    cp: int
    # what trainer and sampler compute in; weights of the trainer are in float32
    dtype: torch.dtype = torch.bfloat16
    # blocks and scales of the products in FP8, on both sides; None: they multiply in dtype
    fp8: fp8.Format | None
    # send each token to the experts that the sampler chose
    replay: bool
    # the most tokens of a rollout, and of one reply; the most turns
    context: int
    reply_tokens: int
    max_turns: int
    # tasks of a policy step, and rollouts of each; the bound on every trained token, in steps
    groups_per_step: int
    group_size: int
    max_staleness: int
    # which groups are trained: only those whose rewards differ
    keep: tuple[Any, ...] = (filters.has_signal,)
    # states of the optimizer in host memory
    offload: bool = False
    # what samples: a copy of the model in this process, or vLLM's servers with these arguments
    engine: Literal["transformers", "vllm"] = "vllm"
    server: Mapping[str, Any] = {}
    # numbers of GPUs of a server, which share the experts: a run uses the first
    server_gpus: tuple[int, ...] = (1,)
    # seconds from SIGTERM to the end of a step and its checkpoint
    grace_s: float = 25.0


SCALES = {
    "debug": Scale(
        model="tiny:glm4_moe",
        lr=1e-3,
        gpus_per_node=2,  # processes on the CPU
        gpu_bytes=2 * 10**9,
        ep=2,
        cp=2,
        fp8=fp8.Format.of_blocks(16),
        replay=True,
        context=4096,
        reply_tokens=32,
        max_turns=4,
        groups_per_step=2,
        group_size=4,
        max_staleness=2,
        keep=(),  # a random policy never earns a reward
        engine="transformers",
    ),
    "laptop": Scale(
        model=None,
        lr=1e-4,
        gpus_per_node=1,
        gpu_bytes=4 * 10**9,
        ep=1,
        cp=1,
        dtype=torch.float32,  # CPUs are slow in 16 bits, and slower where they imitate FP8
        fp8=None,
        replay=True,
        context=1024,
        reply_tokens=128,
        max_turns=4,
        groups_per_step=8,
        group_size=8,
        max_staleness=2,
        engine="transformers",
    ),
    "8xh200": Scale(
        model="zai-org/GLM-4.7-Flash",
        lr=1e-6,
        config="glm47_flash",
        gpus_per_node=4,  # that train; the other four serve
        gpu_bytes=141 * 10**9,
        ep=4,
        cp=2,
        fp8=fp8.BLOCK_FP8,
        replay=True,
        context=65_536,
        reply_tokens=8192,
        max_turns=100,
        groups_per_step=8,
        group_size=8,
        max_staleness=4,
        offload=True,
        server={"data_parallel_size": 4, "enable_expert_parallel": True},
        server_gpus=(4,),
    ),
    "glm5": Scale(
        model="zai-org/GLM-5",
        lr=1e-6,
        config="glm5",
        nodes=(16, 12),
        gpus_per_node=8,
        gpu_bytes=141 * 10**9,
        ep=8,
        cp=4,
        fp8=fp8.BLOCK_FP8,
        replay=True,
        context=131_072,
        reply_tokens=16_384,
        max_turns=300,
        groups_per_step=16,
        group_size=16,
        max_staleness=8,
        offload=True,
        server={
            "data_parallel_size": 8,
            "enable_expert_parallel": True,
            "gpu_memory_utilization": 0.92,
            "max_num_seqs": 96,
        },
        server_gpus=(8, 32),
        grace_s=900.0,
    ),
}

# A resumed run keeps these: its tasks are split alike, and its checkpoint decides the rest.
FIXED = ("scale", "model", "seed", "lr", "env", "env_config", "eval_tasks")


@attrs.frozen
class Args:
    """What a run may vary; whatever else is edited in this file."""

    #: where it runs: a row of SCALES in this file
    scale: Literal["debug", "laptop", "8xh200", "glm5"] = "debug"
    #: a model folder or hub id, instead of the scale's
    model: str | None = None
    #: policy steps
    steps: int = attrs.field(default=20, validator=number(at_least=1))
    #: the seed of a tiny model's weights and of sampling in this process
    seed: int = attrs.field(default=0, validator=number(at_least=0, below=2**32))
    #: the learning rate, instead of the scale's
    lr: float | None = attrs.field(default=None, validator=optional(number(at_least=0)))
    #: an environment of the verifiers library
    env: str = "bugfix"
    #: settings of the environment, such as tier easiest
    env_config: dict[str, str] = attrs.field(factory=dict)
    #: held-out tasks
    eval_tasks: int = attrs.field(default=8, validator=number(at_least=0))
    #: policy steps from one evaluation to the next; 0: only at the end
    eval_every: int = attrs.field(default=10, validator=number(at_least=0))
    #: policy steps from one checkpoint to the next; 0: only at the end, or when told to stop
    save_every: int = attrs.field(default=10, validator=number(at_least=0))
    #: expert parallelism, instead of the scale's
    ep: int | None = attrs.field(default=None, validator=optional(number(at_least=1)))
    #: context parallelism, instead of the scale's
    cp: int | None = attrs.field(default=None, validator=optional(number(at_least=1)))
    #: vLLM's servers that run already
    engine_urls: tuple[str, ...] = ()
    #: the FP8 checkpoint that a server is started from
    server_model: str | None = None
    #: further arguments of a server that is started, such as kv_transfer_config '{...}'
    vllm: dict[str, str] = attrs.field(factory=dict)
    #: for weights and expert routes, if ranks or servers run on several hosts
    shared_folder: str | None = None
    #: the control: rewards carry no information
    permute_rewards: bool = False
    #: print what would run where, and what it would take, and start nothing
    dry_run: bool = False
    #: for --dry-run: numbers of nodes that train, instead of the scale's
    nodes: tuple[int, ...] = ()
    #: the folder of a new run; runs/SCRIPT-NNN by default
    run_dir: str | None = None
    #: the folder of a run, to resume it there
    resume: str | None = attrs.field(default=None, validator=track.instead_of("run_dir"))


def extras(args: Args) -> list[str]:
    """The optional dependencies of a run, which are looked for before anything is loaded."""
    if args.dry_run:
        return []
    needed = ["verifiers"]
    if SCALES[args.scale].engine == "vllm" and not args.engine_urls:
        needed.append("vllm")
    return needed


def model_folder(args: Args, scale: Scale) -> str:
    """The policy to begin with. A tiny one is made where there is none."""
    model = args.model or scale.model
    if model is None:
        raise ValueError(f"--scale {args.scale} trains a model of yours: pass --model FOLDER")
    if not model.startswith("tiny:"):
        return model
    family = model.removeprefix("tiny:")
    folder = Path("runs") / "models" / f"tiny-{family}-{args.seed}"
    testing.tiny_chat_model(folder, family, seed=args.seed, max_position_embeddings=scale.context)
    return str(folder)


def build_environment(args: Args, scale: Scale, tokenizer: Any) -> tuple[Any, Any, Any]:
    """The problem: an environment, tasks to train on, and tasks held out for evaluation."""
    environment = rollout.verifiers(
        args.env,
        tokenizer=tokenizer,
        config={"taskset": args.env_config},
        max_turns=scale.max_turns,
        keep_conversation=True,
    )
    eval_tasks, train_tasks = environment.tasks.split(args.eval_tasks)
    return environment, train_tasks, eval_tasks


def multiply_in_fp8(sampler: Any, scale: Scale) -> None:
    """What a server of an FP8 checkpoint does, for the sampler in this process."""
    if scale.fp8 is not None:
        fp8.convert_linears(sampler, form=scale.fp8)
        parallel.divide_experts(sampler, matmul=fp8.GroupedMatmul(form=scale.fp8))


@contextlib.contextmanager
def open_engine(args: Args, scale: Scale, model: str) -> Iterator[Any]:
    """What samples: FP8 as in the trainer, and which experts it chose is recorded."""
    with contextlib.ExitStack() as stack:
        routes = None
        if scale.replay:
            shape = replay.shape(models.empty_model(model))
            routes = stack.enter_context(replay.Store(shape, folder=args.shared_folder))
        if args.engine_urls:
            yield stack.enter_context(serving.VLLMEngine(args.engine_urls, routes=routes))
        elif scale.engine == "vllm":
            if scale.fp8 is not None and args.server_model is None:
                raise ValueError(
                    "the server multiplies in FP8: pass --server-model, the FP8 checkpoint of the "
                    "model (models.save_pretrained(..., quantize=fp8.CheckpointQuantizer(model)))"
                )
            first = scale.gpus_per_node  # the trainer has those before
            devices = range(first, first + scale.server_gpus[0])
            server = serving.serve_vllm(
                args.server_model or model,
                env={"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))},
                dtype=str(scale.dtype).removeprefix("torch."),
                max_model_len=scale.context,
                enable_return_routed_experts=scale.replay,
                **{**scale.server, **args.vllm},
            )
            stack.enter_context(server)
            yield stack.enter_context(serving.VLLMEngine(server, routes=routes))
        else:
            sampler, _ = models.load_pretrained(model)
            yield stack.enter_context(
                rollout.TransformersEngine(
                    sampler,
                    dtype=scale.dtype,
                    prepare=functools.partial(multiply_in_fp8, scale=scale),
                    cache_tokens=4 * scale.context,
                    seed=args.seed,
                    routes=routes,
                    capture=replay.capture if scale.replay else None,
                )
            )


def prepare(model: Any, mesh: parallel.Mesh, scale: Scale) -> None:
    """Make an empty model into this rank's part of the trainer. The order matters."""
    if hasattr(model.config, "index_topk"):  # which keys it chooses has no gradient
        parallel.freeze_indexer(model)
    matmul = None
    if scale.fp8 is not None:
        fp8.convert_linears(model, form=scale.fp8)
        matmul = fp8.GroupedMatmul(form=scale.fp8)
    parallel.recompute(model.train())
    parallel.shard(model, mesh, dtype=scale.dtype, matmul=matmul)


def make_optimizer(model: Any, args: Args, scale: Scale) -> torch.optim.Optimizer:
    """GLM-5's. The learning rate is as large as AdamW's would be."""
    optimizer = optim.Muon(
        optim.muon_parameters(model),
        lr=scale.lr if args.lr is None else args.lr,
        dtype=scale.dtype,
    )
    return optim.Offload(optimizer) if scale.offload else optimizer


def quantizer(model: Any, scale: Scale) -> fp8.CheckpointQuantizer | None:
    """What makes the bytes that the trainer multiplies with, as servers of FP8 checkpoints take."""
    if scale.fp8 is None:
        return None
    experts = fp8.GroupedMatmul(form=scale.fp8)
    return fp8.CheckpointQuantizer(model, experts=experts, dtype=torch.bfloat16)


def open_transport(args: Args, scale: Scale, model: Any, engine: Any, rollouts: Any) -> Any:
    """What publishes weights: to servers, the bytes that the trainer multiplies with, as deltas."""
    if scale.engine == "transformers" and not args.engine_urls:
        return weights.transport_to(model, engine, worker=rollouts)
    return weights.transport_to(
        model,
        engine,
        worker=rollouts,
        folder=args.shared_folder,
        encoding="delta",
        quantize=quantizer(model, scale),
    )


def backward(
    model: Any,
    batches: list[packing.PackedBatch],
    *,
    statistics: loss.Statistics,
    counts: replay.RouteCounts,
) -> Any:
    """The algorithm: add up the gradients of a step; returns this rank's part of the loss.

    A policy gradient whose tokens are weighted by the ratio of trainer and sampler, and dropped
    where it is far from 1, as GLM-5's (arXiv:2602.15763).
    """
    trained = parallel.all_sum(sum(int(batch.loss_mask.sum()) for batch in batches))
    total = 0.0
    for batch, routes in replay.fetch(batches, counts=counts):
        with replay.forced(model, routes, counts=counts):
            logprobs, entropy = loss.model_logprobs_and_entropy(
                model,
                batch.token_ids,
                batch.position_ids,
                batch.labels,
                temperature=batch.temperature,
                rows=batch.loss_mask,
            )
            weight = loss.icepop(logprobs, batch.behavior_logprobs)
            per_token, aux = loss.reinforce(logprobs, logprobs.detach(), batch.advantages)
            objective = loss.token_mean(weight * per_token, batch.loss_mask, denom=trained)
            objective.backward()
        statistics.add(
            logprobs,
            batch.behavior_logprobs,
            batch.loss_mask,
            batch.versions,
            loss=objective,
            entropy=entropy.detach(),
            aux=aux | {"dropped": (weight == 0).to(weight.dtype)},
        )
        total += objective.detach()
    return total


def dry_run(args: Args, scale: Scale) -> planning.Plan:
    """What would run where, and what it would take: the parts above, on imagined ranks."""
    folder = args.model
    if folder is None and scale.config is not None:
        folder = str(Path(__file__).parent / "configs" / scale.config)
    folder = folder or model_folder(args, scale)

    def trainer(model: Any, mesh: parallel.Mesh) -> torch.optim.Optimizer:
        prepare(model, mesh, scale)
        return make_optimizer(model, args, scale)

    layouts = [
        planning.TrainerLayout(
            nodes=nodes,
            gpus_per_node=scale.gpus_per_node,
            ep=args.ep or scale.ep,
            cp=args.cp or scale.cp,
        )
        for nodes in args.nodes or scale.nodes
    ]
    trainers = planning.plan_trainers(
        lambda: models.empty_model(folder),
        trainer,
        layouts,
        tokens=scale.context,
        gpu_bytes=scale.gpu_bytes,
    )

    model = models.empty_model(folder)
    published: dict[str, fp8.CheckpointQuantizer | None] = {}
    if scale.fp8 is not None:
        fp8.convert_linears(model, form=scale.fp8)
        published["FP8"] = quantizer(model, scale)
    published["bf16"] = None
    servers = {}
    for gpus in scale.server_gpus:
        for name, quantize in published.items():
            servers[f"{name}, ep={gpus}"] = planning.plan_server(
                model,
                gpus=gpus,
                ep=gpus,
                max_model_len=scale.context,
                max_num_seqs=scale.server.get("max_num_seqs", 64),
                gpu_bytes=scale.gpu_bytes,
                gpu_memory_utilization=scale.server.get("gpu_memory_utilization", 0.9),
                quantize=quantize,
            )
    return planning.Plan(
        model=planning.model_size(model),
        trainers=trainers,
        servers=servers,
        traffic=planning.plan_traffic(
            model,
            step_tokens=scale.groups_per_step * scale.group_size * scale.context,
            published=next(iter(servers.values())).published,
        ),
        refused_pairs=planning.refused_pairs(),
    )


@track.interruptible()
def main(args: Args) -> None:
    import transformers

    scale = SCALES[args.scale]
    if args.dry_run:
        plan = dry_run(args, scale)
        print(plan.text())
        trainer, server = plan.trainers[0], next(iter(plan.servers.values()))
        raise SystemExit(1 if trainer.refusal or server.refusal else 0)
    world = parallel.process_group(seed=args.seed, grace_s=scale.grace_s)
    sinks = [track.LiveView("GLM SWE", steps=args.steps)] if world.is_first else []
    parallel.settle_cpu()
    if world.is_first:
        print(planning.differences(scale, SCALES["glm5"], names=("here", "at glm5")))
    folder = model_folder(args, scale)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    environment, train_tasks, eval_tasks = build_environment(args, scale, tokenizer)
    sampling = SamplingParams(max_tokens=scale.reply_tokens, temperature=1.0)
    saved = checkpoint.last_good(args.resume if world.is_first else None)
    generator = np.random.default_rng(args.seed)

    @advantage.of_rewards
    def advantages(rewards: Any) -> Any:
        if args.permute_rewards:
            rewards = generator.permutation(rewards)
        return advantage.standardized(rewards)

    # All ranks train. Rank 0 also samples and keeps records; on the others, the engine is None, and
    # the worker and the run do nothing.
    run = track.IdleRun()
    opened_engine = contextlib.nullcontext()
    if world.is_first:
        opened_engine = open_engine(args, scale, folder)
        run = track.Run(
            args.resume or args.run_dir,
            args=args,
            decode=tokenizer.decode,
            sinks=sinks,
            state=saved.get("run"),
            steps=args.steps,
            fixed=FIXED,
            # Routes from before an update are replayed too, which makes up to that in most steps.
            gate=track.MismatchGate(floor=1e-4),
        )
    with (
        opened_engine as engine,
        rollout.worker(
            engine,
            environment,
            train_tasks,
            params=sampling,
            group_size=scale.group_size,
            groups_per_step=scale.groups_per_step,
            max_staleness=scale.max_staleness,
            min_group=2,
            keep=scale.keep,
            state=saved.get("worker"),
        ) as rollouts,
        run,
        world,  # the ranks connect
    ):
        mesh = parallel.mesh(ep=args.ep or scale.ep, cp=args.cp or scale.cp)
        model = models.empty_model(folder)
        prepare(model, mesh, scale)
        models.load_shards(model, folder, device=world.device, dequantize=fp8.dequantize)
        optimizer = make_optimizer(model, args, scale)
        guard = parallel.UpdateGuard(on_nonfinite="skip")
        transport = open_transport(args, scale, model, engine, rollouts)
        checkpoints = checkpoint.Checkpoints(
            run.folder, model, optimizer, every=args.save_every, last=args.steps
        )
        with checkpoints:
            first_step = checkpoints.load(saved)
            transport.publish(first_step)
            parallel.exempt_from_collection()  # what was built until here

            for step in range(first_step, args.steps):
                if args.eval_every and step % args.eval_every == 0:
                    run.log_evaluation(step, rollouts.evaluate(eval_tasks, sampling))
                groups = rollouts.take(version=step)
                samples = advantage.assign(groups, advantages)
                packed = packing.pack(
                    samples,
                    max_tokens=scale.context,
                    ranks=mesh.batches,
                    share_prefixes=True,  # turns that branches have in common are computed once
                )
                batches = parallel.scatter(packed, packing.PackedBatch, mesh, device=world.device)

                statistics = loss.Statistics(version=step)
                counts = replay.RouteCounts()
                objective = backward(model, batches, statistics=statistics, counts=counts)
                norm = parallel.clip_gradients(model.parameters(), 1.0)
                if guard.allows(objective, norm):
                    optimizer.step()
                optimizer.zero_grad()
                rows = parallel.gather(statistics.end_minibatch(), mesh)
                per_token = packing.unpack(packed, rows, samples)
                replay.discard(samples)
                receipt = transport.publish(step + 1)

                metrics = receipt.metrics | statistics.summary(parallel.all_sum)
                metrics |= counts.summary(parallel.all_sum)
                metrics["grad_norm"] = norm  # before it was clipped
                metrics["skipped_updates"] = guard.skipped
                run.log(
                    step,
                    groups,
                    samples,
                    metrics=metrics,
                    totals=rollouts.stats(),
                    per_token=per_token,
                )
                stopping = world.should_stop()
                if stopping or checkpoints.due(step + 1):
                    checkpoints.save(step + 1, wait=stopping, worker=rollouts, run=run)
                if stopping:
                    raise checkpoint.Stopped(step + 1)

        run.log_evaluation(args.steps, rollouts.evaluate(eval_tasks, sampling))
        models.save_pretrained(model, run.final_folder, tokenizer=tokenizer)
        run.finish()
        if world.is_first:
            print(run.report())


if __name__ == "__main__":
    main(track.command_line(Args, description=__doc__, extras=extras))
