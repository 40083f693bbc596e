"""Asynchronous RL on a laptop: a small mixture of experts learns to reverse words.

A Qwen3-MoE of 1.3 million parameters first imitates a teacher who reverses short words but copies
most of the long ones. Then rewards alone teach it the rest, while rollouts and training overlap.
Words that it never saw are scored before and after. On two CPU cores, within a few minutes:

    python recipes/demo.py --seed 0

Exact match on 256 held-out words rises from below 0.5 to above 0.8. With ``--permute-rewards``,
the control, each reward goes to another rollout of its group, and nothing is learned.
"""

import random
from typing import Any

import attrs
import numpy as np
import torch
import tyro

from primerl import advantage, filters, loss, packing, rollout, testing, track, weights
from primerl.types import SamplingParams

HELD_OUT = 256
LONG, LONG_REVERSED = 5, 0.2  # of words this long, the teacher reverses this share
MAX_TOKENS = 8  # a word, its end, and room for mistakes


@attrs.frozen
class Args:
    """What the demo may vary."""

    seed: int = 0
    warmup_steps: int = 300  # supervised, of 64 words each
    steps: int = 65  # of RL
    lr: float = 0.016  # of SGD
    groups_per_step: int = 64
    group_size: int = 16  # rollouts of one word, compared with each other
    max_staleness: int = 2  # the bound, in policy steps
    permute_rewards: bool = False  # the control: rewards carry no information
    run_dir: str | None = None


def build_policy(seed: int) -> tuple[Any, Any]:
    tokenizer = testing.character_tokenizer("abcdefghijklmnopqrstuvwxyz>")
    shape = {"vocab_size": len(tokenizer), "hidden_size": 128, "head_dim": 32}
    shape |= {"num_hidden_layers": 3, "num_experts": 8, "moe_intermediate_size": 128}
    return testing.tiny_model("qwen3_moe", seed=seed, **shape), tokenizer


def warm_up(model: Any, tokenizer: Any, words: list[str], *, steps: int, seed: int) -> None:
    """Imitate the teacher, through the same packed forward as RL."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    draw = random.Random(seed)
    for _ in range(steps):
        documents = []
        for word in draw.sample(words, 64):
            copies = len(word) >= LONG and draw.random() >= LONG_REVERSED
            documents.append(tokenizer.encode(f"{word}>{word if copies else word[::-1]}<eos>"))
        token_ids = torch.tensor([token for document in documents for token in document])
        position_ids = torch.cat([torch.arange(len(document)) for document in documents])
        logprobs = loss.model_logprobs(model, token_ids, position_ids, token_ids.roll(-1))
        # The rows that predict the answer: from ">", in the middle of "word>drow<eos>", on.
        rows = torch.cat([torch.arange(len(d)) >= len(d) // 2 - 1 for d in documents])
        rows &= position_ids.roll(-1) != 0
        loss.token_mean(-logprobs, rows, denom=int(rows.sum())).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def reward(task: Any, reply: str) -> float:
    """Half for the share of letters in their place, half for the whole word."""
    answer = task["answer"]
    right = sum(a == b for a, b in zip(reply, answer, strict=False))
    return 0.5 * right / max(len(answer), len(reply)) + 0.5 * (reply == answer)


def main(args: Args) -> None:
    torch.set_num_threads(1)  # for the trainer, and as many for the engine
    tasks = [{"id": word, "prompt": f"{word}>", "answer": word[::-1]} for word in testing.words()]
    random.Random(args.seed).shuffle(tasks)
    held_out, train = tasks[:HELD_OUT], tasks[HELD_OUT:]
    words = [task["id"] for task in train]
    assert not {task["id"] for task in held_out} & set(words), "a held-out word is trained on"
    model, tokenizer = build_policy(args.seed)
    print(f"imitating the teacher for {args.warmup_steps} steps ...", flush=True)
    warm_up(model, tokenizer, words, steps=args.warmup_steps, seed=args.seed)
    # Not Adam, which scales pure noise up to full steps: SGD moves only as far as rewards agree.
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    permute = np.random.default_rng(args.seed).permutation
    control = advantage.of_rewards(lambda rewards: advantage.centered(permute(rewards)))
    estimator = control if args.permute_rewards else advantage.centered
    environment = rollout.single_turn(tokenizer, reward=reward)
    greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    view = track.LiveView("reversing words", steps=args.steps)

    with (
        rollout.TransformersEngine(model, seed=args.seed) as engine,
        rollout.worker(
            engine,
            environment,
            train,
            params=SamplingParams(max_tokens=MAX_TOKENS),
            group_size=args.group_size,
            groups_per_step=args.groups_per_step,
            max_staleness=args.max_staleness,
            keep=[filters.has_signal],
        ) as rollouts,
        track.Run(args.run_dir, args=args, decode=tokenizer.decode, sinks=[view]) as run,
    ):

        def exact_match() -> float:
            return float(np.mean([one.reward == 1 for one in rollouts.evaluate(held_out, greedy)]))

        transport = weights.SharedMemory(model, engine)
        before = exact_match()
        for step in range(args.steps):
            groups = rollouts.take(version=step)
            samples = advantage.assign(groups, estimator)
            (batches,) = packing.pack(samples, max_tokens=8192, ranks=1)
            trained = sum(int(batch.loss_mask.sum()) for batch in batches)
            mismatch = torch.zeros(2)
            for b in batches:
                logprobs = loss.model_logprobs(
                    model, b.token_ids, b.position_ids, b.labels, temperature=b.temperature
                )
                per_token, _ = loss.dppo(logprobs, b.behavior_logprobs, b.advantages)
                loss.token_mean(per_token, b.loss_mask, denom=trained).backward()
                mine = (logprobs, b.behavior_logprobs, b.loss_mask, b.versions)
                mismatch += torch.stack(loss.mismatch_kl(*mine, version=step))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            transport.publish(step + 1)  # into the engine, while rollouts are in flight
            run.log(
                step, groups=groups, samples=samples, totals=rollouts.stats(), mismatch=mismatch
            )
        run.finish(
            save=lambda folder: weights.save_pretrained(model, folder, tokenizer=tokenizer),
            eval_before=before,
            eval_after=exact_match(),
        )
    print(run.report())


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
