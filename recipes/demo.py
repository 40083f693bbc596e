"""Asynchronous RL on a laptop: a small mixture of experts learns to reverse words.

A Qwen3-MoE of 1.3 million parameters first imitates a teacher that reverses short words but copies
most of the long ones. Then it learns the rest from rewards alone, while rollouts and training
overlap:

    python recipes/demo.py --seed 0

The algorithm is DPPO, which is designed for rollouts of earlier weights; recipes/async_grpo.py has
GRPO. On two CPU cores, exact match on 256 held-out words rises from below 0.5 to above 0.8 within
a few minutes. ``--permute-rewards`` is the control experiment, in which nothing is learned.
``--record`` saves the groups that were trained on. ``--groups`` trains on them again with the same
losses, also under torchrun. ``--replay --engine-dtype bfloat16`` replays the sampler's routes
in the trainer and reports how much they change the mismatch. All ranks are CPU processes, whether
or not there is a GPU.
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any, Literal

import attrs
import numpy as np

from primerl import track

with track.interruptible():  # on Ctrl-C, print one line instead of a traceback
    print("importing torch", flush=True)  # the import takes seconds
    import torch

    from primerl import (
        advantage,
        filters,
        loss,
        models,
        packing,
        parallel,
        replay,
        rollout,
        testing,
        weights,
    )

from primerl.track import number
from primerl.types import SamplingParams

LONG = 5  # letters that make a word long
LONG_REVERSED = 0.2  # fraction of long words that the teacher reverses
HELD_OUT = 256  # tasks
MAX_TOKENS = 8  # per reply: a word, its end, and room for mistakes
COMPARE_EVERY = 32  # steps between the extra forward passes that measure the effect of --replay
# In nats. Replayed routes from before a weight update cause less mismatch than this in most steps.
REPLAY_MISMATCH = 1e-4


@attrs.frozen
class Args:
    """The flags of the demo."""

    #: seed of the model, the tasks and the sampling
    seed: int = attrs.field(default=0, validator=number(at_least=0, below=2**32))
    #: number of supervised steps before RL, with 64 words each
    warmup_steps: int = attrs.field(default=300, validator=number(at_least=0))
    #: number of policy steps
    steps: int = attrs.field(default=65, validator=number(at_least=1))
    #: learning rate of SGD; Adam would scale up pure noise to full-size steps
    lr: float = attrs.field(default=0.016, validator=number(at_least=0))
    #: words per policy step
    groups_per_step: int = attrs.field(default=64, validator=number(at_least=1))
    #: rollouts per word; advantages compare their rewards
    group_size: int = attrs.field(default=16, validator=number(at_least=2))
    #: maximum staleness of a trained token, in policy steps
    max_staleness: int = attrs.field(default=2, validator=number(at_least=0))
    #: control experiment: permute the rewards, so that they carry no information
    permute_rewards: bool = False
    #: dtype in which the sampler computes; bfloat16 makes it differ from the trainer, as on GPUs
    engine_dtype: Literal["float32", "bfloat16"] = "float32"
    #: route each token to the experts that the sampler chose, and compare with the trainer's routes
    replay: bool = False
    #: file to save the trained groups in
    record: str | None = attrs.field(default=None, validator=track.new_file)
    #: file written by --record: train on at most --steps of its steps, without new rollouts
    groups: str | None = None
    #: folder of the run; runs/demo-NNN by default
    run_dir: str | None = None


def build_policy(seed: int) -> tuple[Any, Any]:
    tokenizer = testing.character_tokenizer("abcdefghijklmnopqrstuvwxyz>")
    model = testing.tiny_model(
        "qwen3_moe",
        seed=seed,
        vocab_size=len(tokenizer),
        hidden_size=128,
        head_dim=32,
        num_hidden_layers=3,
        num_experts=8,
        moe_intermediate_size=128,
    )
    return model, tokenizer


def warm_up(model: Any, tokenizer: Any, tasks: list[Any], *, steps: int, seed: int) -> None:
    print(f"imitating the teacher for {steps} steps ...", flush=True)
    draw = random.Random(seed)

    def answer(task: Any) -> str:
        copies = len(task["id"]) >= LONG and draw.random() >= LONG_REVERSED
        return task["id"] if copies else task["answer"]

    lessons = []
    for _ in range(steps):
        drawn = draw.sample(tasks, 64)
        lessons.append([(task["prompt"], answer(task)) for task in drawn])
    testing.imitate(model, tokenizer, lessons)


def reward(task: Any, reply: str) -> float:
    """Return the mean of the fraction of letters in the right place and the exact match."""
    answer = task["answer"]
    right = sum(a == b for a, b in zip(reply, answer, strict=False))
    return 0.5 * right / max(len(answer), len(reply)) + 0.5 * (reply == answer)


@contextlib.contextmanager
def open_engine(args: Args, model: Any) -> Iterator[Any]:
    """Open the sampling engine, a copy of the policy. With ``--replay``, it records routes."""
    dtype = getattr(torch, args.engine_dtype)
    if not args.replay:
        with rollout.TransformersEngine(model, dtype=dtype, seed=args.seed) as engine:
            yield engine
        return
    with (
        replay.Store(replay.shape(model)) as routes,
        rollout.TransformersEngine(
            model, dtype=dtype, seed=args.seed, routes=routes, capture=replay.capture
        ) as engine,
    ):
        yield engine


def backward(
    model: Any,
    batches: list[packing.PackedBatch],
    *,
    statistics: loss.Statistics,
    counts: replay.RouteCounts,
) -> None:
    """Accumulate the gradients of a step with DPPO (arXiv:2602.04879)."""
    trained = parallel.all_sum(sum(int(batch.loss_mask.sum()) for batch in batches))
    for batch, routes in replay.fetch(batches, counts=counts):
        with replay.forced(model, routes, counts=counts):  # routes is None without --replay
            logprobs = loss.model_logprobs(
                model, batch.token_ids, batch.position_ids, batch.labels, rows=batch.loss_mask
            )
            per_token, aux = loss.dppo(logprobs, batch.behavior_logprobs, batch.advantages)
            objective = loss.token_mean(per_token, batch.loss_mask, denom=trained)
            objective.backward()
        statistics.add(
            logprobs,
            batch.behavior_logprobs,
            batch.loss_mask,
            batch.versions,
            loss=objective,
            aux=aux,
        )


def mismatch_of_own_routes(
    model: Any, batches: list[packing.PackedBatch], *, version: int
) -> dict[str, float]:
    """Compute the mismatch that results when the trainer uses its own routes."""
    statistics = loss.Statistics(version=version)
    for batch in batches:
        with torch.no_grad():
            logprobs = loss.model_logprobs(
                model, batch.token_ids, batch.position_ids, batch.labels, rows=batch.loss_mask
            )
        statistics.add(logprobs, batch.behavior_logprobs, batch.loss_mask, batch.versions)
    found = statistics.summary(parallel.all_sum)
    return {"mismatch_kl_own_routes": found["mismatch_kl"]} if "mismatch_kl" in found else {}


@track.interruptible()
def main(args: Args) -> None:
    if args.replay and (args.record or args.groups):
        raise ValueError("recorded groups have no expert routes; remove --replay")
    torch.set_num_threads(1)  # the trainer and the engine use one thread each
    world = parallel.process_group(device="cpu")  # the model is too small for a GPU
    recorded = rollout.load_groups(args.groups)[: args.steps] if args.groups else []
    steps = len(recorded) if args.groups else args.steps
    tasks = [{"id": word, "prompt": f"{word}>", "answer": word[::-1]} for word in testing.words()]
    random.Random(args.seed).shuffle(tasks)
    eval_tasks, train_tasks = tasks[:HELD_OUT], tasks[HELD_OUT:]
    model, tokenizer = build_policy(args.seed)
    run = track.IdleRun()
    if world.is_first:
        view = track.LiveView("reversing words", steps=steps)
        run = track.Run(
            args.run_dir,
            args=args,
            decode=tokenizer.decode,
            sinks=[view],
            gate=track.MismatchGate(floor=REPLAY_MISMATCH) if args.replay else None,
        )
    warm_up(model, tokenizer, train_tasks, steps=args.warmup_steps, seed=args.seed)
    generator = np.random.default_rng(args.seed)

    @advantage.of_rewards
    def advantages(rewards: Any) -> Any:
        if args.permute_rewards:
            rewards = generator.permutation(rewards)
        return advantage.centered(rewards)

    opened_engine = contextlib.nullcontext()  # without an engine, the worker does nothing
    if world.is_first and not args.groups:
        opened_engine = open_engine(args, model)
    trained_groups = []

    with (
        opened_engine as engine,
        rollout.worker(
            engine,
            rollout.single_turn(tokenizer, reward=reward),
            train_tasks,
            params=SamplingParams(max_tokens=MAX_TOKENS),
            group_size=args.group_size,
            groups_per_step=args.groups_per_step,
            max_staleness=args.max_staleness,
            keep=[filters.has_signal],
        ) as rollouts,
        run,
        world,
    ):

        def exact_match() -> float | None:
            greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
            played = rollouts.evaluate(eval_tasks, greedy)
            return float(np.mean([one.reward == 1 for one in played])) if played else None

        parallel.shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
        transport = None if args.groups else weights.transport_to(model, engine, worker=rollouts)
        before = exact_match()
        parallel.freeze_gc()  # no garbage collection of the objects built so far

        for step in range(steps):
            if world.is_first and args.groups:
                groups = recorded[step]
            else:
                groups = rollouts.take(version=step)
            trained_groups.append(groups)
            samples = advantage.assign(groups, advantages)
            packed = packing.pack(samples, max_tokens=8192, ranks=world.world_size)
            batches = parallel.scatter(packed, packing.PackedBatch)

            statistics, counts = loss.Statistics(version=step), replay.RouteCounts()
            backward(model, batches, statistics=statistics, counts=counts)
            own_routes = {}
            if args.replay:
                replay.discard(samples)
            if args.replay and step % COMPARE_EVERY == 0:
                own_routes = mismatch_of_own_routes(model, batches, version=step)
            parallel.clip_gradients(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if transport is not None:
                transport.publish(step + 1)  # updates the engine while rollouts are in flight

            metrics = statistics.summary(parallel.all_sum) | own_routes
            metrics |= counts.summary(parallel.all_sum)
            run.log(step, groups, samples, metrics=metrics, totals=rollouts.stats())
        models.save_pretrained(model, run.final_folder, tokenizer=tokenizer)
        run.finish(eval_before=before, eval_after=exact_match())
        if world.is_first and args.record:
            rollout.save_groups(args.record, trained_groups)
        if world.is_first:
            print(run.report())


if __name__ == "__main__":
    main(track.command_line(Args, description=__doc__))
