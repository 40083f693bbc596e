"""Supervised fine-tuning (SFT) of any Hugging Face chat model on the replies in conversations.

    python recipes/sft.py --model MODEL --data chats.jsonl traces/ --steps 200

The data are JSONL or Parquet files, or folders of such files, with rows of the form
``{"messages": [...], "tools": [...]}``; with ``--convert``, also ShareGPT, prompts with
completions, and others. A conversation that says something which would be neither trained nor shown
to the model is refused by file and line, or left out with ``--skip-bad``. All files are shuffled
together; with ``--shares 3 1``, two paths are sampled in the proportion 3 to 1. ``RUN_DIR/final``
is the resulting model, which ``async_grpo.py --model`` can load. With ``--env``, rollouts in an
environment evaluate the model.

To adapt the script, copy this file and edit it: ``draw_samples`` makes the batch, ``objective`` is
the loss. On 8 GPUs, start it with ``torchrun --nproc-per-node 8``. Ctrl-C and SIGTERM save a
checkpoint; ``--resume RUN_DIR`` continues with the next batch, on any number of ranks.
"""

import contextlib
import math
from pathlib import Path
from typing import Any, Literal

import attrs

from primerl import track

with track.interruptible():  # on Ctrl-C, print one line instead of a traceback
    print("importing torch", flush=True)  # the import takes seconds
    import torch

    from primerl import (
        checkpoint,
        data,
        loss,
        models,
        packing,
        parallel,
        rollout,
        weights,
    )

from primerl.track import number
from primerl.types import Rollout, SamplingParams, TrainingSample

# A resumed run must keep these arguments: they determine the order of the data, or the checkpoint
# depends on them. The files of --data may move: the stream compares their contents.
FIXED = (
    *("model", "shares", "convert", "skip_bad", "seed", "batch_size", "max_tokens", "replies"),
    *("too_long", "lora_rank"),
)
LEFT_OUT = "left_out.txt"


@attrs.frozen
class Args:
    """The flags of a run. To change anything else, edit this file."""

    #: model folder or Hugging Face hub id
    model: str
    #: files and folders of conversations
    data: tuple[str, ...]
    #: relative sampling frequency of each path in data; by default, all files are shuffled together
    shares: tuple[float, ...] = ()
    #: files and folders of held-out conversations
    eval_data: tuple[str, ...] = ()
    #: convert rows in other formats, such as ShareGPT or a prompt and a completion, to messages
    convert: bool = False
    #: leave out conversations that can't be trained as they are, instead of ending; the metric
    #: left_out counts them, left_out.txt in the run's folder names them
    skip_bad: bool = False
    #: environment of the verifiers library, to evaluate the model in
    env: str | None = None
    #: number of tasks from the environment: the first ones, which are sampled greedily
    env_tasks: int = attrs.field(default=32, validator=number(at_least=1))
    #: maximum tokens per reply in the environment
    env_tokens: int = attrs.field(default=256, validator=number(at_least=1))
    #: number of optimizer steps
    steps: int = attrs.field(default=100, validator=number(at_least=1))
    #: seed of the order of the conversations and of dropout
    seed: int = attrs.field(default=0, validator=number(at_least=0, below=2**32))
    #: peak learning rate: after the warm-up, the rate decays to zero along half a cosine over all
    #: steps; a run that is resumed with more steps continues with the schedule of the longer run
    lr: float = attrs.field(default=2e-5, validator=number(at_least=0))
    #: number of warm-up steps, in which the learning rate rises
    warmup: int = attrs.field(default=10, validator=number(at_least=0))
    #: conversations per step, over all ranks
    batch_size: int = attrs.field(default=32, validator=number(at_least=1))
    #: maximum tokens per conversation
    max_tokens: int = attrs.field(default=2048, validator=number(at_least=2))
    #: what to do with a longer conversation: raise an error, skip it, or cut its end off
    too_long: Literal["raise", "skip", "cut"] = "raise"
    #: which replies to train on; templates of reasoning models need "last"
    replies: Literal["all", "last"] = "all"
    #: maximum tokens per micro-batch; a longer conversation gets a separate micro-batch
    pack_tokens: int = attrs.field(default=4096, validator=number(at_least=2))
    #: dtype of the computation, by default the fastest on this machine; the trained parameters stay
    #: float32
    dtype: Literal["float32", "bfloat16"] = attrs.field(factory=parallel.native_dtype)
    #: rank of low-rank adapters, which are then trained alone; 0: train the whole model
    lora_rank: int = attrs.field(default=0, validator=number(at_least=0))
    #: recompute activations in the backward pass instead of storing them
    recompute: bool = False
    #: compile the layers; later runs reuse the compiled code
    compile: bool = False
    #: expert parallelism: number of ranks that share the experts of each layer
    ep: int = attrs.field(default=1, validator=number(at_least=1))
    #: context parallelism: number of ranks that share the tokens of each micro-batch
    cp: int = attrs.field(default=1, validator=number(at_least=1))
    #: steps between evaluations; 0: evaluate only at the end
    eval_every: int = attrs.field(default=50, validator=number(at_least=0))
    #: steps between checkpoints; 0: save only at the end or when the run is stopped
    save_every: int = attrs.field(default=100, validator=number(at_least=0))
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
    if args.lora_rank:
        needed.append("lora")
    paths = [Path(path) for path in (*args.data, *args.eval_data)]
    files = [file for path in paths for file in (path.iterdir() if path.is_dir() else [path])]
    if any(file.suffix.lower() == ".parquet" for file in files):
        needed.append("data")
    if args.wandb:
        needed.append("wandb")
    return needed


