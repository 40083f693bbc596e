"""The memory of a trainer's ranks, read from what the recipe's own wiring makes of a model."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from attrs.validators import ge
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from primerl import optim, parallel
from primerl._common.checkpoint_tensors import LAYER
from primerl._common.ranks import local_part
from primerl.planning.activations import Activations, measure_activations
from primerl.planning.ranks import imagined_ranks

GIB = 2**30
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
Prepare = Callable[[Any, parallel.Mesh], Optimizer]
"""A recipe's wiring: ``(model, mesh) -> optimizer``; shards the model, too."""


@attrs.frozen(kw_only=True)
class TrainerLayout:
    """How a trainer's ranks are arranged; the sizes are those of ``parallel.mesh``."""

    nodes: int = attrs.field(validator=ge(1))
    gpus_per_node: int = attrs.field(default=8, validator=ge(1))
    replicate: int = 1
    ep: int = 1
    cp: int = 1

    @property
    def ranks(self) -> int:
        """One for each GPU."""
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        sizes = f"{self.nodes} x {self.gpus_per_node} GPUs, ep={self.ep}, cp={self.cp}"
        return sizes if self.replicate == 1 else f"{sizes}, replicate={self.replicate}"


@attrs.frozen(kw_only=True)
class Part:
    """What a rank holds of parameters of one shape, one of each layer."""

    name: str
    """With ``*`` for the numbers of layers."""
    count: int
    shape: tuple[int, ...]
    """Of the whole."""
    local_shape: tuple[int, ...]
    dtype: str


@attrs.frozen(kw_only=True)
class RankMemory:
    """Bytes that a rank of the trainer holds."""

    rank: int
    parameters: int
    """Its parts of parameters, and buffers."""
    gradients: int
    """Of the parameters that require one."""
    optimizer: int
    """States on the device."""
    gathered: int = 0
    """Parameters while layers compute: what is around the layers, one layer, and the next."""
    reduced: int = 0
    """Gradients of a layer, whole, in the dtypes that it computes and is reduced in."""
    activations: int = 0
    """What the forward pass of a micro-batch keeps for the backward pass."""
    recomputed: int = 0
    """What a layer keeps while it is recomputed, where layers are."""
    host: int
    """States in host memory."""
    parts: tuple[Part, ...] = attrs.field(default=(), repr=False)

    @property
    def device(self) -> int:
        """All that is on the device at once."""
        return sum(self.by_name.values())

    @property
    def by_name(self) -> dict[str, int]:
        """The summands of ``device``."""
        names = ("parameters", "gradients", "optimizer", "gathered", "reduced", "activations",
                 "recomputed")  # fmt: skip
        return {name: getattr(self, name) for name in names}


@attrs.frozen(kw_only=True)
class TrainerPlan:
    """What a trainer of a layout would hold, or why it can't run."""

    layout: TrainerLayout
    ranks: tuple[RankMemory, ...] = ()
    """Of the ranks that were imagined."""
    refusal: str | None = None
    """The constraint that the layout breaks; None: it fits."""

    @property
    def host_per_node(self) -> int:
        """Bytes of optimizer states in a node's memory, by the rank that has most."""
        return self.layout.gpus_per_node * max((one.host for one in self.ranks), default=0)


def plan_trainers(
    build: Callable[[], Any],
    prepare: Prepare,
    layouts: Iterable[TrainerLayout],
    *,
    tokens: int,
    gpu_bytes: int,
    dtype: torch.dtype = torch.bfloat16,
    ranks: Sequence[int] = (0,),
) -> list[TrainerPlan]:
    """Wire a model on imagined ranks of each layout, and read what they hold.

    A layout that the parts refuse, or whose ranks don't fit a GPU, is a plan with a ``refusal``.

    Args:
        build: makes the model, on the ``meta`` device: ``models.empty_model``.
        prepare: what the recipe does to it, up to the optimizer. With a mesh whose ``parameters``
            is None, it is asked for a model that computes as a rank does, but is not sharded.
        layouts: of the ranks.
        tokens: of a micro-batch, which ``cp`` ranks share; 0 leaves its activations out.
        gpu_bytes: memory of a GPU that may be used.
        dtype: that layers compute in, as in ``parallel.shard``.
        ranks: those to imagine, each of which wires the model once; -1 is the last. Parts are
            equal, but where a size is no multiple of the ranks: then the first has most.
    """
    activations: dict[tuple[int, int], Activations] = {}
    plans = []
    for layout in layouts:
        found: list[RankMemory] = []
        refusal = None
        try:
            key = (layout.ep, layout.cp)
            if key not in activations:
                activations[key] = _activations(build, prepare, layout, tokens=tokens, dtype=dtype)
            for rank in sorted({one % layout.ranks for one in ranks}):
                with imagined_ranks(layout.ranks, rank=rank):
                    model = build()
                    optimizer = prepare(model, _mesh(layout))
                    memory = rank_memory(model, optimizer, rank=rank, dtype=dtype)
                found.append(
                    attrs.evolve(
                        memory,
                        activations=activations[key].kept,
                        recomputed=activations[key].recomputed,
                    )
                )
        except ValueError as error:
            refusal = str(error)
        plans.append(
            TrainerPlan(
                layout=layout,
                ranks=tuple(found),
                refusal=refusal or _too_large(found, gpu_bytes),
            )
        )
    return plans


