"""Asynchronous RL on a laptop: a small mixture of experts learns to reverse words.

A Qwen3-MoE of 1.3 million parameters first imitates a teacher who reverses short words but copies
most of the long ones. Then rewards alone teach it the rest, while rollouts and training overlap:

    python recipes/demo.py --seed 0

On two CPU cores, within a few minutes, exact match on 256 words that it never saw rises from below
0.5 to above 0.8. With ``--permute-rewards``, the control, nothing is learned. ``--record`` saves
the groups trained on; ``--groups`` trains on them again, with the same losses, also under torchrun.
"""

import collections
import contextlib
import random
from typing import Any

import attrs
import numpy as np
import torch
import tyro

from primerl import (
    advantage,
    filters,
    loss,
    models,
    packing,
    parallel,
    rollout,
    testing,
    track,
    weights,
)
from primerl.track import number
from primerl.types import SamplingParams

LONG, LONG_REVERSED = 5, 0.2  # of words this long, the teacher reverses this share
HELD_OUT, MAX_TOKENS = 256, 8  # tasks; tokens: a word, its end, and room for mistakes


@attrs.frozen
class Args:
    """What the demo may vary."""

    seed: int = attrs.field(default=0, validator=number(at_least=0, below=2**32))
    # supervised, of 64 words each
    warmup_steps: int = attrs.field(default=300, validator=number(at_least=0))
    steps: int = attrs.field(default=65, validator=number(at_least=1))  # of RL
    # of SGD; Adam would scale pure noise up to full steps
    lr: float = attrs.field(default=0.016, validator=number(at_least=0))
    groups_per_step: int = attrs.field(default=64, validator=number(at_least=1))
    # rollouts of one word, compared with each other
    group_size: int = attrs.field(default=16, validator=number(at_least=2))
    # the bound, in policy steps
    max_staleness: int = attrs.field(default=2, validator=number(at_least=0))
    permute_rewards: bool = False  # the control: rewards carry no information
    # a file for the groups that are trained on
    record: str | None = attrs.field(default=None, validator=track.new_file)
    groups: str | None = None  # such a file to train on, at most --steps, with no new rollouts
    run_dir: str | None = None


def build_policy(seed: int) -> tuple[Any, Any]:
    tokenizer = testing.character_tokenizer("abcdefghijklmnopqrstuvwxyz>")
    shape = {"vocab_size": len(tokenizer), "hidden_size": 128, "head_dim": 32}
    shape |= {"num_hidden_layers": 3, "num_experts": 8, "moe_intermediate_size": 128}
    return testing.tiny_model("qwen3_moe", seed=seed, **shape), tokenizer


def warm_up(model: Any, tokenizer: Any, tasks: list[Any], *, steps: int, seed: int) -> None:
    print(f"imitating the teacher for {steps} steps ...", flush=True)
    draw = random.Random(seed)

    def answer(task: Any) -> str:
        copies = len(task["id"]) >= LONG and draw.random() >= LONG_REVERSED
        return task["id"] if copies else task["answer"]

    lessons = ([(t["prompt"], answer(t)) for t in draw.sample(tasks, 64)] for _ in range(steps))
    testing.imitate(model, tokenizer, lessons)


def reward(task: Any, reply: str) -> float:
    """Half for the share of letters in their place, half for the whole word."""
    answer = task["answer"]
    right = sum(a == b for a, b in zip(reply, answer, strict=False))
    return 0.5 * right / max(len(answer), len(reply)) + 0.5 * (reply == answer)


def main(args: Args) -> None:
    torch.set_num_threads(1)  # for the trainer, and as many for the engine
    world = parallel.process_group()
    recorded = rollout.load_groups(args.groups)[: args.steps] if args.groups else []
    steps = len(recorded) if args.groups else args.steps
    tasks = [{"id": word, "prompt": f"{word}>", "answer": word[::-1]} for word in testing.words()]
    random.Random(args.seed).shuffle(tasks)
    held_out, train = tasks[:HELD_OUT], tasks[HELD_OUT:]
    model, tokenizer = build_policy(args.seed)
    run = None
    if world.is_first:
        view = track.LiveView("reversing words", steps=steps)
        run = track.Run(args.run_dir, args=args, decode=tokenizer.decode, sinks=[view])
    warm_up(model, tokenizer, train, steps=args.warmup_steps, seed=args.seed)
    permute = np.random.default_rng(args.seed).permutation if args.permute_rewards else np.array
    estimator = advantage.of_rewards(lambda rewards: advantage.centered(permute(rewards)))

    with contextlib.ExitStack() as stack:
        engines, taken = [], []
        if world.is_first and not args.groups:  # all ranks train; only the first one samples
            engines = [stack.enter_context(rollout.TransformersEngine(model, seed=args.seed))]
            worker = rollout.worker(
                *engines,
                rollout.single_turn(tokenizer, reward=reward),
                train,
                params=SamplingParams(max_tokens=MAX_TOKENS),
                group_size=args.group_size,
                groups_per_step=args.groups_per_step,
                max_staleness=args.max_staleness,
                keep=[filters.has_signal],
            )
            rollouts = stack.enter_context(worker)
        if world.is_first:
            stack.enter_context(run)
        stack.enter_context(world)

        def exact_match() -> float:
            greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
            return float(np.mean([one.reward == 1 for one in rollouts.evaluate(held_out, greedy)]))

        parallel.shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
        transport = None if args.groups else weights.SharedMemory(model, *engines)
        before = exact_match() if engines else None
        for step in range(steps):
            if world.is_first:
                taken.append(recorded[step] if args.groups else rollouts.take(version=step))
                samples = advantage.assign(taken[-1], estimator)
                packed = packing.pack(samples, max_tokens=8192, ranks=world.world_size)
            batches = parallel.scatter(packed if world.is_first else None, packing.PackedBatch)
            trained = parallel.all_sum(sum(int(batch.loss_mask.sum()) for batch in batches))
            sums = collections.Counter()  # over micro-batches
            for b in batches:
                logprobs = loss.model_logprobs(model, b.token_ids, b.position_ids, b.labels)
                per_token, aux = loss.dppo(logprobs, b.behavior_logprobs, b.advantages)
                mean = loss.token_mean(per_token, b.loss_mask, denom=trained)
                mean.backward()
                mine = (logprobs, b.behavior_logprobs, b.loss_mask, b.versions)
                sums.update(loss.token_statistics(*mine, version=step, aux=aux), loss=mean.detach())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if transport:
                transport.publish(step + 1)  # into the engine, while rollouts are in flight
            totals = parallel.all_sum(sums)  # over ranks
            if world.is_first:
                figures = {"mismatch": totals["kl_by_staleness"][0], "samples": samples}
                figures |= {"totals": rollouts.stats() if engines else {}}
                run.log(step, groups=taken[-1], metrics=loss.summarize(totals), **figures)
        models.save_pretrained(model, run and run.folder / "final", tokenizer=tokenizer)
        if world.is_first:
            run.finish(eval_before=before, eval_after=exact_match() if engines else None)
            if args.record:
                rollout.save_groups(args.record, taken)
            print(run.report())


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
