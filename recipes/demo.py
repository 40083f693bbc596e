"""Asynchronous RL on a laptop: a small mixture of experts learns to reverse words.

Builds a Qwen3-MoE of about a million parameters, warms it up on correct examples until it gets
some words right, then improves it with rewards alone while rollouts and training overlap. Held-out
words are scored before and after. Two CPU cores, a few minutes:

    python recipes/demo.py --seed 0

Expected: exact match on 256 unseen words rises from below 0.5 to above 0.8. With
``--permute-rewards``, which gives each rollout the reward of another of its group, it stays.
"""

import random
import time

import attrs
import numpy as np
import torch
import torch.nn.functional as F
import tyro

from primerl import advantage, filters, loss, packing, rollout, testing, track, weights
from primerl.types import SamplingParams

HELD_OUT = 256
MAX_TOKENS = 8


@attrs.frozen
class Args:
    """What the demo may vary."""

    seed: int = 0
    warmup_steps: int = 200
    """Supervised steps before RL."""
    steps: int = 80
    """Policy steps."""
    lr: float = 1e-3
    groups_per_step: int = 32
    group_size: int = 16
    max_staleness: int = 2
    """The bound, in policy steps."""
    permute_rewards: bool = False
    """The control: rewards carry no information."""
    threads: int = 1
    """Of torch in each of the trainer and the engine."""
    run_dir: str | None = None


def build_policy(seed: int) -> tuple[torch.nn.Module, object]:
    tokenizer = testing.character_tokenizer("abcdefghijklmnopqrstuvwxyz>")
    model = testing.tiny_model(
        "qwen3_moe",
        seed=seed,
        vocab_size=len(tokenizer),
        hidden_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    return model, tokenizer


def warm_up(model: torch.nn.Module, tokenizer, words: list[str], *, steps: int, seed: int) -> None:
    """Supervised steps on correct reversals: enough to be right now and then."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    rng = random.Random(seed)
    for _ in range(steps):
        documents = [
            tokenizer.encode(f"{word}>{word[::-1]}<eos>") for word in rng.sample(words, 64)
        ]
        token_ids = torch.tensor([token for document in documents for token in document])
        position_ids = torch.cat([torch.arange(len(document)) for document in documents])
        answer = torch.cat([reversal_rows(document, tokenizer) for document in documents])
        logprobs = loss.model_logprobs(model, token_ids, position_ids, token_ids.roll(-1))
        loss.token_mean(-logprobs, answer, denom=int(answer.sum())).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def reversal_rows(document: list[int], tokenizer) -> torch.Tensor:
    asked = document.index(tokenizer.convert_tokens_to_ids(">"))
    rows = torch.arange(len(document))
    return (rows >= asked) & (rows < len(document) - 1)


def overlap(task, reply: str) -> float:
    """The share of letters in the right place, and as much again for the whole word."""
    answer = task["answer"]
    right = sum(a == b for a, b in zip(reply, answer))
    return 0.5 * right / max(len(answer), len(reply)) + 0.5 * (reply == answer)


def exact(rollouts, tasks, tokenizer) -> float:
    return float(np.mean([r.reward == 1.0 for r in rollouts]))


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    words = testing.words()
    tasks = [{"id": w, "prompt": f"{w}>", "answer": w[::-1]} for w in words]
    random.Random(args.seed).shuffle(tasks)
    held_out, train = tasks[:HELD_OUT], tasks[HELD_OUT:]
    model, tokenizer = build_policy(args.seed)
    t=time.time()
    warm_up(model, tokenizer, [t["id"] for t in train], steps=args.warmup_steps, seed=args.seed)
    print("warmup", time.time()-t)
    rng = np.random.default_rng(args.seed)
    estimator = advantage.centered
    if args.permute_rewards:
        estimator = lambda g: rng.permutation(advantage.centered(g))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, betas=(0.9,0.95))
    env = rollout.single_turn(tokenizer, reward=overlap)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    folder = args.run_dir or track.fresh_folder("/tmp/runs", "demo")
    view = track.LiveView("demo", steps=args.steps)
    with rollout.TransformersEngine(model, seed=args.seed) as engine, rollout.worker(
        engine, env, train, params=params, group_size=args.group_size,
        groups_per_step=args.groups_per_step, max_staleness=args.max_staleness,
        keep=[filters.has_signal]) as rollouts, track.Run(folder, args=args, decode=tokenizer.decode, sinks=[view]) as run:
        transport = weights.SharedMemory(model, engine)
        t=time.time()
        before = exact(rollouts.evaluate(held_out, greedy), held_out, tokenizer)
        print("before", before, time.time()-t)
        t=time.time()
        for step in range(args.steps):
            groups = rollouts.take(version=step)
            samples = advantage.assign(groups, estimator)
            (batches,) = packing.pack(samples, max_tokens=4096, ranks=1)
            trained = sum(int(s.loss_mask.sum()) for s in samples)
            kl = torch.zeros(2, dtype=torch.float64)
            for b in batches:
                logprobs = loss.model_logprobs(model, b.token_ids, b.position_ids, b.labels, temperature=b.temperature)
                pg, aux = loss.dppo(logprobs, b.behavior_logprobs, b.advantages)
                loss.token_mean(pg, b.loss_mask, denom=trained).backward()
                kl += torch.stack([x.double() for x in loss.mismatch_kl(logprobs, b.behavior_logprobs, b.loss_mask, b.versions, version=step)])
            gn = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(); optimizer.zero_grad()
            transport.publish(step + 1)
            run.log(step, groups=groups, samples=samples, totals=rollouts.stats(), mismatch=tuple(kl), metrics={"grad_norm": gn})
            if step % 20 == 19:
                print(step, "eval", exact(rollouts.evaluate(held_out, greedy), held_out, tokenizer), time.time()-t, rollouts.stats(), flush=True)
        after = exact(rollouts.evaluate(held_out, greedy), held_out, tokenizer)
        run.finish(eval_before=before, eval_after=after)
    print(before, after, run.staleness, run.summary, folder)

if __name__ == "__main__":
    main(tyro.cli(Args))
