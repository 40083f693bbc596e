"""RL of a GLM-5-class mixture of experts on software engineering, with hidden tests as rewards.

The policy reads code, edits it and runs commands in a sandbox, for hundreds of turns. Rollouts,
training and weight updates overlap. The first command is a rehearsal on a laptop's CPU, with all
parts of the run but a tiny model. The second prints the plan of the run on 28 nodes, and starts
nothing:

    torchrun --nproc-per-node 2 recipes/glm_swe.py --scale debug --steps 3
    python recipes/glm_swe.py --scale glm5 --dry-run

To adapt the script, copy this file and edit it: ``SCALES`` has the flags for each size of machine,
``build_environment`` defines the problem, ``prepare`` the trainer, and ``backward`` the algorithm.
``recipes/slurm/glm_swe.sbatch`` starts the run on a cluster. Ctrl-C and SIGTERM save a checkpoint;
``--resume RUN_DIR`` continues the run.
"""

import contextlib
import functools
import os
import secrets
import tempfile
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
from attrs.validators import optional

from primerl import track

with track.interruptible():  # on Ctrl-C, print one line instead of a traceback
    print("importing torch", flush=True)  # the import takes seconds
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
class Args:
    """The flags of a run. The defaults are for a rehearsal on a laptop's CPU."""

    #: entry of SCALES in this file, for the machines to run on; other flags override it
    scale: Literal["debug", "laptop", "fleet", "8xh200", "glm5"] = "debug"
    #: model folder or Hugging Face hub id; tiny:FAMILY makes a tiny model with random weights,
    #: taught:FAMILY one that fixes the bugs of one program in about half of its rollouts
    model: str | None = "taught:glm4_moe"
    #: folder of recipes/configs with the model's configuration, for --dry-run without its files
    config: str | None = None
    #: where the ranks of this host train: "cpu", or "auto" for one GPU each, if there are any
    device: Literal["auto", "cpu"] = "cpu"
    #: number of policy steps
    steps: int = attrs.field(default=20, validator=number(at_least=1))
    #: seed of a tiny model's weights and of sampling in this process
    seed: int = attrs.field(default=0, validator=number(at_least=0, below=2**32))
    #: learning rate
    lr: float = attrs.field(default=3e-4, validator=number(at_least=0))
    #: environment of the verifiers library
    env: str = "bugfix"
    #: options of the environment's tasks, such as tier easiest
    env_config: dict[str, str] = attrs.field(
        factory=lambda: {"tier": "easiest", "program": "last_word"}
    )
    #: play the environment in Ray actors: "auto" for the cluster that this host has joined, its
    #: "host:port", or "local" for a Ray on this host
    ray: str | None = None
    #: number of these actors, which are spread over the cluster
    ray_actors: int = attrs.field(default=2, validator=number(at_least=1))
    #: number of actors up to which more are started while rollouts wait for one
    ray_most_actors: int = attrs.field(default=0, validator=number(at_least=0))
    #: maximum tokens per rollout
    context: int = attrs.field(default=4096, validator=number(at_least=1))
    #: maximum tokens per reply
    reply_tokens: int = attrs.field(default=96, validator=number(at_least=1))
    #: maximum turns per rollout
    max_turns: int = attrs.field(default=4, validator=number(at_least=1))
    #: tasks per policy step
    groups_per_step: int = attrs.field(default=2, validator=number(at_least=1))
    #: rollouts per task; advantages compare their rewards
    group_size: int = attrs.field(default=4, validator=number(at_least=2))
    #: maximum staleness of a trained token, in policy steps
    max_staleness: int = attrs.field(default=2, validator=number(at_least=0))
    #: train only on groups whose rewards differ
    require_signal: bool = True
    #: number of held-out tasks
    eval_tasks: int = attrs.field(default=2, validator=number(at_least=0))
    #: policy steps between evaluations; 0: evaluate only at the end
    eval_every: int = attrs.field(default=10, validator=number(at_least=0))
    #: policy steps between checkpoints; 0: save only at the end or when the run is stopped
    save_every: int = attrs.field(default=10, validator=number(at_least=0))
    #: dtype in which trainer and sampler compute; the trainer's weights are float32
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    #: block size of the FP8 matrix products in trainer and sampler; 0: multiply in dtype
    fp8_block: int = attrs.field(default=16, validator=number(at_least=0))
    #: router replay: the trainer sends each token to the experts that the sampler chose
    replay: bool = True
    #: keep the optimizer state in host memory
    offload: bool = False
    #: keep the inputs of layers, which they are recomputed from, in host memory
    offload_activations: bool = False
    #: expert parallelism: number of ranks that share the experts of each layer
    ep: int = attrs.field(default=2, validator=number(at_least=1))
    #: context parallelism: number of ranks that share the tokens of each micro-batch
    cp: int = attrs.field(default=2, validator=number(at_least=1))
    #: sample in this process, or start a vLLM server
    engine: Literal["transformers", "vllm"] = "transformers"
    #: URLs of vLLM servers that are already running
    engine_urls: tuple[str, ...] = attrs.field(default=(), validator=track.urls)
    #: URLs of further vLLM servers, which compute prompts for these
    prefill_urls: tuple[str, ...] = attrs.field(default=(), validator=track.urls)
    #: start a second vLLM server, on the next GPUs, which computes prompts for the first
    prefill: bool = False
    #: new tokens of a prompt from which on it is computed there; with router replay, all are
    prefill_from: int = attrs.field(default=1024, validator=number(at_least=1))
    #: FP8 checkpoint for the server to start
    server_model: str | None = None
    #: GPUs per server, which share its experts; a run uses the first number, --dry-run compares all
    server_gpus: tuple[int, ...] = attrs.field(default=(1,), validator=number(at_least=1))
    #: maximum concurrent rollouts per GPU of the server to start
    max_num_seqs: int = attrs.field(default=64, validator=number(at_least=1))
    #: fraction of each GPU's memory for this server; vLLM's default is 0.9
    gpu_memory_utilization: float | None = attrs.field(
        default=None, validator=optional(number(above=0, below=1))
    )
    #: further arguments of this server, such as kv_transfer_config '{...}'
    vllm: dict[str, bool | str] = attrs.field(factory=dict)
    #: folder for expert routes and manifests of weights, shared by all hosts, if there are several
    shared_folder: str | None = None
    #: nodes that train; a run uses the first number, --dry-run compares all
    nodes: tuple[int, ...] = attrs.field(default=(1,), validator=number(at_least=1))
    #: GPUs per node that train; in a rehearsal, CPU processes
    gpus_per_node: int = attrs.field(default=2, validator=number(at_least=1))
    #: for --dry-run: memory per GPU in bytes
    gpu_bytes: int = attrs.field(default=2 * 10**9, validator=number(at_least=1))
    #: for --dry-run: mean number of tokens of a rollout
    mean_tokens: int = attrs.field(default=50_000, validator=number(at_least=1))
    #: for --dry-run: number of servers that sample
    servers: int = attrs.field(default=1, validator=number(at_least=1))
    #: for --dry-run: number of further servers, which compute prompts for these
    prefill_servers: int = attrs.field(default=0, validator=number(at_least=0))
    #: seconds after SIGTERM in which the current step must end
    grace_s: float = attrs.field(default=25.0, validator=number(above=0))
    #: control experiment: permute the rewards, so that they carry no information
    permute_rewards: bool = False
    #: print what would run where and what it would need, and start nothing
    dry_run: bool = False
    #: project of Weights & Biases that gets the metrics, too; offline without an API key
    wandb: str | None = None
    #: folder of a new run; runs/SCRIPT-NNN by default
    run_dir: str | None = None
    #: folder of the run to resume
    resume: str | None = attrs.field(default=None, validator=track.instead_of("run_dir"))


