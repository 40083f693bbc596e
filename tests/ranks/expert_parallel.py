"""Run by torchrun in tests/parallel/test_expert_parallel.py: every check once, on four ranks."""

import json
import sys
from pathlib import Path

import fake_deep_ep
import peft
import torch
import torch.distributed as dist
import transformers

from primerl import loss, models, parallel, testing
from primerl._common.expert_modules import expert_modules
from primerl._common.ranks import whole
from primerl.parallel.expert_parallel.dispatch import AllToAll
from primerl.parallel.expert_parallel.experts import divide_experts

TOKENS, EXPERTS, CHOICES, HIDDEN = 12, 8, 2, 16
ROUTES = ["even", "all to one rank", "one rank has no tokens"]
MESHES = {
    "fsdp": {},
    "replicas": {"replicate": 2},
    "ep 2": {"ep": 2},
    "ep 4": {"ep": 4},
    "replicas, ep 2": {"replicate": 2, "ep": 2},
}
FOLDERS = ["llama", "llama, tied", "qwen3_moe", "deepseek_v3", "minimax_m2"]


def routes(kind, rank):
    generator = torch.Generator().manual_seed(rank)
    tokens = 0 if kind == "one rank has no tokens" and rank == 2 else TOKENS
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    pick = torch.rand(tokens, EXPERTS, generator=generator)
    if kind == "all to one rank":
        pick[:, 2:] -= 1
    weights_ = torch.rand(tokens, CHOICES, generator=generator)
    return hidden, pick.topk(CHOICES).indices, weights_


def experts(family):
    """A family's own module of experts, alone, with random values."""
    model = testing.tiny_model(
        family, hidden_size=HIDDEN, num_experts=EXPERTS, num_local_experts=EXPERTS
    )
    (module,) = list(expert_modules(model).values())[:1]
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(index)
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model, module


def run(module, hidden, indices, mixing):
    hidden, mixing = hidden.clone().requires_grad_(), mixing.clone().requires_grad_()
    out = module(hidden, indices, mixing)
    if out.requires_grad:  # the family's own code, without tokens: no
        (out * torch.arange(HIDDEN)).sum().backward()
    none = torch.zeros(0)
    return out.detach(), *(none if x.grad is None else x.grad for x in (hidden, mixing))


def same_experts(family, kind, mesh, dispatch):
    """The largest difference from the family's own code: outputs, and the gradients of all."""
    rank = dist.get_rank()
    _, alone = experts(family)
    alone.config._experts_implementation = "eager"
    everyone = [run(alone, *routes(kind, r)) for r in range(dist.get_world_size())]
    model, module = experts(family)
    divide_experts(model, mesh.experts["expert"], dispatch=dispatch)
    ours = run(module, *routes(kind, rank))
    gaps = [(a - b).abs().max().item() if a.numel() else 0.0
            for a, b in zip(ours, everyone[rank], strict=True)]  # fmt: skip
    for mine, other in zip(module.parameters(), alone.parameters(), strict=True):
        # Every rank of the group has sent its tokens, so the gradient is that of all.
        expected = other.grad.chunk(mesh.ep)[mesh.experts.get_local_rank("expert")]
        gaps.append((mine.grad.to_local() - expected).abs().max().item())
    counts = parallel.take_expert_counts(model)
    assert not parallel.take_expert_counts(model)
    total = sum(c.sum() for c in counts.values()).item()
    return [
        parallel.all_sum(torch.tensor(gaps).max()).item(),
        total == routes(kind, rank)[1].numel(),
    ]


