"""Run on two gloo ranks by test_planned_memory.py: what ranks hold in a real step."""

import json
import sys
import weakref
from pathlib import Path

import attrs
import torch
from wirings import FAMILIES, LAYOUTS, LONG, OPTIMIZERS, TOKENS, make, make_long, prepare

from primerl import loss, parallel, replay
from primerl.planning.live_bytes import LiveBytes


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


def forward(model, layout, tokens=TOKENS):
    rows = tokens // layout.cp
    ids = torch.randint(2, 90, (rows,))
    start = rows * (torch.distributed.get_rank() if layout.cp > 1 else 0)
    return loss.model_logprobs(model, ids, torch.arange(start, start + rows), ids)


def kept(family, layout, *, recompute):
    """Bytes that the forward pass keeps for the backward pass, parameters not counted."""
    model = make(family)
    mesh = attrs.evolve(parallel.mesh(ep=layout.ep, cp=layout.cp), parameters=None)
    prepare(model, mesh, optimizer="AdamW", recompute=recompute)
    with LiveBytes() as live:
        live.ignore(*model.parameters(), *model.buffers())
        result = forward(model, layout)
        total = live.now
    del result
    return total


class Allocator(LiveBytes):
    """The tracing allocator, which also sees that FSDP changes the sizes of storages."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def _add(self, tensor):
        super()._add(tensor)
        storage = local(tensor).untyped_storage()
        self.storages.setdefault(storage._cdata, weakref.ref(storage))

    def _forget(self, place):
        super()._forget(place)
        del self.storages[place]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for place, reference in list(self.storages.items()):
            if (storage := reference()) is not None and self._sizes[place] != storage.nbytes():
                self.now += storage.nbytes() - self._sizes[place]
                self._sizes[place] = storage.nbytes()
        return super().__torch_dispatch__(func, types, args, kwargs)


def routes(config, tokens, share):
    """Routes that send this share of the tokens to the first half of the experts, evenly."""
    half, each = config.n_routed_experts // 2, config.num_experts_per_tok
    chosen = torch.arange(tokens * each).view(tokens, each) % half
    chosen += half * (torch.arange(tokens) * 7 % 10 >= 10 * share).unsqueeze(1)
    return chosen.unsqueeze(1).expand(-1, config.mlp_layer_types.count("sparse"), -1)


def peak(layout, *, share=0.5):
    """Most bytes that a rank holds in a step, while it adds to gradients that are there already."""
    with Allocator() as live:
        model = make_long()
        optimizer = prepare(model, parallel.mesh(ep=layout.ep, cp=layout.cp))
        rows = routes(model.config, LONG // layout.cp, share)
        with replay.forced(model, rows):
            forward(model, layout, LONG).sum().backward()
            optimizer.step()
            live.restart()
            forward(model, layout, LONG).sum().backward()
            return live.restart()


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
        found["peak"] = {name: peak(layout) for name, layout in LAYOUTS.items()}
        found["peak with 20% more"] = peak(LAYOUTS["ep"], share=0.6)
        (folder / f"found-{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