SCALES = {
    "debug": Args(),
    "fleet": Args(
        scale="fleet",
        ep=1,
        cp=1,
        gpus_per_node=1,
        dtype="float32",
        fp8_block=0,
        engine="vllm",
        prefill=True,
        replay=False,  # vLLM's build for CPUs returns no routes
        max_num_seqs=16,
        prefill_from=64,
        vllm={"enforce_eager": True, "max_num_batched_tokens": "512"},
    ),
    "laptop": Args(
        scale="laptop",
        model=None,  # pass --model
        device="auto",
        lr=1e-4,
        env_config={},
        context=1024,
        reply_tokens=128,
        groups_per_step=8,
        group_size=8,
        eval_tasks=8,
        dtype="float32",  # CPUs are slow in 16 bits, and even slower when they emulate FP8
        fp8_block=0,
        ep=1,
        cp=1,
        gpus_per_node=1,
        gpu_bytes=4 * 10**9,
    ),
    "8xh200": Args(
        scale="8xh200",
        device="auto",
        model="zai-org/GLM-4.7-Flash",
        config="glm47_flash",
        lr=1e-6,
        env_config={},
        context=65_536,
        reply_tokens=8192,
        max_turns=100,
        groups_per_step=8,
        group_size=8,
        max_staleness=4,
        eval_tasks=8,
        fp8_block=128,
        offload=True,
        ep=4,
        engine="vllm",
        server_gpus=(4,),
        gpus_per_node=4,  # the other four GPUs serve
        gpu_bytes=planning.H200_BYTES,
    ),
    "glm5": Args(
        scale="glm5",
        device="auto",
        model="zai-org/GLM-5",
        config="glm5",
        lr=1e-6,
        env_config={},
        context=131_072,
        reply_tokens=16_384,
        max_turns=300,
        groups_per_step=16,
        group_size=16,
        max_staleness=8,
        eval_tasks=8,
        fp8_block=128,
        offload=True,
        offload_activations=True,
        ep=8,
        cp=4,
        engine="vllm",
        server_gpus=(32, 8),
        servers=2,
        prefill_servers=1,
        ray_actors=16,  # with --ray
        max_num_seqs=6,  # so that all of them fit into a GPU's memory at their full length
        # The rest of a GPU is for CUDA's context and NCCL's buffers. --dry-run prints the room that
        # weights, activations and CUDA graphs leave for keys and values ("KV room").
        gpu_memory_utilization=0.92,
        nodes=(16, 12),
        gpus_per_node=8,
        gpu_bytes=planning.H200_BYTES,
        grace_s=900.0,
    ),
}

