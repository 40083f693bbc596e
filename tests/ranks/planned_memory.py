"""Run on two gloo ranks by test_planned_memory.py: what ranks hold in a real step."""

import json
import sys
from pathlib import Path

import attrs
import torch
from torch.autograd.graph import saved_tensors_hooks
from wirings import FAMILIES, LAYOUTS, OPTIMIZERS, TOKENS, make, prepare

from primerl import loss, parallel


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def held(family, layout, optimizer):
    """Bytes of parameters, gradients and optimizer states after a step."""
    model = make(family)
    stepped = prepare(model, parallel.mesh(ep=layout.ep, cp=layout.cp), optimizer=optimizer)
    forward(model, layout).sum().backward()
    stepped.step()
    states = [one for state in stepped.state.values() for one in state.values()]
    return {
        "parameters": sum(local(x).nbytes for x in (*model.parameters(), *model.buffers())),
        "gradients": sum(local(p.grad).nbytes for p in model.parameters() if p.grad is not None),
        "states": sum(local(x).nbytes for x in states if isinstance(x, torch.Tensor)),
        "shapes": {name: list(local(p).shape) for name, p in model.named_parameters()},
    }


def forward(model, layout):
    tokens = TOKENS // layout.cp
    ids = torch.randint(2, 90, (tokens,))
    start = tokens * (torch.distributed.get_rank() if layout.cp > 1 else 0)
    return loss.model_logprobs(model, ids, torch.arange(start, start + tokens), ids)


def kept(family, layout, *, recompute):
    """Bytes that the forward pass saves for the backward pass, parameters not counted."""
    model = make(family)
    mesh = attrs.evolve(parallel.mesh(ep=layout.ep, cp=layout.cp), parameters=None)
    prepare(model, mesh, optimizer="AdamW", recompute=recompute)
    ours = {local(x).untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
    saved = {}

    def save(x):
        if local(x).untyped_storage()._cdata not in ours:
            saved.setdefault(local(x).untyped_storage()._cdata, x)
        return x

    with saved_tensors_hooks(save, lambda x: x):
        result = forward(model, layout)
    del result
    return sum(local(x).untyped_storage().nbytes() for x in saved.values())


def main(folder):
    with parallel.process_group(seed=0) as world:
        found = {
            f"{family}, {name}": {
                optimizer: held(family, layout, optimizer) for optimizer in OPTIMIZERS
            }
            | {
                "kept": kept(family, layout, recompute=True),
                "kept whole": kept(family, layout, recompute=False),
            }
            for family in FAMILIES
            for name, layout in LAYOUTS.items()
        }
        (folder / f"found-{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
