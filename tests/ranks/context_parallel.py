"""Run by torchrun in test_context.py: context-parallel training, against one process."""

import json
import math
import sys
from pathlib import Path

import attrs
import numpy as np
import torch

from primerl import loss, packing, parallel, replay, testing
from primerl._common.forward_passes import recomputation_method
from primerl.parallel.context_parallel.sharing import share_context
from primerl.types import NOT_SAMPLED, TrainingSample

# One document is longer than any rank's rows, and some have one token.
LENGTHS = [62, 5, 1, 21, 2, 44, 9, 1, 13, 40, 3, 8]
STEPS = 2
MANY_HEADS = {"num_attention_heads": 12, "num_key_value_heads": 6}
ODD_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3}
CONVOLUTION = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rms_norm_eps": 1e-2,  # see testing.families
}
CASES = {
    "qwen3, ulysses": ("qwen3", {"cp": 2}, "ulysses", {}),
    "qwen3, gathered": ("qwen3", {"cp": 2}, "gathered", {}),
    "qwen3, four ranks, ulysses": ("qwen3", {"cp": 4}, "ulysses", {}),
    "qwen3, four ranks, gathered": ("qwen3", {"cp": 4}, "gathered", {}),
    "qwen3, replicated": ("qwen3", {"cp": 2, "replicate": 2}, None, {}),
    "qwen3, twelve and six heads": ("qwen3", {"cp": 4}, "ulysses", MANY_HEADS),
    "qwen3, three heads": ("qwen3", {"cp": 2}, None, ODD_HEADS),
    "llama, ulysses": ("llama", {"cp": 2}, "ulysses", {}),
    "llama, gathered": ("llama", {"cp": 2}, "gathered", {}),
    "qwen3_moe, ulysses": ("qwen3_moe", {"cp": 2, "ep": 2}, "ulysses", {}),
    "qwen3_moe, gathered": ("qwen3_moe", {"cp": 2, "ep": 4}, "gathered", {}),
    "glm4_moe, ulysses": ("glm4_moe", {"cp": 2}, "ulysses", {}),
    "glm4_moe, gathered": ("glm4_moe", {"cp": 2, "ep": 2}, "gathered", {}),
    "deepseek_v3, ulysses": ("deepseek_v3", {"cp": 4}, "ulysses", {"v_head_dim": 16}),
    "deepseek_v3, gathered": ("deepseek_v3", {"cp": 4}, "gathered", {"v_head_dim": 16}),
    "minimax_m2, ulysses": ("minimax_m2", {"cp": 2, "ep": 2}, "ulysses", {}),
    "minimax_m2, gathered": ("minimax_m2", {"cp": 2}, "gathered", {}),
    "lfm2, ulysses": ("lfm2", {"cp": 2}, "ulysses", CONVOLUTION),
    "qwen3_next, gathered": ("qwen3_next", {"cp": 4, "ep": 2}, "gathered", DELTA_RULE),
    "qwen3_moe, replayed": ("qwen3_moe", {"cp": 2, "ep": 2}, "ulysses", {}),
    "glm4_moe, replayed": ("glm4_moe", {"cp": 2, "ep": 2}, "gathered", {}),
}
REPLAYED = ("qwen3_moe, replayed", "glm4_moe, replayed")
RECOMPUTED = ("qwen3_moe, ulysses", "qwen3_moe, gathered", "qwen3_next, gathered", *REPLAYED)
BY_SEQUENCE = ("llama, ulysses", "llama, gathered")
SHARING = (
    "qwen3, four ranks, ulysses",
    "qwen3, four ranks, gathered",
    "qwen3_next, gathered",
    *REPLAYED,
)