TINY = ("tiny:", "taught:")  # what --model begins with to make a tiny model
VLLM_SIZES = {"hidden_size": 128, "moe_intermediate_size": 32}  # of tiny models, for vLLM on a CPU
TAUGHT_VOCABULARY = 480  # of bugfix.rehearsal, which a plan must not need
CONFIGS = Path(__file__).parent / "configs"

# A resumed run must keep these arguments: they determine the split of the tasks, or the checkpoint
# depends on them.
FIXED = (
    "scale",
    "model",
    "seed",
    "lr",
    "env",
    "env_config",
    "groups_per_step",
    "group_size",
    "eval_tasks",
)


def extras(args: Args) -> list[str]:
    """List the optional dependencies of a run; they are checked before anything is loaded."""
    if args.dry_run:
        return []
    needed = ["verifiers"]
    if args.engine == "vllm" and not args.engine_urls:
        needed.append("vllm")
    if args.ray is not None:
        needed.append("ray")
    if args.wandb:
        needed.append("wandb")
    return needed


def check(args: Args) -> None:
    """Refuse arguments that don't fit together, before anything is loaded."""
    if args.model is None:
        raise ValueError(f"--scale {args.scale} has no default model: pass --model FOLDER")
    if not args.model.startswith(TINY):
        track.require_model(args.model, flag="--model")
    known = sorted(path.parent.name for path in CONFIGS.glob("*/config.json"))
    if args.dry_run and args.config not in (None, *known):
        raise ValueError(f"--config is {args.config!r}; expected one of {', '.join(known)}")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if not args.dry_run and (ranks % args.ep or ranks % args.cp):
        raise ValueError(
            f"--ep is {args.ep} and --cp {args.cp}, on {ranks} ranks; expected divisors of the "
            "number of ranks, which torchrun --nproc-per-node sets"
        )
    if not args.dry_run and args.shared_folder is None and ranks > ranks_here:
        raise ValueError(
            f"--shared-folder is not given, but {ranks_here} of {ranks} ranks are on this host; "
            "pass a folder on a file system that all hosts share, for weights and expert routes"
        )
    if not args.dry_run and args.shared_folder is not None:
        track.require_shared_folder(args.shared_folder, flag="--shared-folder")