def _mesh(layout: TrainerLayout) -> parallel.Mesh:
    return parallel.mesh(replicate=layout.replicate, ep=layout.ep, cp=layout.cp)


def _activations(
    build: Callable[[], Any],
    prepare: Prepare,
    layout: TrainerLayout,
    *,
    tokens: int,
    dtype: torch.dtype,
) -> Activations:
    """Of a rank whose parameters are not sharded: while a layer computes, they are gathered."""
    if tokens % layout.cp:
        raise ValueError(f"context: {tokens} tokens don't divide by cp={layout.cp}")
    if not tokens:
        return Activations(kept=0, recomputed=0)
    with imagined_ranks(layout.ranks):
        model = build().to(dtype)
        prepare(model, attrs.evolve(_mesh(layout), parameters=None))
        return measure_activations(model, tokens=tokens // layout.cp)


def _too_large(ranks: list[RankMemory], gpu_bytes: int) -> str | None:
    largest = max(ranks, key=lambda one: one.device)
    if largest.device <= gpu_bytes:
        return None
    parts = sorted(largest.by_name.items(), key=lambda one: -one[1])
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size)
    return (
        f"memory: rank {largest.rank} needs {largest.device / GIB:.1f} GiB of "
        f"{gpu_bytes / GIB:.1f}: {named}"
    )


def rank_memory(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    rank: int = 0,
    dtype: torch.dtype | None = None,
) -> RankMemory:
    """What this rank holds of a model and its optimizer, after the recipe's wiring.

    Args:
        model: on the ``meta`` device, as it comes from ``parallel.shard``.
        optimizer: of its parameters, before its first step. It steps here, once for each kind of
            parameter, to see which states it makes.
        rank: for the result.
        dtype: that layers compute in; None: that of the parameters.
    """
    tensors = [*model.parameters(), *model.buffers()]
    trained = [one for one in model.parameters() if one.requires_grad]
    states, host = _optimizer_bytes(optimizer)
    gathered, reduced = _gathered_bytes(model, dtype)
    return RankMemory(
        rank=rank,
        parameters=sum(_bytes(one) for one in tensors),
        gradients=sum(_bytes(one) for one in trained),
        optimizer=states,
        gathered=gathered,
        reduced=reduced,
        host=host,
        parts=_parts(model),
    )


def _bytes(tensor: Tensor) -> int:
    return local_part(tensor).nbytes


def _parts(model: nn.Module) -> tuple[Part, ...]:
    counts: dict[Part, int] = {}
    for name, parameter in model.named_parameters():
        part = Part(
            name=_NUMBER.sub("*", name),
            count=1,
            shape=tuple(parameter.shape),
            local_shape=tuple(local_part(parameter).shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
        )
        counts[part] = counts.get(part, 0) + 1
    return tuple(attrs.evolve(part, count=count) for part, count in counts.items())


def _optimizer_bytes(optimizer: Optimizer) -> tuple[int, int]:
    """Bytes of all states on the device, and in host memory.

    One parameter of each kind is updated: each is updated from its own gradient and states only.
    """
    on_host = isinstance(optimizer, optim.Offload | optim.CPUAdamW)
    kinds: dict[Any, list[Tensor]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad:
                placed = parameter.placements if isinstance(parameter, DTensor) else None
                mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
                kind = (number, parameter.shape, parameter.dtype, placed, mesh)
                kinds.setdefault(kind, []).append(parameter)
    device = host = 0
    for parameters in kinds.values():
        one = parameters[0]
        one.grad = torch.empty_like(one)
        optimizer.step()
        one.grad = None
        for state in optimizer.state.pop(one, {}).values():  # plain SGD has none
            if isinstance(state, Tensor):
                size = len(parameters) * _bytes(state)
                away = on_host or local_part(state).device != local_part(one).device
                device, host = (device, host + size) if away else (device + size, host)
    return device, host


def _gathered_bytes(model: nn.Module, dtype: torch.dtype | None) -> tuple[int, int]:
    """Bytes of parameters that FSDP gathers at once, and of gradients before they are reduced.

    What is around the layers stays gathered from the forward pass to the end of the backward pass,
    as do its gradients. While a layer computes, the next one is gathered; gradients of a layer are
    copied to float32 to be summed over ranks.
    """
    if not isinstance(model, FSDPModule):
        return 0, 0
    kept = next(model.parameters()).dtype
    computed = dtype or kept
    summed = kept if computed == kept else torch.float32
    around, layers = 0, dict[str, int]()
    for name, parameter in model.named_parameters():
        layer = LAYER.match(name)
        if layer is None:
            around += _gathered_elements(parameter)
        else:
            layers[layer[0]] = layers.get(layer[0], 0) + _gathered_elements(parameter)
    largest = max(layers.values(), default=0)
    next_one = min(len(layers), 2)
    gathered = computed.itemsize * (around + next_one * largest)
    reduced = computed.itemsize * (around + largest) + summed.itemsize * largest
    return gathered, reduced


def _gathered_elements(parameter: nn.Parameter) -> int:
    """Elements that a rank has while they are gathered: all, but for experts of other ranks."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    return parameter.numel() // (mesh["expert"].size() if "expert" in names else 1)
