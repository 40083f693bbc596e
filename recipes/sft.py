"""Supervised fine-tuning of any Hugging Face chat model on conversations, on its replies alone.

    python recipes/sft.py --model MODEL --data chats.jsonl traces/ --steps 200

Data are JSONL or Parquet files, or folders of them, of ``{"messages": [...], "tools": [...]}``;
files are shuffled together, or with ``--shares 3 1`` drawn in these proportions. The result, in
``RUN_DIR/final``, is a model for ``async_grpo.py --model``. With ``--env``, rollouts there show
what it has learned.

Copy this file and edit it: ``draw_samples`` makes the batch, ``objective`` is the loss.
GPUs: ``torchrun --nproc-per-node 8``. Ctrl-C and SIGTERM save; ``--resume RUN_DIR`` continues with
the next batch, on any number of ranks.
"""

import contextlib
import math
import textwrap
from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs

from primerl import track

with track.interruptible():  # Ctrl-C ends it with one line
    print("importing torch", flush=True)  # which takes seconds
    import torch

    from primerl import (
        checkpoint,
        data,
        flops,
        loss,
        models,
        packing,
        parallel,
        rollout,
        weights,
    )

from primerl.track import number
from primerl.types import Rollout, SamplingParams, TrainingSample

# A resumed run keeps these: its data come in the same order, and its checkpoint decides the rest.
FIXED = ("model", "data", "seed", "batch_size", "max_tokens", "replies", "too_long", "lora_rank")


@attrs.frozen
class Args:
    """What a run may vary; whatever else is edited in this file."""

    #: a model folder or hub id
    model: str
    #: files and folders of conversations
    data: tuple[str, ...]
    #: how often conversations of each path in data are drawn; by default, all paths are one
    shares: tuple[float, ...] = ()
    #: files and folders of conversations that are held out
    eval_data: tuple[str, ...] = ()
    #: an environment of the verifiers library, to see what the model can do
    env: str | None = None
    #: tasks of the environment: its first ones, played greedily
    env_tasks: int = attrs.field(default=32, validator=number(at_least=1))
    #: the most tokens of a reply in the environment
    env_tokens: int = attrs.field(default=256, validator=number(at_least=1))
    #: optimizer steps
    steps: int = attrs.field(default=100, validator=number(at_least=1))
    #: the seed of the conversations' order and of dropout
    seed: int = attrs.field(default=0, validator=number(at_least=0, below=2**32))
    #: the highest learning rate: after the warm-up, it falls to zero along half a cosine over all
    #: steps; a run that is resumed with more steps continues with the rates of the longer run
    lr: float = attrs.field(default=2e-5, validator=number(at_least=0))
    #: steps in which the learning rate rises
    warmup: int = attrs.field(default=10, validator=number(at_least=0))
    #: conversations of a step, over all ranks
    batch_size: int = attrs.field(default=32, validator=number(at_least=1))
    #: the most tokens of a conversation
    max_tokens: int = attrs.field(default=2048, validator=number(at_least=2))
    #: what becomes of a longer conversation: an error, left out, or its beginning
    too_long: Literal["raise", "skip", "cut"] = "raise"
    #: which replies are trained; templates of reasoning models need "last"
    replies: Literal["all", "last"] = "all"
    #: the most tokens of a micro-batch, but for a conversation that alone has more
    pack_tokens: int = attrs.field(default=4096, validator=number(at_least=2))
    #: what is computed in, by default what this machine is fastest in; the trained parameters stay
    #: float32
    dtype: Literal["float32", "bfloat16"] = attrs.field(factory=parallel.native_dtype)
    #: the rank of low-rank adapters, which are then trained alone; 0: the whole model is trained
    lora_rank: int = attrs.field(default=0, validator=number(at_least=0))
    #: compute activations again in the backward pass, instead of keeping them
    recompute: bool = False
    #: compile layers
    compile: bool = False
    #: expert parallelism: ranks that share the experts of each layer
    ep: int = attrs.field(default=1, validator=number(at_least=1))
    #: context parallelism: ranks that share the tokens of each micro-batch
    cp: int = attrs.field(default=1, validator=number(at_least=1))
    #: steps from one evaluation to the next; 0: only at the end
    eval_every: int = attrs.field(default=50, validator=number(at_least=0))
    #: steps from one checkpoint to the next; 0: only at the end, or when told to stop
    save_every: int = attrs.field(default=100, validator=number(at_least=0))
    #: the folder of a new run; runs/SCRIPT-NNN by default
    run_dir: str | None = None
    #: the folder of a run, to resume it there
    resume: str | None = attrs.field(default=None, validator=track.instead_of("run_dir"))


def extras(args: Args) -> list[str]:
    """The optional dependencies of a run, which are looked for before anything is loaded."""
    needed = []
    if args.env:
        needed.append("verifiers")
    if args.lora_rank:
        needed.append("lora")
    paths = [Path(path) for path in (*args.data, *args.eval_data)]
    files = [file for path in paths for file in (path.iterdir() if path.is_dir() else [path])]
    if any(file.suffix == ".parquet" for file in files):
        needed.append("data")
    return needed