def model_folder(args: Args) -> str:
    """Return the folder or hub id of the initial policy. For a tiny model, create the folder."""
    kind, _, family = args.model.partition(":")
    if not args.model.startswith(TINY):
        return args.model
    make = testing.tiny_chat_model
    if kind == "taught":
        from bugfix import rehearsal  # installed with the environment

        make = rehearsal.policy
    name, sizes = f"{kind}-{family}-{args.seed}", {}
    if args.engine == "vllm":
        name, sizes = f"{name}-for-vllm", VLLM_SIZES
    folder = Path("runs") / "models" / name
    return str(make(folder, family, seed=args.seed, max_position_embeddings=args.context, **sizes))


def fp8_format(args: Args) -> fp8.Format | None:
    """Return the FP8 format of the matrix products; None if they are not in FP8."""
    return fp8.Format.of_blocks(args.fp8_block) if args.fp8_block else None


def build_environment(args: Args, tokenizer: Any) -> tuple[Any, Any, Any]:
    """Return the problem: an environment, its training tasks and its held-out tasks."""
    environment = rollout.verifiers(
        args.env,
        tokenizer=tokenizer,
        config={"taskset": args.env_config},
        max_turns=args.max_turns,
        keep_conversation=True,
    )
    eval_tasks, train_tasks = environment.tasks.split(args.eval_tasks)
    if args.ray is not None:
        environment = rollout.on_ray(
            environment,
            actors=(args.ray_actors, max(args.ray_actors, args.ray_most_actors)),
            address=None if args.ray == "local" else args.ray,
        )
    return environment, train_tasks, eval_tasks


def multiply_in_fp8(sampler: Any, *, form: fp8.Format | None) -> None:
    """Make the sampler in this process multiply like a server of an FP8 checkpoint."""
    if form is not None:
        fp8.convert_linears(sampler, form=form)
        parallel.divide_experts(sampler, matmul=fp8.GroupedMatmul(form=form))


def server_arguments(args: Args) -> dict[str, Any]:
    """Return the arguments of the vLLM server to start. ``--vllm`` overrides the others."""
    arguments = {
        "dtype": args.dtype,
        "max_model_len": args.context,
        "enable_return_routed_experts": args.replay,
        "data_parallel_size": args.server_gpus[0],
        "enable_expert_parallel": args.server_gpus[0] > 1,
        "max_num_seqs": args.max_num_seqs,
    }
    if args.gpu_memory_utilization is not None:  # vLLM's default is different on a CPU
        arguments["gpu_memory_utilization"] = args.gpu_memory_utilization
    return arguments | args.vllm


