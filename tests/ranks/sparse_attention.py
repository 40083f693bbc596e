"""Run by torchrun in tests/attention/test_sparse.py: sparse attention on four ranks, and on one."""

import json
import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from primerl import loss, models, parallel, testing
from primerl._common.forward_passes import recomputation_method
from primerl.attention import find_documents

# Four packs: of these documents, the longer ones have more tokens than index_topk.
LENGTHS = [[7, 5, 20], [16, 16], [3, 9, 11, 9], [32]]
MODELS = {
    "glm_moe_dsa": {"indexer_types": ["full", "shared", "full"], "num_hidden_layers": 3},
    "deepseek_v32": {},
}
SMALL = {"index_topk": 8, "index_n_heads": 8, "index_head_dim": 16, "initializer_range": 0.2}
MESHES = {
    "glm_moe_dsa": {
        "fsdp": {},
        "ep 2": {"ep": 2, "replicate": 2},
        "ep 4": {"ep": 4},
        "cp 2": {"cp": 2, "ep": 2},
    },
    "deepseek_v32": {"ep 2": {"ep": 2}, "cp 4": {"cp": 4}},
}
STEPS = 3
# First position and number of rows of each document: it shares the tokens before with the one
# before it. In all packs, 4 ranks have 8 rows each.
DIVISIONS = {
    "odd documents": [(0, 7), (0, 1), (0, 13), (0, 2), (0, 9)],
    "fewer tokens than ranks": [(0, 1), (0, 2), (0, 3), *[(0, 1)] * 9, (0, 17)],
    "boundaries of ranks": [(0, 8), (0, 8), (8, 8), (0, 8)],
    "prefixes across ranks": [(0, 11), (9, 2), (10, 1), (3, 6), (0, 1), (1, 11)],
    "prefixes of more tokens than are chosen": [(0, 20), (18, 1), (18, 1), (19, 9), (4, 1)],
}


def pack(number):
    lengths = LENGTHS[number]
    token_ids = torch.randint(2, 60, (32,), generator=torch.Generator().manual_seed(number))
    position_ids = torch.cat([torch.arange(n) for n in lengths])
    if number == 2:  # its last document continues 5 tokens of the one before
        position_ids[-9:] += 5
    scored = torch.ones(32, dtype=torch.bool)
    scored[torch.tensor(lengths).cumsum(0) - 1] = False
    return token_ids, position_ids, token_ids.roll(-1), scored


def packs_of(rank, cp=1):
    """A rank's rows of the packs that it shares with its context-parallel ranks."""
    first, part = rank // cp * cp, rank % cp
    return [[x.chunk(cp)[part] for x in pack(first + i)] for i in range(cp)]


def clip(parameters, limit):
    """The norm over all gradients, which may lie on several meshes."""
    parameters = [p for p in parameters if p.grad is not None]
    norms = [p.grad.norm() for p in parameters]
    whole = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
    norm = torch.stack(whole).norm()
    for parameter in parameters:
        parameter.grad.mul_(min(1.0, limit / norm.item()))
    return norm.item()