def open_stream(args: Args) -> rollout.TaskStream:
    """The conversations to train on, in a new random order in every pass over them."""
    if not args.shares:
        return rollout.Shuffled(data.Conversations(*args.data), seed=args.seed)
    if len(args.shares) != len(args.data):
        raise ValueError(
            f"--shares has {len(args.shares)} numbers, --data {len(args.data)} paths; expected one "
            "share for each path"
        )
    streams = {}
    shares = {}
    for index, path in enumerate(args.data):
        streams[str(index)] = rollout.Shuffled(data.Conversations(path), seed=args.seed)
        shares[str(index)] = args.shares[index]
    return rollout.Mixture(streams, weights=shares)


def to_sample(conversation: Any, tokenizer: Any, model: Any, args: Args) -> TrainingSample | None:
    """The tokens of a conversation, and which are trained; None if it is too long."""
    return data.training_sample(
        conversation,
        tokenizer,
        max_tokens=args.max_tokens,
        stop_token_ids=models.stop_token_ids(model),
        replies=args.replies,
        too_long=args.too_long,
    )


def draw_samples(
    stream: rollout.TaskStream | None, tokenizer: Any, model: Any, args: Args
) -> list[TrainingSample]:
    """The samples of a step. Only rank 0 has a stream."""
    samples: list[TrainingSample] = []
    skipped = 0
    while stream is not None and len(samples) < args.batch_size:
        conversation = stream.draw()
        sample = to_sample(conversation, tokenizer, model, args)
        if sample is not None:
            samples.append(sample)
            continue
        skipped += 1
        if skipped == 1000:
            raise ValueError(
                f"1,000 conversations in a row were too long, such as {conversation['id']}; raise "
                f"--max-tokens ({args.max_tokens})"
            )
    return samples


def play(engine: Any, environment: Any, tasks: list[Any], args: Args) -> list[Rollout]:
    """Rollouts of the environment; what fails there is said, and does not end the training.

    Only rank 0 has an engine.
    """
    if engine is None:
        return []
    greedy = SamplingParams(max_tokens=args.env_tokens, temperature=0.0)
    rollouts = []
    for played in rollout.play_tasks(engine, environment, tasks, greedy):
        if played.rollout is None:
            print(f"{played.task['id']}: {played.message}")
        else:
            rollouts.append(played.rollout)
    return rollouts


def learning_rate(step: int, args: Args) -> float:
    """Of a step, counted from 0: a linear rise, then half a cosine down to zero."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (1 + math.cos(math.pi * progress)) / 2


def packing_cost(config: Any) -> Any:
    """What a document costs: FLOPs, or its tokens (None) in families whose FLOPs aren't counted."""
    try:
        flops.parameters(config)
    except ValueError:
        return None
    return partial(flops.training, config)


def to_batches(
    samples: list[TrainingSample], model: Any, mesh: parallel.Mesh, device: Any, args: Args
) -> list[packing.PackedBatch]:
    """This rank's micro-batches: all ranks get about equally much to compute."""
    packed = packing.pack(
        samples,
        max_tokens=args.pack_tokens,
        ranks=mesh.batches,
        too_long="alone",
        cost=packing_cost(model.config),
        share_prefixes=True,  # tokens that conversations begin with alike are computed once
    )
    return parallel.scatter(packed, packing.PackedBatch, mesh, device=device)


def add_adapters(model: Any, *, rank: int) -> None:
    """Low-rank adapters on every linear layer but the head; only they are trained."""
    import peft  # pip install '.[lora]'

    adapters = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    peft.inject_adapter_in_model(adapters, model)


def count_trained(samples: list[TrainingSample]) -> Any:
    """The trained tokens of the step, on all ranks: the loss is a mean over all of them."""
    return parallel.all_sum(sum(int(sample.loss_mask.sum()) for sample in samples))


def objective(model: Any, batch: packing.PackedBatch, *, tokens: Any) -> torch.Tensor:
    """The algorithm: a micro-batch's part of the mean negative log-likelihood of ``tokens``."""
    logprobs = loss.model_logprobs(
        model, batch.token_ids, batch.position_ids, batch.labels, rows=batch.loss_mask
    )
    return loss.token_mean(loss.cross_entropy(logprobs), batch.loss_mask, denom=tokens)


@torch.no_grad()
def evaluation_loss(
    model: Any, samples: list[TrainingSample], mesh: parallel.Mesh, device: Any, args: Args
) -> float | None:
    """The mean over held-out conversations; None if there are none."""
    tokens = count_trained(samples)
    if not tokens:
        return None
    total = torch.zeros((), device=device)
    for batch in to_batches(samples, model, mesh, device, args):
        total += objective(model, batch, tokens=tokens)
    return parallel.all_sum(total).item()