def start_server(
    args: Args, model: str, *, api_key: str, first_gpu: int, **connector: Any
) -> serving.VLLMServer:
    """Return a vLLM server on as many GPUs as ``--server-gpus`` says, from ``first_gpu`` on."""
    devices = range(first_gpu, first_gpu + args.server_gpus[0])
    return serving.serve_vllm(
        args.server_model or model,
        api_key=api_key,
        env={"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))},
        **(connector | server_arguments(args)),
    )


@contextlib.contextmanager
def open_engine(args: Args, model: str, *, device: Any = "cpu") -> Iterator[Any]:
    """Open the sampling engine. It uses the trainer's FP8 format, and records expert routes."""
    with contextlib.ExitStack() as stack:
        routes = None
        if args.replay:
            shape = replay.shape(models.empty_model(model))
            routes = stack.enter_context(replay.Store(shape, folder=args.shared_folder))
        if args.engine_urls:
            yield stack.enter_context(
                serving.VLLMEngine(
                    args.engine_urls,
                    prefill=args.prefill_urls or None,
                    prefill_from=args.prefill_from,
                    routes=routes,
                )
            )
        elif args.engine == "vllm":
            if args.fp8_block and args.server_model is None:
                raise ValueError(
                    "the server multiplies in FP8: pass --server-model, the FP8 checkpoint of the "
                    "model (models.save_pretrained(..., quantize=fp8.CheckpointQuantizer(model)))"
                )
            key = secrets.token_urlsafe(32)
            start = functools.partial(start_server, args, model, api_key=key)
            first = args.gpus_per_node  # the trainer uses the GPUs with lower numbers
            if args.prefill:
                keys = stack.enter_context(tempfile.TemporaryDirectory(prefix="keys-and-values-"))
                decoding = serving.kv_folder(keys, role="decode")
                computing = serving.kv_folder(keys, role="prefill")
                second = first + args.server_gpus[0]
                server = stack.enter_context(start(first_gpu=first, kv_transfer_config=decoding))
                prefill = stack.enter_context(start(first_gpu=second, kv_transfer_config=computing))
            else:
                server, prefill = stack.enter_context(start(first_gpu=first)), None
            yield stack.enter_context(
                serving.VLLMEngine(
                    server, prefill=prefill, prefill_from=args.prefill_from, routes=routes
                )
            )
        else:
            sampler, _ = models.load_pretrained(model)
            yield stack.enter_context(
                rollout.TransformersEngine(
                    sampler.to(device),
                    dtype=getattr(torch, args.dtype),
                    prepare=functools.partial(multiply_in_fp8, form=fp8_format(args)),
                    cache_tokens=4 * args.context,
                    seed=args.seed,
                    routes=routes,
                    capture=replay.capture if args.replay else None,
                )
            )


def concurrency(args: Args) -> rollout.AdaptiveConcurrency | None:
    """Return the cap on rollouts in flight, which follows the load of vLLM servers.

    If more rollouts were in flight than a server samples at once, their turns would evict each
    other's keys and values.
    """
    if args.engine == "transformers" and not args.engine_urls:
        return None
    gpus = args.server_gpus[0] * max(1, len(args.engine_urls))
    cap = float(gpus * args.max_num_seqs)
    return rollout.AdaptiveConcurrency(cap=cap, most=max(4096, round(cap)))


def prepare(model: Any, mesh: parallel.Mesh, args: Args) -> None:
    """Turn an empty model into this rank's shard of the trainer. The order of the steps matters."""
    if hasattr(model.config, "index_topk"):  # the indexer's choice of keys has no gradient
        parallel.freeze_indexer(model)
    form = fp8_format(args)
    matmul = None
    if form is not None:
        fp8.convert_linears(model, form=form)
        matmul = fp8.GroupedMatmul(form=form)
    parallel.recompute(model.train(), offload=args.offload_activations)
    parallel.shard(model, mesh, dtype=getattr(torch, args.dtype), matmul=matmul)


def make_optimizer(model: Any, args: Args) -> torch.optim.Optimizer:
    """Make GLM-5's optimizer, Muon. It takes a learning rate on the scale of AdamW's."""
    optimizer = optim.Muon(
        optim.muon_parameters(model), lr=args.lr, dtype=getattr(torch, args.dtype)
    )
    return optim.Offload(optimizer) if args.offload else optimizer


def open_transport(args: Args, model: Any, engine: Any, rollouts: Any) -> Any:
    """Open the transport that publishes weights.

    Servers get deltas of the same bytes that the trainer multiplies with. With several hosts, they
    read them from the memory of the hosts that train.
    """
    if args.engine == "transformers" and not args.engine_urls:
        return weights.transport_to(model, engine, worker=rollouts)
    form = fp8_format(args)
    quantize = None
    if form is not None:
        experts = fp8.GroupedMatmul(form=form)
        quantize = fp8.CheckpointQuantizer(model, experts=experts, dtype=torch.bfloat16)
    towards = None
    if args.shared_folder is not None:
        servers = [urllib.parse.urlsplit(url).hostname for url in args.engine_urls]
        towards = servers[0] if servers else os.environ.get("MASTER_ADDR", "127.0.0.1")
    return weights.transport_to(
        model,
        engine,
        worker=rollouts,
        folder=args.shared_folder,
        towards=towards,
        encoding="delta",
        quantize=quantize,
    )


def backward(
    model: Any,
    batches: list[packing.PackedBatch],
    *,
    statistics: loss.Statistics,
    counts: replay.RouteCounts,
) -> Any:
    """Accumulate the gradients of a step, and return this rank's part of the loss.

    The algorithm is GLM-5's policy gradient (arXiv:2602.15763): it weights each token by the ratio
    of its probabilities under trainer and sampler, and drops tokens whose ratio is far from 1.
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


def log_evaluation(run: Any, ended: Any) -> None:
    """Log an evaluation, and discard the routes of its rollouts, which are not trained."""
    outcomes = ended.outcomes()
    run.log_evaluation(ended.version, outcomes)
    played = [one.rollout for one in outcomes if one.rollout is not None]
    replay.discard(sample for one in played for sample in one.samples)


def empty_model(args: Args) -> Any:
    """Build the model of a run without values; nothing is written, and no tiny model is taught."""
    preset = SCALES[args.scale]
    of_another_model = args.model != preset.model and args.config == preset.config
    if args.config is not None and not of_another_model:
        return models.empty_model(CONFIGS / args.config)
    if not args.model.startswith(TINY):
        return models.empty_model(args.model)
    kind, _, family = args.model.partition(":")
    vocab_size = TAUGHT_VOCABULARY if kind == "taught" else len(testing.chat_tokenizer())
    model = testing.tiny_model(
        family, vocab_size=vocab_size, max_position_embeddings=args.context, seed=args.seed
    )
    return model.to("meta")


def plan(args: Args) -> planning.Plan:
    """Plan the run without starting it: what runs where, and whether it fits."""

    def trainer(model: Any, mesh: parallel.Mesh) -> torch.optim.Optimizer:
        prepare(model, mesh, args)
        return make_optimizer(model, args)

    on_gpus = args.engine == "vllm"
    workload = planning.PlannedStep(
        rollouts=args.groups_per_step * args.group_size,
        tokens=min(args.context, args.mean_tokens),
        servers=args.servers,
        prefill_servers=args.prefill_servers,
        evaluated=args.eval_tasks,
        steps_in_flight=args.max_staleness + 1,
        max_num_seqs=args.max_num_seqs,
    )
    return planning.plan_run(
        lambda: empty_model(args),
        trainer,
        layouts=[
            planning.TrainerLayout(
                nodes=nodes, gpus_per_node=args.gpus_per_node, ep=args.ep, cp=args.cp
            )
            for nodes in args.nodes
        ],
        servers=args.server_gpus,
        tokens=args.context,
        step_tokens=args.groups_per_step * args.group_size * args.context,
        steps=args.steps,
        max_staleness=args.max_staleness,
        gpu_bytes=args.gpu_bytes,
        max_num_seqs=args.max_num_seqs,
        gpu_memory_utilization=args.gpu_memory_utilization or 0.9,
        dtype=getattr(torch, args.dtype),
        form=fp8_format(args),
        workload=workload if on_gpus else None,
        allowances=planning.Allowances() if on_gpus else None,
    )


@track.interruptible()
def main(args: Args) -> None:
    import transformers

    if args.dry_run:
        try:
            found = plan(args)
        except ValueError as error:  # the model can't be in this FP8 format, for example
            raise SystemExit(f"glm_swe.py: {error}") from None
        print(found.text())
        raise SystemExit(1 if found.refusal else 0)
    world = parallel.process_group(device=args.device, seed=args.seed, grace_s=args.grace_s)
    sinks = []
    if world.is_first:
        sinks = [track.LiveView("GLM SWE", steps=args.steps), track.wandb_sink(args.wandb, args)]
    parallel.configure_cpu(world.device)
    if world.is_first:
        flagship = attrs.evolve(
            SCALES["glm5"], steps=args.steps, run_dir=args.run_dir, resume=args.resume
        )
        if args.device == "cpu":
            print(f"{world.world_size} ranks train on the CPU; --device auto would use a GPU each")
        print(planning.differences(args, flagship, names=("here", "at glm5")))
    folder = model_folder(args)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    environment, train_tasks, eval_tasks = build_environment(args, tokenizer)
    sampling = SamplingParams(max_tokens=args.reply_tokens, temperature=1.0)
    # The ranks verify its contents together, in Checkpoints.load.
    saved = checkpoint.last_good(args.resume if world.is_first else None, verify=False)
    generator = np.random.default_rng(args.seed)

    @advantage.of_rewards
    def advantages(rewards: Any) -> Any:
        if args.permute_rewards:
            rewards = generator.permutation(rewards)
        return advantage.standardized(rewards)

    # All ranks train. Rank 0 also samples and writes the run folder. On the other ranks, the engine
    # is None, and the worker and the run do nothing.
    run = track.IdleRun()
    opened_engine = contextlib.nullcontext()
    if world.is_first:
        opened_engine = open_engine(args, folder, device=world.device)
        run = track.Run(
            args.resume or args.run_dir,
            args=args,
            decode=tokenizer.decode,
            sinks=sinks,
            state=saved.get("run"),
            steps=args.steps,
            fixed=FIXED,
            # In most steps, routes from before a weight update cause a mismatch up to this floor.
            gate=track.MismatchGate(floor=1e-4),
        )
    with (
        opened_engine as engine,
        rollout.worker(
            engine,
            environment,
            train_tasks,
            params=sampling,
            group_size=args.group_size,
            groups_per_step=args.groups_per_step,
            max_staleness=args.max_staleness,
            min_group=2,
            concurrency=concurrency(args),
            keep=[filters.has_signal] if args.require_signal else [],
            state=saved.get("worker"),
        ) as rollouts,
        run,
        world,  # connects the ranks
    ):
        mesh = parallel.mesh(ep=args.ep, cp=args.cp)
        model = models.empty_model(folder)
        prepare(model, mesh, args)
        models.load_shards(model, folder, device=world.device, dequantize=fp8.dequantize)
        optimizer = make_optimizer(model, args)
        guard = parallel.UpdateGuard(on_nonfinite="skip")
        transport = open_transport(args, model, engine, rollouts)
        checkpoints = checkpoint.Checkpoints(
            run.folder, model, optimizer, every=args.save_every, last=args.steps
        )
        with checkpoints, transport:
            first_step = checkpoints.load(saved)
            publication = transport.start(first_step)
            parallel.freeze_gc()  # no garbage collection of the objects built so far

            for step in range(first_step, args.steps):
                if rollouts.evaluation_due(step, every=args.eval_every):
                    rollouts.start_evaluation(eval_tasks, sampling, version=step, keep_errors=True)
                for ended in rollouts.ended_evaluations():
                    log_evaluation(run, ended)
                # Train on the rollouts that are there while the engines load the weights of this
                # step. If there are too few, wait for the weights, which sample the others.
                if not parallel.from_first_rank(rollouts.ready(step)):
                    publication.wait()
                groups = rollouts.take(version=step)
                samples = advantage.assign(groups, advantages)
                packed = packing.pack(
                    samples,
                    max_tokens=args.context,
                    ranks=mesh.batches,
                    cost=packing.document_cost(model.config),
                    share_prefixes=True,  # computes the common turns of branches once
                )
                batches = parallel.scatter(packed, packing.PackedBatch, mesh, device=world.device)

                statistics = loss.Statistics(version=step)
                counts = replay.RouteCounts()
                objective = backward(model, batches, statistics=statistics, counts=counts)
                norm = parallel.clip_gradients(model.parameters(), 1.0)
                receipt = publication.wait()  # the canary needs the weights of this step
                if guard.allows(objective, norm):
                    optimizer.step()
                optimizer.zero_grad()
                rows = parallel.gather(statistics.end_minibatch(), mesh)
                per_token = packing.unpack(packed, rows, samples)
                replay.discard(samples)
                publication = transport.start(step + 1)

                metrics = receipt.metrics | statistics.summary(parallel.all_sum)
                metrics |= counts.summary(parallel.all_sum)
                metrics["grad_norm"] = norm  # before clipping
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

        rollouts.start_evaluation(eval_tasks, sampling, version=args.steps, keep_errors=True)
        for ended in rollouts.ended_evaluations(timeout_s=3600):
            log_evaluation(run, ended)
        models.save_pretrained(model, run.final_folder, tokenizer=tokenizer)
        run.finish()
        if world.is_first:
            print(run.report())


if __name__ == "__main__":
    main(
        track.command_line(
            Args, presets={"scale": SCALES}, description=__doc__, extras=extras, check=check
        )
    )