def open_data(*paths: str, args: Args, left_out: data.LeftOut | None = None) -> data.Conversations:
    """Open files of conversations, and add those that are left out to ``left_out``."""
    skip_bad = left_out is not None
    conversations = data.Conversations(*paths, convert=args.convert, skip_bad=skip_bad)
    if left_out is not None:
        for error in conversations.bad:
            left_out.add(error)
    if conversations.unread:
        keys = ", ".join(sorted(conversations.unread))
        print(f"{', '.join(paths)}: these keys of messages are not read: {keys}")
    if conversations.unread_files:
        print("these files and folders are not read:", ", ".join(conversations.unread_files))
    return conversations


def open_stream(args: Args, left_out: data.LeftOut | None = None) -> rollout.TaskStream:
    """Return the stream of training conversations, reshuffled for each epoch."""
    if not args.shares:
        conversations = open_data(*args.data, args=args, left_out=left_out)
        return rollout.Shuffled(conversations, seed=args.seed)
    if len(args.shares) != len(args.data):
        raise ValueError(
            f"--shares has {len(args.shares)} numbers, --data {len(args.data)} paths; expected one "
            "share for each path"
        )
    streams = {}
    shares = {}
    for index, path in enumerate(args.data):
        conversations = open_data(path, args=args, left_out=left_out)
        streams[str(index)] = rollout.Shuffled(conversations, seed=args.seed)
        shares[str(index)] = args.shares[index]
    return rollout.Mixture(streams, weights=shares)


def to_sample(
    conversation: Any, tokenizer: Any, model: Any, args: Args, left_out: data.LeftOut | None = None
) -> TrainingSample | None:
    """Tokenize a conversation and mark the trained tokens; None if it is skipped or left out."""
    try:
        return data.training_sample(
            conversation,
            tokenizer,
            max_tokens=args.max_tokens,
            stop_token_ids=models.stop_token_ids(model),
            replies=args.replies,
            too_long=args.too_long,
        )
    except data.ConversationError as error:
        if left_out is None:
            raise
        left_out.add(str(error))
        return None


def draw_samples(
    stream: rollout.TaskStream | None,
    tokenizer: Any,
    model: Any,
    args: Args,
    left_out: data.LeftOut | None = None,
) -> list[TrainingSample]:
    """Draw the samples of a step. Only rank 0 has a stream; the other ranks get none."""
    samples: list[TrainingSample] = []
    skipped = 0
    while stream is not None and len(samples) < args.batch_size:
        conversation = stream.draw()
        sample = to_sample(conversation, tokenizer, model, args, left_out)
        if sample is not None:
            samples.append(sample)
            continue
        skipped += 1
        if skipped == 1000:
            raise ValueError(
                f"1,000 conversations in a row were too long or left out, such as "
                f"{conversation['id']}; raise --max-tokens ({args.max_tokens}), or mend the data"
            )
    return samples


def evaluate(engine: Any, environment: Any, tasks: list[Any], args: Args) -> list[Rollout]:
    """Sample rollouts in the environment.

    Errors of tasks are printed and do not end the training. Only rank 0 has an engine; the other
    ranks get no rollouts.
    """
    if engine is None:
        return []
    greedy = SamplingParams(max_tokens=args.env_tokens, temperature=0.0)
    rollouts = []
    for played in rollout.evaluate_tasks(engine, environment, tasks, greedy):
        if played.rollout is None:
            print(f"{played.task['id']}: {played.message}")
        else:
            rollouts.append(played.rollout)
    return rollouts


def learning_rate(step: int, args: Args) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then cosine decay."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (1 + math.cos(math.pi * progress)) / 2


def to_batches(
    samples: list[TrainingSample], model: Any, mesh: parallel.Mesh, device: Any, args: Args
) -> list[packing.PackedBatch]:
    """Pack the samples into this rank's micro-batches, with about equal work for all ranks."""
    packed = packing.pack(
        samples,
        max_tokens=args.pack_tokens,
        ranks=mesh.batches,
        too_long="alone",
        cost=packing.document_cost(model.config),
        share_prefixes=True,  # computes common prefixes of conversations once
    )
    return parallel.scatter(packed, packing.PackedBatch, mesh, device=device)