def samples():
    rng = np.random.default_rng(0)
    prompt = rng.integers(2, 60, 20)
    made = []
    for length in LENGTHS:
        mask = np.arange(length) >= 1 + length // 2
        token_ids = rng.integers(2, 60, length)
        untrained = min(length // 2, len(prompt))
        token_ids[:untrained] = prompt[:untrained]  # which documents may share
        made.append(
            TrainingSample(
                token_ids=token_ids,
                loss_mask=mask,
                behavior_logprobs=np.where(mask, -4 - 0.1 * rng.random(length), 0.0),
                versions=np.where(mask, 0, NOT_SAMPLED),
                advantages=np.where(mask, rng.standard_normal(length), 0.0),
            )
        )
    return made


def packed_for(ranks, *, share_prefixes=False):
    return packing.pack(samples(), max_tokens=64, ranks=ranks, share_prefixes=share_prefixes)


def random_routes(model, batch):
    """Random experts for each position, alike in every document; none for every fifth one."""
    shape = replay.shape(model)
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(64, len(shape.layers), shape.experts, generator=generator)
    rows = scores.topk(shape.k).indices
    rows[::5] = -1
    return rows[batch.position_ids]


def norm_and_clip(model, limit):
    """Each element is on one rank; of replicas, one counts."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    copies = [
        math.prod(g.device_mesh.shape[i] for i, p in enumerate(g.placements) if p.is_replicate())
        if hasattr(g, "to_local")
        else 1
        for g in gradients
    ]
    squares = [g.double().square().sum() / n for g, n in zip(local, copies, strict=True)]
    norm = parallel.all_sum(sum(squares)).sqrt().item()
    for gradient in local:
        gradient.mul_(min(1.0, limit / norm))
    return norm


def train(model, batches, *, by_sequence=False, replayed=False, all_sum=None):
    """The loss and gradient norm of a few steps of AdamW; the loss is summed over all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained = parallel.all_sum(sum(int(batch.loss_mask.sum()) for batch in batches))
    counts = replay.RouteCounts()
    history = []
    for _ in range(STEPS):
        total = torch.zeros(())
        for b in batches:
            routes = random_routes(model, b) if replayed else None
            with replay.forced(model, routes, counts=counts):
                logprobs = loss.model_logprobs(
                    model, b.token_ids, b.position_ids, b.labels, rows=b.loss_mask
                )
                if by_sequence:
                    of_sequences = (b.loss_mask, b.sequence_ids)
                    summed = {} if all_sum is None else {"all_sum": all_sum}
                    per_token, _ = loss.gspo(
                        logprobs,
                        b.behavior_logprobs,
                        b.advantages,
                        *of_sequences,
                        clip_low=0.5,
                        clip_high=1.0,
                        **summed,
                    )
                    mean = loss.sequence_mean(
                        per_token, *of_sequences, denom=len(LENGTHS), **summed
                    )
                else:
                    per_token, _ = loss.dppo(logprobs, b.behavior_logprobs, b.advantages)
                    mean = loss.token_mean(per_token, b.loss_mask, denom=trained)
                mean.backward()
                total += mean.detach()
        norm = norm_and_clip(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        shares = counts.summary(parallel.all_sum)
        history.append([parallel.all_sum(total).item(), norm, *shares.values()])
    return history


def reference(kind, config, *, by_sequence, replayed):
    ((*batches,),) = packed_for(1)
    model = testing.tiny_model(kind, **config)
    return train(model, batches, by_sequence=by_sequence, replayed=replayed)


def divided(name, world):
    kind, sizes, method, config = CASES[name]
    mesh = parallel.mesh(**sizes)
    model = testing.tiny_model(kind, seed=world.rank, **config)  # only rank 0's weights count
    if name in RECOMPUTED:
        recomputation_method(model)({"use_reentrant": False})
        model.train()
    parallel.shard(model, mesh, context=method)
    packed = packed_for(mesh.batches, share_prefixes=name in SHARING)
    batches = parallel.scatter(packed if world.is_first else None, packing.PackedBatch, mesh)
    expected = [b.split(mesh.cp)[world.rank % mesh.cp] for b in packed[world.rank // mesh.cp]]
    rows = parallel.gather([{"labels": batch.labels} for batch in batches], mesh)
    found = {
        "gathered": gathered(packed, rows) if world.is_first else rows == [],
        "scattered": len(batches) == len(expected)
        and all(same(x, y) for x, y in zip(batches, expected, strict=True)),
        "rows": [len(b.token_ids) for b in batches],
        "shares": any(int(b.position_ids[i]) > 0 for b in packed[0] for i in b.cu_seqlens[:-1]),
        "attention": model.config._attn_implementation,
    }
    by_sequence = name in BY_SEQUENCE
    found["history"] = train(
        model,
        batches,
        by_sequence=by_sequence,
        replayed=name in REPLAYED,
        all_sum=mesh.context_sum,
    )
    return found


def gathered(packed, rows):
    """Whether the label of each row, of all ranks, came back to the token that it is."""
    unpacked = packing.unpack(packed, rows, samples())
    return all(
        (per_token["labels"] == np.where(sample.loss_mask, sample.token_ids, 0)).all()
        for sample, per_token in zip(samples(), unpacked, strict=True)
    )


def same(a, b):
    return all(
        torch.equal(getattr(a, field.name), getattr(b, field.name))
        for field in attrs.fields(type(a))
        if getattr(b, field.name) is not None
    )


def interleaved(world):
    """Two forward passes, of different documents, before one backward pass."""
    mesh = parallel.mesh(cp=4)
    gradients = []
    for method in ("ulysses", "gathered", None):
        model = testing.tiny_model("qwen3", num_attention_heads=4)
        if method:
            share_context(model, mesh, method=method)
        total = 0.0
        for b in packed_for(1)[0][:2]:
            part = b.split(4)[world.rank] if method else b
            scored = loss.model_logprobs(model, part.token_ids, part.position_ids, part.labels)
            total = total + scored.where(part.loss_mask, 0.0).sum()
        total.backward()
        one = torch.cat([p.grad.flatten() for p in model.parameters()])
        gradients.append(parallel.all_sum(one) if method else one)
    *ours, expected = gradients
    return [((one - expected).norm() / expected.norm()).item() for one in ours]


def refusal(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def refusals(world):
    """Each rank's error for what is not supported; no rank is left waiting."""
    mesh = parallel.mesh(cp=4)

    def call(kind, rows=8, *, positions=True, batch=1, padding=False, **config):
        model = testing.tiny_model(kind, **config)
        share_context(model, mesh)
        ids = torch.full((batch, rows), 5)
        begin = world.rank * 8
        where = {"position_ids": torch.arange(begin, begin + rows)[None]} if positions else {}
        if padding:
            where["attention_mask"] = torch.arange(rows)[None] > 0
        return refusal(lambda: model(input_ids=ids, use_cache=False, **where))

    found = {
        "uneven": call("qwen3", 8 + world.rank % 2),
        "no positions": call("qwen3", positions=world.rank != 1),
        "two": call("qwen3", batch=2 if world.rank == 3 else 1),
        "padding": call("qwen3", padding=True),
        "dropout": call("qwen3", attention_dropout=0.1),
    }

    @attrs.frozen
    class Whole:
        ids: torch.Tensor

    mine = [[Whole(torch.ones(2))]] if world.is_first else None
    found["no split"] = refusal(lambda: parallel.scatter(mine, Whole, mesh))
    # The others would wait for the first rank's batches, had they none of their own.
    lists = [[], []] if world.is_first else [["a batch"]]
    found["lists"] = refusal(lambda: parallel.scatter(lists, packing.PackedBatch, mesh))
    return found


def main(folder):
    torch.set_num_threads(1)
    world = parallel.process_group(timeout_s=120)
    references = {}
    if world.is_first:
        for name, (kind, _, _, config) in CASES.items():
            key = (kind, str(config), name in BY_SEQUENCE, name in REPLAYED)
            if key not in references:
                references[key] = reference(kind, config, by_sequence=key[-2], replayed=key[-1])
    found = {}
    with world:
        for name, (kind, _, _, config) in CASES.items():
            found[name] = divided(name, world)
            if world.is_first:
                key = (kind, str(config), name in BY_SEQUENCE, name in REPLAYED)
                found[name]["single"] = references[key]
        found["interleaved"] = interleaved(world)
        found["refusals"] = refusals(world)
    (folder / f"found-{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
