"""Run by torchrun on four ranks: clipping, Muon, its checkpoints, and recomputation."""

import contextlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from primerl import loss, optim, parallel, testing
from primerl.parallel import activation
from primerl.testing.families import tiny_family

MESHES = {
    "fsdp": {},
    "hsdp": {"replicate": 2},
    "ep": {"ep": 2},
    "ep of all": {"ep": 4},
    "ep, hsdp": {"ep": 2, "replicate": 2},
    "few experts": {"ep": 2},  # one for each rank, whose matrices are divided between two
}
# Experts outside the registry can't be divided among ranks.
ARIA_IS_REGISTERED = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 18)
SPLIT = {  # families whose parameters hold several matrices, in each way that they may lie
    "phi3": {},
    "gpt_neox": {},
    "gpt2": {},
    "aria_text": {"ep": 2} if ARIA_IS_REGISTERED else {},
    "deepseek_v3": {"ep": 2},
}
RECOMPUTED = {
    "kept": None,
    "full": {},
    "selective": {"selective": True},
    "offloaded": {"offload": True},
    "every second": {"every": 2},
}
IDS = torch.randint(2, 60, (4, 48), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.cat([torch.arange(20), torch.arange(28)])


def make(mesh="fsdp"):
    experts = 2 if mesh == "few experts" else 4
    return testing.tiny_model("qwen3_moe", hidden_size=40, num_experts=experts)


def backward(model, ids):
    """The loss of one rank: its part of a mean over all tokens."""
    logprobs = loss.model_logprobs(model, ids, POSITIONS, ids.roll(-1))
    value = -logprobs.sum() / IDS.numel()
    value.backward()
    return value.item()


def largest_difference(model, places, reference):
    """Of this rank's elements."""
    found = [0.0]
    for parameter, place, whole in zip(model.parameters(), places, reference, strict=True):
        difference = parameter.detach().to_local() - whole.reshape(-1)[place]
        found += difference.abs().flatten().tolist()
    return max(found)


def set_gradients(model, step, gradients):
    """The gradients of one process, bitwise, each on the rank of its elements."""
    for (name, parameter), index in zip(model.named_parameters(), gradients, strict=True):
        generator = torch.Generator().manual_seed(1000 * step + len(name))
        whole = torch.randn(parameter.shape, generator=generator)
        if index is None:
            parameter.grad = whole
        else:
            gradient = torch.zeros_like(parameter)
            gradient.to_local().copy_(whole.reshape(-1)[index])
            parameter.grad = gradient


def where_elements_lie(model, mesh):
    """Shard a model; of each parameter, the place of this rank's elements in the whole."""
    with torch.no_grad():
        weights = [parameter.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
        parallel.shard(model, mesh)
        places = [parameter.to_local().long() for parameter in model.parameters()]
        for parameter, weight, place in zip(model.parameters(), weights, places, strict=True):
            parameter.to_local().copy_(weight.reshape(-1)[place])
    return places


def train_muon(model, places, dtype, *, offload=False):
    optimizer = optim.Muon(optim.muon_parameters(model), lr=0.02, dtype=dtype)
    optimizer = optim.Offload(optimizer, part_elements=4000) if offload else optimizer
    for step in range(3):
        set_gradients(model, step, places)
        optimizer.step()
    return optimizer


def clipped(kind, mesh, world, expected):
    model = parallel.shard(make(kind), mesh)
    backward(model, IDS[world.rank])
    norm = parallel.clip_gradients(model.parameters(), expected / 2).item()
    norms = [None] * world.world_size
    dist.all_gather_object(norms, norm)
    after = parallel.clip_gradients(model.parameters(), 1e9).item()
    placements = {str(parameter.placements) for parameter in model.parameters()}
    return {
        "norm": norm / expected,
        "distinct": len(set(norms)),
        "after": after / expected,
        "placements": len(placements),
    }


def muon(kind, mesh, dtype, reference, **how):
    model = make(kind)
    places = where_elements_lie(model, mesh)
    optimizer = train_muon(model, places, dtype, **how)
    return model, optimizer, largest_difference(model, places, reference)


def split(family, mesh):
    """Updates of sharded parameters that hold several matrices, against those of one process."""
    model = tiny_family(family)
    train_muon(model, [None for _ in model.parameters()], torch.float32)
    reference = [parameter.detach().clone() for parameter in model.parameters()]
    model = tiny_family(family)
    places = where_elements_lie(model, mesh)
    optimizer = train_muon(model, places, torch.float32)
    assert any(group.get("split") for group in optimizer.param_groups)
    return largest_difference(model, places, reference)


def resumed(model, optimizer, folder, reference):
    """Saved from four shards, loaded into two: the states, and the next step."""
    parameters, states = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": states}, checkpoint_id=folder)
    other = make()
    places = where_elements_lie(other, parallel.mesh(replicate=2))
    again = optim.Offload(optim.Muon(optim.muon_parameters(other), lr=1.0, dtype=torch.float32))
    parameters, states = get_state_dict(other, again)
    target = {"model": parameters, "optimizer": states}
    dcp.load(target, checkpoint_id=folder)
    set_state_dict(
        other, again, model_state_dict=target["model"], optim_state_dict=target["optimizer"]
    )
    set_gradients(other, 3, places)
    again.step()
    return {
        "difference": largest_difference(other, places, reference),
        "lr": [group["lr"] for group in again.param_groups],
        "shards": again.state[next(other.parameters())]["exp_avg"].device_mesh.shape[1],
    }


@contextlib.contextmanager
def counted_collectives():
    """How many all-to-alls this rank takes part in."""
    real, counts = dist.all_to_all_single, {"all": 0}

    def counting(*args, **kwargs):
        counts["all"] += 1
        return real(*args, **kwargs)

    dist.all_to_all_single = counting
    try:
        yield counts
    finally:
        dist.all_to_all_single = real


def recomputed(how, world, reference):
    model = make()
    if how is not None:
        parallel.recompute(model, **how)
    parallel.shard(model, parallel.mesh(ep=2))
    with counted_collectives() as counts:
        value = backward(model, IDS[world.rank])
    gradients = [parameter.grad.to_local() for parameter in model.parameters()]
    reference = reference or (value, gradients)
    equal = all(torch.equal(a, b) for a, b in zip(gradients, reference[1], strict=True))
    return reference, {"equal": equal and value == reference[0], **counts}


def refused_after_sharding():
    try:
        parallel.recompute(parallel.shard(make()))
    except ValueError as error:
        return str(error)


def refused_gradients():
    """On a mesh of half of the ranks, and gradients that are not reduced."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    messages = []
    for of_gradient, placements in (mesh["b"], [Shard(0)]), (mesh, [Shard(0), Partial()]):
        like = DTensor.from_local(torch.ones(2, 2), of_gradient, placements, run_check=False)
        parameter = torch.nn.Parameter(like)
        parameter.grad = like
        try:
            parallel.clip_gradients([parameter], 1.0)
        except ValueError as error:
            messages.append(str(error))
    return messages


def main():
    folder = Path(sys.argv[1])
    activation.SMALLEST_OFFLOADED = 1
    world = parallel.process_group(timeout_s=120)
    norms, trained, next_step = {}, {}, None
    for kind in ("fsdp", "few experts"):
        model = make(kind)
        for ids in IDS:
            backward(model, ids)
        norms[kind] = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        for dtype in (torch.float32, torch.bfloat16):
            model = make(kind)
            places = [None for _ in model.parameters()]
            optimizer = train_muon(model, places, dtype)
            trained[kind, dtype] = [parameter.detach().clone() for parameter in model.parameters()]
            if (kind, dtype) == ("fsdp", torch.float32):
                set_gradients(model, 3, places)
                optimizer.step()
                next_step = [parameter.detach() for parameter in model.parameters()]
    found = {"clipped": {}, "muon": {}, "muon in bfloat16": {}, "recomputed": {}}
    with world:
        for name, sizes in MESHES.items():
            mesh, kind = parallel.mesh(**sizes), "few experts" if name == "few experts" else "fsdp"
            found["clipped"][name] = clipped(kind, mesh, world, norms[kind])
            exact, half = (trained[kind, dtype] for dtype in (torch.float32, torch.bfloat16))
            model, optimizer, found["muon"][name] = muon(kind, mesh, torch.float32, exact)
            if name == "fsdp":
                found["resumed"] = resumed(model, optimizer, folder / "checkpoint", next_step)
            found["muon in bfloat16"][name] = muon(kind, mesh, torch.bfloat16, half)[2]
        found["split"] = {
            family: split(family, parallel.mesh(**sizes)) for family, sizes in SPLIT.items()
        }
        exact = trained["fsdp", torch.float32]
        found["offloaded"] = muon("fsdp", parallel.mesh(ep=2), torch.float32, exact, offload=True)[
            2
        ]
        reference = None
        for name, how in RECOMPUTED.items():
            reference, found["recomputed"][name] = recomputed(how, world, reference)
        found["refused"] = refused_after_sharding()
        found["refused gradients"] = refused_gradients()
    (folder / f"found-{world.rank}.json").write_text(json.dumps(found))


main()