def add_adapters(model: Any, *, rank: int) -> None:
    """Add low-rank adapters to all linear layers but the head, and freeze all else.

    In a mixture of experts, its MLPs are left out too.
    """
    import peft  # pip install '.[lora]'

    targets = models.adapter_targets(model)
    adapters = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
    peft.inject_adapter_in_model(adapters, model)


def count_trained(samples: list[TrainingSample]) -> Any:
    """Count the trained tokens of the step over all ranks, which the loss is averaged over."""
    return parallel.all_sum(sum(int(sample.loss_mask.sum()) for sample in samples))


def objective(model: Any, batch: packing.PackedBatch, *, tokens: Any) -> torch.Tensor:
    """Compute a micro-batch's part of the loss: its negative log-likelihood over ``tokens``."""
    logprobs = loss.model_logprobs(
        model, batch.token_ids, batch.position_ids, batch.labels, rows=batch.loss_mask
    )
    return loss.token_mean(loss.cross_entropy(logprobs), batch.loss_mask, denom=tokens)


@torch.no_grad()
def evaluation_loss(
    model: Any, samples: list[TrainingSample], mesh: parallel.Mesh, device: Any, args: Args
) -> float | None:
    """Return the mean loss over the held-out conversations; None if there are none."""
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
    sinks = []
    if world.is_first:
        sinks = [track.LiveView("SFT", steps=args.steps), track.wandb_sink(args.wandb, args)]
    parallel.configure_cpu()
    # Rank 0 also reads the data and writes the run folder. It finds broken files before the model
    # loads.
    left_out = None
    if args.skip_bad:
        left_out = data.LeftOut.read(Path(args.resume, LEFT_OUT) if args.resume else None)
    stream = open_stream(args, left_out) if world.is_first else None
    if args.env is not None:  # find a wrong name before the model loads
        rollout.verifiers(args.env, tokenizer=None)
    model, tokenizer = models.load_pretrained(args.model)
    model.to(world.device)
    context = model.config.get_text_config().max_position_embeddings
    if args.max_tokens > context:
        raise ValueError(f"--max-tokens is {args.max_tokens}; the model's context is {context}")
    if args.lora_rank:
        add_adapters(model, rank=args.lora_rank)
    saved = checkpoint.last_good(args.resume if world.is_first else None)

    # On ranks other than 0, there is no engine, and the run does nothing.
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
        if args.eval_data:
            conversations = open_data(*args.eval_data, args=args, left_out=left_out)
            samples = [to_sample(one, tokenizer, model, args, left_out) for one in conversations]
            held_out = [sample for sample in samples if sample is not None]
        run = track.Run(
            args.resume or args.run_dir,
            args=args,
            sinks=sinks,
            state=saved.get("run"),
            steps=args.steps,
            fixed=FIXED,
        )
        if args.resume:
            stream.restore(saved.get("data"))
    with opened_engine as engine, run, world:  # the ranks connect
        mesh = parallel.mesh(ep=args.ep, cp=args.cp)
        if args.recompute:
            parallel.recompute(model.train())
        parallel.shard(model, mesh, dtype=getattr(torch, args.dtype))
        if args.compile:
            parallel.compile_layers(model)
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
                        run.log_evaluation(step, evaluate(engine, environment, env_tasks, args))
                samples = draw_samples(stream, tokenizer, model, args, left_out)
                if step == 0 and world.is_first:
                    text = data.marked_text(samples[0], tokenizer)
                    if len(text) > 1500:
                        text = f"{text[:500]}\n[…]\n{text[-1000:]}"
                    print(f"text between ⟦ and ⟧ is trained:\n{text}")
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
                metrics["grad_norm"] = norm  # before clipping
                metrics["skipped_updates"] = guard.skipped
                metrics["trained_tokens"] = tokens
                metrics["tokens"] = sum(len(sample.token_ids) for sample in samples)
                if left_out is not None:
                    metrics["left_out"] = len(left_out)
                run.log(step, metrics=metrics)
                if left_out is not None and world.is_first:
                    left_out.write(run.folder / LEFT_OUT)
                stopping = world.should_stop()
                if stopping or checkpoints.due(step + 1):
                    checkpoints.save(step + 1, wait=stopping, data=stream, run=run)
                if stopping:
                    raise checkpoint.Stopped(step + 1)

        last = evaluation_loss(model, held_out, mesh, world.device, args)
        if transport is not None:
            transport.publish(args.steps)
            run.log_evaluation(args.steps, evaluate(engine, environment, env_tasks, args))
        models.save_pretrained(model, run.final_folder, tokenizer=tokenizer)
        run.finish(evaluation_loss=last)
        if world.is_first:
            if last is not None:
                print(f"loss on held-out conversations: {last:.4f}")
            print(run.report())


if __name__ == "__main__":
    main(
        track.command_line(
            Args,
            description=__doc__,
            extras=extras,
            check=lambda args: track.require_model(args.model, flag="--model"),
        )
    )