def choices(model, packs):
    """The experts that each layer chooses for each token, before any step."""
    found = []
    routers = [m for name, m in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [m.register_forward_hook(lambda *a: found.append(a[2][2].sort()[0])) for m in routers]
    with torch.no_grad():
        for token_ids, position_ids, labels, _ in packs:
            loss.model_logprobs(model, token_ids, position_ids, labels)
    for hook in hooks:
        hook.remove()
    if isinstance(model, FSDPModule):
        model.reshard()  # or an optimizer made now would be given what it gathered
    return [x.tolist() for x in found]


def train(model, packs):
    """Loss and gradient norm of steps of AdamW, whose decay would move what is not frozen."""
    model.train()
    recomputation_method(model)({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scored = sum(32 - len(lengths) for lengths in LENGTHS)
    history = []
    for _ in range(STEPS):
        total = torch.zeros(())
        for token_ids, position_ids, labels, rows in packs:
            logprobs = loss.model_logprobs(model, token_ids, position_ids, labels, rows=rows)
            mean = -logprobs.sum() / scored
            mean.backward()
            total += mean.detach()
        norm = clip(list(model.parameters()), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        history.append([total, norm])
    return history


def divided(kind, documents):
    """Differences of logprobs and gradients of a pack on all ranks from those of transformers."""
    sizes = SMALL | MODELS[kind] | {"first_k_dense_replace": 9}  # its experts have no float64
    position_ids = torch.cat([torch.arange(first, first + n) for first, n in documents])
    generator = torch.Generator().manual_seed(0)
    token_ids, labels = torch.randint(2, 60, (2, len(position_ids)), generator=generator)
    weights = torch.randn(len(position_ids), generator=generator, dtype=torch.float64)

    one = testing.tiny_model(kind, **sizes).double()
    one.set_attn_implementation("eager")
    found = []
    for document in find_documents(position_ids):
        whole = torch.cat([token_ids[begin:end] for begin, end in document.keys])
        found.append(one(input_ids=whole[None], use_cache=False).logits[0, document.shared :])
    expected = torch.cat(found).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    (expected * weights).sum().backward()

    many = testing.tiny_model(kind, **sizes).double()
    ranks = torch.distributed.get_world_size()
    parallel.shard(many, parallel.mesh(cp=ranks), dtype=torch.float64)
    inputs = token_ids, position_ids, labels, weights, expected.detach()
    *inputs, weights, expected = (x.chunk(ranks)[torch.distributed.get_rank()] for x in inputs)
    logprobs = loss.model_logprobs(many, *inputs)
    (logprobs * weights).sum().backward()
    differences = [(logprobs - expected).abs().max().item()]
    for ours, theirs in zip(many.parameters(), one.parameters(), strict=True):
        if theirs.grad is not None:
            differences.append(distance(ours.grad.full_tensor(), theirs.grad))
    return max(differences), len(differences)


def distance(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def published(model):
    return {name: tensor.clone() for name, tensor in models.checkpoint_tensors(model)}


def main(folder):
    torch.set_num_threads(1)
    world = parallel.process_group(timeout_s=120)
    single = {}
    for kind, config in MODELS.items() if world.is_first else ():
        model = testing.tiny_model(kind, **SMALL, **config)
        parallel.freeze_indexer(model)
        packs = [pack(number) for number in range(4)]
        single[kind] = (choices(model, packs), train(model, packs), published(model))
    found = {}
    with world:
        for kind, config in MODELS.items():
            for name, sizes in MESHES[kind].items():
                model = testing.tiny_model(kind, seed=world.rank, **SMALL, **config)
                if name == "ep 2":  # before it is sharded; otherwise after
                    parallel.freeze_indexer(model)
                parallel.shard(model, parallel.mesh(**sizes))
                frozen = parallel.freeze_indexer(model)
                before = published(model)
                packs = packs_of(world.rank, sizes.get("cp", 1))
                chosen = choices(model, packs)
                history = train(model, packs)
                history = [[parallel.all_sum(total).item(), norm] for total, norm in history]
                after = published(model)
                rank_found = {"chosen": chosen, "history": history}
                if world.is_first:
                    _, expected, theirs = single[kind]
                    rank_found |= {
                        "single": [[total.item(), norm] for total, norm in expected],
                        "chosen_by_one": single[kind][0],
                        "names": sorted(after) == sorted(theirs),
                        "frozen": len(frozen),
                        "stayed": all(torch.equal(before[n], after[n]) for n in frozen),
                        "moved": max((after[n] - before[n]).abs().max().item() for n in after),
                        "weights": max((after[n] - theirs[n]).abs().max().item() for n in after),
                    }
                found[f"{kind}, {name}"] = rank_found
            found[f"{kind}, divided"] = {
                name: divided(kind, documents) for name, documents in DIVISIONS.items()
            }
    (folder / f"found-{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