@track.interruptible()
def main(args: Args) -> None:
    world = parallel.process_group(seed=args.seed)
    # Beside the view, or in its place: track.wandb_sink("project", args).
    sinks = [track.LiveView("SFT", steps=args.steps)] if world.is_first else []
    parallel.configure_cpu()
    # Rank 0 also reads the data and keeps records. Broken files are found before the model loads.
    stream = open_stream(args) if world.is_first else None
    if args.env is not None:  # and so is an error in its name
        rollout.verifiers(args.env, tokenizer=None)
    model, tokenizer = models.load_pretrained(args.model)
    model.to(world.device)
    context = model.config.get_text_config().max_position_embeddings
    if args.max_tokens > context:
        raise ValueError(f"--max-tokens is {args.max_tokens}; the model's context is {context}")
    if args.lora_rank:
        add_adapters(model, rank=args.lora_rank)
    saved = checkpoint.last_good(args.resume if world.is_first else None)

    # On other ranks than 0, there is no engine, and the run does nothing.
    run = track.IdleRun()
    opened_engine = contextlib.nullcontext()
    held_out = []
    environment, env_tasks = None, []
    if world.is_first:
        if args.env is not None:
            environment = rollout.verifiers(args.env, tokenizer=tokenizer)
            env_tasks, _ = environment.tasks.split(args.env_tasks)
            dtype = getattr(torch, args.dtype)
            opened_engine = rollout.TransformersEngine(model, dtype=dtype, seed=args.seed)
        if args.resume:
            stream.restore(saved.get("data"))
        if args.eval_data:
            conversations = data.Conversations(*args.eval_data)
            samples = [to_sample(one, tokenizer, model, args) for one in conversations]
            held_out = [sample for sample in samples if sample is not None]
        run = track.Run(
            args.resume or args.run_dir,
            args=args,
            sinks=sinks,
            state=saved.get("run"),
            steps=args.steps,
            fixed=FIXED,
        )
    with opened_engine as engine, run, world:  # the ranks connect
        mesh = parallel.mesh(ep=args.ep, cp=args.cp)
        if args.recompute:
            parallel.recompute(model.train())
        parallel.shard(model, mesh, dtype=getattr(torch, args.dtype))
        if args.compile:
            for layer in model.get_decoder().layers:
                layer.compile(dynamic=True)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0, fused=True)
        guard = parallel.UpdateGuard(on_nonfinite="skip")
        transport = None
        if args.env is not None:
            transport = weights.transport_to(model, engine)
        checkpoints = checkpoint.Checkpoints(
            run.folder, model, optimizer, every=args.save_every, last=args.steps
        )
        with checkpoints:
            for step in range(checkpoints.load(saved), args.steps):
                metrics = {"lr": learning_rate(step, args)}
                if args.eval_every and step % args.eval_every == 0:
                    metrics["evaluation_loss"] = evaluation_loss(
                        model, held_out, mesh, world.device, args
                    )
                    if transport is not None:
                        transport.publish(step)
                        run.log_evaluation(step, play(engine, environment, env_tasks, args))
                samples = draw_samples(stream, tokenizer, model, args)
                if step == 0 and world.is_first:
                    text = data.marked_text(samples[0], tokenizer)
                    print("trained is what is between ⟦⟧:", textwrap.shorten(text, 600))
                tokens = count_trained(samples)
                total = torch.zeros((), device=world.device)
                for batch in to_batches(samples, model, mesh, world.device, args):
                    part = objective(model, batch, tokens=tokens)
                    part.backward()
                    total += part.detach()
                norm = parallel.clip_gradients(trained, 1.0)
                for group in optimizer.param_groups:
                    group["lr"] = metrics["lr"]
                if guard.allows(total, norm):
                    optimizer.step()
                optimizer.zero_grad()

                metrics["loss"] = parallel.all_sum(total)
                metrics["grad_norm"] = norm  # before it was clipped
                metrics["skipped_updates"] = guard.skipped
                metrics["trained_tokens"] = tokens
                metrics["tokens"] = sum(len(sample.token_ids) for sample in samples)
                run.log(step, metrics=metrics)
                stopping = world.should_stop()
                if stopping or checkpoints.due(step + 1):
                    checkpoints.save(step + 1, wait=stopping, data=stream, run=run)
                if stopping:
                    raise checkpoint.Stopped(step + 1)

        last = evaluation_loss(model, held_out, mesh, world.device, args)
        if transport is not None:
            transport.publish(args.steps)
            run.log_evaluation(args.steps, play(engine, environment, env_tasks, args))
        models.save_pretrained(model, run.final_folder, tokenizer=tokenizer)
        run.finish(evaluation_loss=last)
        if world.is_first:
            if last is not None:
                print(f"loss of held-out conversations: {last:.4f}")
            print(run.report())


if __name__ == "__main__":
    main(track.command_line(Args, description=__doc__, extras=extras))
