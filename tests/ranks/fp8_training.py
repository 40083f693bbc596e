"""Run by torchrun in tests/fp8/test_composition.py: FP8 on two ranks, against one process."""

import json
import sys
from pathlib import Path

import peft
import torch
import torch.distributed as dist

from primerl import fp8, loss, models, parallel, replay, testing
from primerl._common.checkpoint_tensors import checkpoint_tensors
from primerl._common.digests import digest_of
from primerl._common.ranks import whole
from primerl.parallel.expert_parallel.experts import divide_experts

FORM = fp8.Format.of_blocks(16)
MATMUL = fp8.GroupedMatmul(form=FORM)
# fp32 sums in another order may move a value across a boundary of FP8, so these are no roundings.


def tokens():
    ids = torch.arange(2, 34)
    positions = torch.cat([torch.arange(20), torch.arange(12)])
    return ids, positions, ids.roll(-1)


def model_of(kind):
    family = "llama" if kind.startswith("dense") else "qwen3_moe"
    model = testing.tiny_model(family).train()
    fp8.convert_linears(model, form=FORM, weight_gradient="fp8" if "fp8" in kind else "bf16")
    if "lora" in kind:
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
        torch.manual_seed(0)
        peft.inject_adapter_in_model(config, model)
    if "recompute" in kind:
        parallel.recompute(model)
    return model


def train(model, ranks, routes, steps=2):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    losses = []
    for _ in range(steps):
        with replay.forced(model, routes):
            value = -loss.model_logprobs(model, *tokens()).sum() / ranks / 32
            value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item() * ranks)
    return losses


def compared(kind, sizes):
    """Losses and weights after two steps, of ranks that see the same tokens and of one process."""
    alone, together = model_of(kind), model_of(kind)
    moe = not kind.startswith("dense")
    if moe:
        divide_experts(alone, matmul=MATMUL)
    routes = None
    if "replay" in kind:
        with torch.no_grad(), replay.capture(alone) as captured:
            loss.model_logprobs(alone, *tokens())
        routes = captured.rows.flip(-1)
    expected = train(alone, 1, routes)
    parallel.shard(together, parallel.mesh(**sizes), matmul=MATMUL if moe else None)
    found = train(together, dist.get_world_size(), routes)
    own, ours = alone.state_dict(), together.state_dict()
    gap = max((own[n] - whole(t)).abs().max().item() for n, t in ours.items())
    moved = max((own[n] - t).abs().max().item() for n, t in model_of(kind).state_dict().items())
    return {"losses": [expected, found], "gap": gap, "moved": moved}


def published():
    """The bytes of a sharded trainer are those of one process."""
    alone, together = model_of("moe"), model_of("moe")
    parallel.shard(together, parallel.mesh(ep=2), matmul=MATMUL)
    sent = [
        {
            name: digest_of(tensor)
            for name, tensor in checkpoint_tensors(
                model, quantize=fp8.CheckpointQuantizer(model, experts=MATMUL)
            )
        }
        for model in (alone, together)
    ]
    return sent[0] == sent[1] and len(sent[0]) > 40


def refusal(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def refused():
    model = testing.tiny_model("llama")
    parallel.shard(model, parallel.mesh())
    return refusal(lambda: fp8.convert_linears(model, form=FORM))


def loaded(folder):
    """Each rank reads what it holds of an FP8 checkpoint."""
    model = models.empty_model(folder)
    parallel.shard(model, parallel.mesh(ep=2), matmul=MATMUL)
    models.load_shards(model, folder, dequantize=lambda q, s: fp8.dequantize(q, s, block=16))
    plain = models.empty_model(folder)
    models.load_shards(plain, folder, dequantize=lambda q, s: fp8.dequantize(q, s, block=16))
    state = plain.state_dict()
    return all(torch.equal(whole(t), state[n]) for n, t in model.state_dict().items())


def main():
    checkpoint, folder = Path(sys.argv[1]), Path(sys.argv[2])
    with parallel.process_group() as world:
        found = {
            "dense": compared("dense", {}),
            "dense, fp8 gradients, recompute": compared("dense, fp8 gradients, recompute", {}),
            "dense, lora": compared("dense, lora", {}),
            "moe, replay": compared("moe, replay", {}),
            "moe, ep 2, replay, recompute": compared("moe, ep 2, replay, recompute", {"ep": 2}),
            "published": published(),
            "refused": refused(),
            "loaded": loaded(checkpoint),
        }
        (folder / f"found-{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