def refusal(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def tokens():
    ids = torch.arange(2, 34)
    positions = torch.cat([torch.arange(20), torch.arange(12)])
    return ids, positions, ids.roll(-1)


def loaded(folder, sizes):
    """A model that started without values, against the one that was saved."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = models.empty_model(folder)
    parallel.shard(model, parallel.mesh(**sizes))
    models.load_shards(model, folder)
    state = model.state_dict()
    equal = all(torch.equal(whole(state[n]), t) for n, t in reference.state_dict().items())
    logprobs = loss.model_logprobs(model, *tokens())
    logprobs.sum().backward()
    gap = (loss.model_logprobs(reference, *tokens()) - logprobs).abs().max().item()
    sent = dict(models.checkpoint_tensors(model))
    streamed = all(torch.equal(sent[n], t) for n, t in models.checkpoint_tensors(reference))
    return [equal, streamed, gap]


def halved(world):
    """Computing in bfloat16: parameters and gradients keep float32."""
    model = testing.tiny_model("qwen3_moe")
    reference = loss.model_logprobs(model, *tokens()).detach()
    parallel.shard(model, parallel.mesh(ep=2), dtype=torch.bfloat16)
    logprobs = loss.model_logprobs(model, *tokens())
    logprobs.sum().backward()
    kinds = {str(p.dtype) for p in model.parameters()} | {
        str(p.grad.dtype) for p in model.parameters()
    }
    return [(logprobs - reference).abs().max().item(), sorted(kinds)]


def train(model, ranks, steps=2):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.3)
    losses = []
    for _ in range(steps):
        value = -loss.model_logprobs(model, *tokens()).sum() / ranks / 32
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item() * ranks)
    return losses


def adapters(folder, world, mesh, **targets):
    """Training LoRA adapters of a sharded model, against doing so in one process."""
    config = {"r": 4, "target_modules": ["q_proj", "o_proj"], "init_lora_weights": False} | targets

    def make():
        torch.manual_seed(0)
        return peft.inject_adapter_in_model(
            peft.LoraConfig(**config), testing.tiny_model("qwen3_moe")
        )

    alone, model = make(), make()
    experts = next(m for m in model.modules() if hasattr(m, "gate_up_proj"))
    frozen = experts.gate_up_proj.detach().clone()
    parallel.shard(parallel.recompute(model.train()), mesh)
    # Every rank has the same rows here, so that their sum is what one process would do.
    expected, ours = train(alone, 1), train(model, world.world_size)
    models.save_adapters(model, folder / "adapter" if world.is_first else None)
    kept = torch.equal(whole(experts.gate_up_proj.detach()), frozen)
    sent = dict(models.checkpoint_tensors(model))
    gap = max((sent[n] - t).abs().max().item() for n, t in models.checkpoint_tensors(alone))
    return [expected, ours, kept, gap]


def refusals(folder):
    tiny, shard, mesh = testing.tiny_model, parallel.shard, parallel.mesh
    mixed = testing.tiny_model("llama")
    mixed.lm_head.half()
    found = {
        "too many": refusal(lambda: parallel.mesh(fsdp=3)),
        "too few": refusal(lambda: parallel.mesh(replicate=3)),
        "ep": refusal(lambda: parallel.mesh(ep=3)),
        "ep over a replica": refusal(lambda: parallel.mesh(replicate=2, ep=4)),
        "zero": refusal(lambda: parallel.mesh(cp=0)),
        "dense": refusal(lambda: shard(tiny("llama"), mesh(ep=2))),
        "experts": refusal(
            lambda: parallel.shard(
                testing.tiny_model("qwen3_moe", num_experts=6), parallel.mesh(ep=4)
            )
        ),
        "dtypes": refusal(lambda: shard(mixed, mesh())),
        "other": refusal(lambda: models.load_shards(tiny("qwen3"), folder / "llama")),
        "empty": refusal(lambda: models.load_shards(tiny("qwen3"), folder)),
    }
    wider = testing.tiny_model("llama", intermediate_size=128)
    found["shape"] = refusal(lambda: models.load_shards(wider, folder / "llama"))
    return found


def balanced():
    model = testing.tiny_model("glm4_moe")
    counts = {"model.layers.1.mlp.experts": torch.tensor([5.0, 1.0, 3.0, 3.0])}
    parallel.balance_experts(model, counts, rate=0.5)
    return model.model.layers[1].mlp.gate.e_score_correction_bias.tolist()


def main(folder):
    torch.set_num_threads(1)
    sys.modules["deep_ep"] = fake_deep_ep
    world = parallel.process_group(timeout_s=120)
    if world.is_first:
        for name in FOLDERS:
            config = {"tie_word_embeddings": True} if "tied" in name else {}
            config |= dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 8)
            model = testing.tiny_model(name.split(",")[0], **config)
            model.save_pretrained(folder / name, max_shard_size="20KB")
    found = {}
    with world:
        mesh = parallel.mesh(ep=4)
        for family in ("qwen3_moe", "gpt_oss"):  # the second: transposed, biases, its own gate
            for kind in ROUTES:
                for dispatch in (AllToAll, parallel.DeepEP):
                    key = f"{family}, {kind}, {dispatch.__name__}"
                    found[key] = same_experts(family, kind, mesh, dispatch)
        for name in FOLDERS:
            for sizes in MESHES:
                if "ep " not in sizes or "llama" not in name:
                    found[f"load {name}, {sizes}"] = loaded(folder / name, MESHES[sizes])
        found["halved"] = halved(world)
        found["refusals"] = refusals(folder)
        found["balanced"] = balanced()
        found["adapters"] = adapters(folder, world, parallel.mesh(ep=2))
        stacks = ["experts.gate_up_proj", "experts.down_proj"]
        found["adapted experts"] = adapters(
            folder, world, parallel.mesh(), target_parameters=stacks
        )
    (folder / f"found-{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
