"""Run by torchrun in tests/attention/test_mixers.py: a hybrid model on two ranks, and on one."""

import json
import sys
from pathlib import Path

import torch

from primerl import loss, parallel
from primerl.testing.families import tiny_family

# Mixers run these documents in three calls; the delta rule divides them into chunks of 64 tokens.
LENGTHS = (5, 70, 3, 130)
FAMILY = "qwen3_next"


def main(folder):
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    token_ids, labels = torch.randint(2, 96, (2, sum(LENGTHS)), generator=generator)
    position_ids = torch.cat([torch.arange(length) for length in LENGTHS])
    weights = torch.linspace(1, 2, len(labels))

    one = tiny_family(FAMILY)
    logits = [one(ids[None], use_cache=False).logits[0] for ids in token_ids.split(LENGTHS)]
    expected = torch.cat(logits).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    (expected * weights).sum().backward()

    with parallel.process_group(timeout_s=120) as world:
        many = tiny_family(FAMILY)
        loss.model_logprobs(many, token_ids, position_ids, labels)  # in one process first
        parallel.shard(many, parallel.mesh(cp=2), dtype=torch.float32)
        parts = (token_ids, position_ids, labels, weights, expected.detach())
        *inputs, weights, expected = (x.chunk(2)[world.rank] for x in parts)
        logprobs = loss.model_logprobs(many, *inputs)
        (logprobs * weights).sum().backward()
        gradients = [
            ((ours.grad.full_tensor() - theirs.grad).norm() / theirs.grad.norm()).item()
            for ours, theirs in zip(many.parameters(), one.parameters(), strict=True)
            if theirs.grad is not None
        ]
    found = {"logprobs": (logprobs - expected).abs().max().item(), "gradients": gradients}
    (folder / f"found-{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
