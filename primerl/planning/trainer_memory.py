"""The memory plan of a trainer's ranks, computed from a model that the recipe's code prepared."""

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
from primerl._common.expert_modules import expert_modules
from primerl._common.ranks import local_part
from primerl.planning.activation_memory import Activations, measure_activations
from primerl.planning.allowances import Allowances
from primerl.planning.virtual_ranks import imagined_ranks

GIB = 2**30
MAX_TOKENS = 2**24
"""The maximum number of tokens of a traced micro-batch, whose positions have values."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
Prepare = Callable[[Any, parallel.Mesh], Optimizer]
"""A recipe's setup function, ``(model, mesh) -> optimizer``, which also shards the model."""


@attrs.frozen(kw_only=True)
class TrainerLayout:
    """The arrangement of a trainer's ranks; sizes are as in ``parallel.mesh``."""

    nodes: int = attrs.field(validator=ge(1))
    gpus_per_node: int = attrs.field(default=8, validator=ge(1))
    replicate: int = attrs.field(default=1, validator=ge(1))
    ep: int = attrs.field(default=1, validator=ge(1))
    cp: int = attrs.field(default=1, validator=ge(1))

    @property
    def ranks(self) -> int:
        """Number of ranks, one per GPU."""
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        sizes = f"{self.nodes} x {self.gpus_per_node} GPUs, ep={self.ep}, cp={self.cp}"
        return sizes if self.replicate == 1 else f"{sizes}, replicate={self.replicate}"


@attrs.frozen(kw_only=True)
class ParameterShare:
    """One rank's share of a parameter, over all layers that have it."""

    name: str
    """The parameter's name, with ``*`` for layer numbers."""
    count: int
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    local_shape: tuple[int, ...]
    dtype: str


@attrs.frozen(kw_only=True)
class RankMemory:
    """Bytes of memory that a rank of the trainer needs."""

    rank: int
    parameters: int
    """The rank's shards of parameters, and buffers."""
    gradients: int
    """Sharded gradients of trained parameters."""
    optimizer: int
    """Optimizer states on the device."""
    gathered: int = 0
    """Gathered parameters: those outside the layers, the running layer and the next one."""
    reduced: int = 0
    """Gathered gradients before and during the reduction: those outside the layers, and one layer's
    in the dtype of the reduction."""
    activations: int = 0
    """Activations that the forward pass of a micro-batch keeps for the backward pass."""
    working: int = 0
    """What else is alive at the peak of both passes: within one layer, or in the head."""
    host: int
    """Optimizer states in host memory."""
    activations_on_host: int = 0
    """Activations in host memory, if they are offloaded."""
    unsharded: int = 0
    """Bytes of all parameters that this rank gathers in a forward pass."""
    unreduced: int = 0
    """Bytes of all gradients that this rank reduces in a backward pass, in the dtype of the
    reduction."""
    allowed: dict[str, int] = attrs.field(factory=dict)
    """What is allowed for beside tensors, by name (``Allowances``)."""
    parts: tuple[ParameterShare, ...] = attrs.field(default=(), repr=False)

    @property
    def device(self) -> int:
        """Total bytes on the device."""
        return sum(self.by_name.values())

    @property
    def by_name(self) -> dict[str, int]:
        """The terms of the sum ``device``, by name."""
        names = ("parameters", "gradients", "optimizer", "gathered", "reduced", "activations",
                 "working")  # fmt: skip
        return {name: getattr(self, name) for name in names} | self.allowed


@attrs.frozen(kw_only=True)
class TrainerPlan:
    """The memory of a trainer with a given layout, or the reason why it can't run."""

    layout: TrainerLayout
    ranks: tuple[RankMemory, ...] = ()
    """Memory of the imagined ranks."""
    refusal: str | None = None
    """The constraint that the layout violates; None if it fits."""

    @property
    def host_per_node(self) -> int:
        """Bytes of optimizer states in a node's host memory, by its largest rank."""
        return self.layout.gpus_per_node * max((one.host for one in self.ranks), default=0)

    @property
    def activations_per_node(self) -> int:
        """Bytes of activations in a node's host memory, if they are offloaded."""
        largest = max((one.activations_on_host for one in self.ranks), default=0)
        return self.layout.gpus_per_node * largest


def plan_trainers(
    build: Callable[[], Any],
    prepare: Prepare,
    layouts: Iterable[TrainerLayout],
    *,
    tokens: int,
    gpu_bytes: int,
    dtype: torch.dtype = torch.bfloat16,
    ranks: Sequence[int] = (0,),
    allowances: Allowances | None = None,
) -> list[TrainerPlan]:
    """Prepare a model on imagined ranks of each layout, and measure the ranks' memory.

    If the library refuses a layout, or its ranks don't fit into a GPU, its plan has a ``refusal``.

    Args:
        build: builds the model, on the ``meta`` device: ``models.empty_model``.
        prepare: the recipe's setup code, up to the optimizer. With a mesh whose ``parameters`` is
            None, it must leave the model unsharded, but computing as a rank does.
        layouts: layouts of the ranks.
        tokens: the number of tokens of a micro-batch, at most 2^24, which ``cp`` ranks share; 0 to
            leave out activations.
        gpu_bytes: usable memory per GPU.
        dtype: dtype that layers compute in, as in ``parallel.shard``.
        ranks: the ranks to imagine, each of which prepares the model once; -1 is the last. Shards
            are equal, unless a size is not a multiple of the number of ranks; then rank 0 has most.
        allowances: what a GPU needs beside tensors; None: nothing.
    """
    activations: dict[tuple[int, int, bool], Activations] = {}
    plans = []
    for layout in layouts:
        found: list[RankMemory] = []
        refusal = None
        try:
            key = (layout.ep, layout.cp, layout.ranks == 1)
            if key not in activations:
                activations[key] = _activations(build, prepare, layout, tokens=tokens, dtype=dtype)
            for rank in sorted({one % layout.ranks for one in ranks}):
                with imagined_ranks(layout.ranks, rank=rank):
                    model = build()
                    optimizer = prepare(model, _mesh(layout))
                    memory = rank_memory(model, optimizer, rank=rank, dtype=dtype)
                memory = attrs.evolve(
                    memory,
                    activations=activations[key].kept,
                    working=activations[key].working,
                    activations_on_host=activations[key].host,
                )
                allowed = {} if allowances is None else allowances.of(memory)
                found.append(attrs.evolve(memory, allowed=allowed))
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
    """Measure a rank's activations, without sharding: a running layer's parameters are whole.

    Several ranks gather parameters in the dtype of computation. One rank casts them in each forward
    pass, and the casts count as activations, except for mixtures of experts.
    """
    if tokens % layout.cp:
        raise ValueError(f"context: {tokens} tokens are not divisible by cp={layout.cp}")
    if tokens > MAX_TOKENS:
        raise ValueError(f"context: {tokens} tokens are more than can be traced ({MAX_TOKENS})")
    if not tokens:
        return Activations(kept=0, working=0, host=0)

    def unsharded() -> Any:
        model = build()
        if layout.ranks > 1 or expert_modules(model):
            model = model.to(dtype)
        prepare(model, attrs.evolve(_mesh(layout), parameters=None))
        return model

    with imagined_ranks(layout.ranks, rank=layout.cp - 1):
        return measure_activations(unsharded, tokens=tokens, cp=layout.cp)


def _too_large(ranks: list[RankMemory], gpu_bytes: int) -> str | None:
    largest = max(ranks, key=lambda one: one.device)
    if largest.device <= gpu_bytes:
        return None
    parts = sorted(largest.by_name.items(), key=lambda one: -one[1])
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size)
    return (
        f"memory: rank {largest.rank} needs {largest.device / GIB:.1f} GiB, but the limit is "
        f"{gpu_bytes / GIB:.1f} GiB; in GiB: {named}"
    )


def rank_memory(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    rank: int = 0,
    dtype: torch.dtype | None = None,
) -> RankMemory:
    """Measure this rank's memory for a model and its optimizer, without activations.

    Args:
        model: the model after ``parallel.shard``, on the ``meta`` device.
        optimizer: the optimizer of its parameters, before its first step. It steps here once per
            kind of parameter, to see which states it creates.
        rank: this rank, for the result.
        dtype: dtype that layers compute in; None: that of the parameters.
    """
    tensors = [*model.parameters(), *model.buffers()]
    trained = [one for one in model.parameters() if one.requires_grad]
    states, host = _optimizer_bytes(optimizer)
    gathered, unsharded = _gathered_bytes(model, dtype)
    reduced, unreduced = _reduced_bytes(model, dtype)
    return RankMemory(
        rank=rank,
        parameters=sum(_bytes(one) for one in tensors),
        gradients=sum(_bytes(one) for one in trained),
        optimizer=states,
        gathered=gathered,
        reduced=reduced,
        unsharded=unsharded,
        unreduced=unreduced,
        host=host,
        parts=_parts(model),
    )


def _bytes(tensor: Tensor) -> int:
    return local_part(tensor).nbytes


def _parts(model: nn.Module) -> tuple[ParameterShare, ...]:
    counts: dict[ParameterShare, int] = {}
    for name, parameter in model.named_parameters():
        part = ParameterShare(
            name=_NUMBER.sub("*", name),
            count=1,
            shape=tuple(parameter.shape),
            local_shape=tuple(local_part(parameter).shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
        )
        counts[part] = counts.get(part, 0) + 1
    return tuple(attrs.evolve(part, count=count) for part, count in counts.items())


def _optimizer_bytes(optimizer: Optimizer) -> tuple[int, int]:
    """Return the bytes of all optimizer states on the device, and in host memory.

    Only one parameter of each kind is updated, because a parameter's update depends only on its own
    gradient and states.
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
    """Return the bytes of parameters that FSDP gathers at once, and of all gathered parameters.

    Parameters outside the layers stay gathered from the forward pass to the end of the backward
    pass. While a layer computes, the next one is gathered.
    """
    if not isinstance(model, FSDPModule):
        return 0, 0
    computed = dtype or next(model.parameters()).dtype
    around, layers = _elements(model.named_parameters(), computed)
    next_one = min(len(layers), 2)
    at_once = around + next_one * max(layers, default=0)
    return computed.itemsize * at_once, computed.itemsize * (around + sum(layers))


def _reduced_bytes(model: nn.Module, dtype: torch.dtype | None) -> tuple[int, int]:
    """Return the bytes of unreduced gradients at once, and of all that are reduced.

    Gradients outside the layers stay until the end of the backward pass. While a layer computes,
    the gradients of the layer before are summed over ranks in float32. A layer's own gradients
    count as ``working``.
    """
    if not isinstance(model, FSDPModule):
        return 0, 0
    kept = next(model.parameters()).dtype
    computed = dtype or kept
    summed = kept if computed == kept else torch.float32
    trained = ((name, one) for name, one in model.named_parameters() if one.requires_grad)
    around, layers = _elements(trained, computed)
    at_once = computed.itemsize * around + summed.itemsize * max(layers, default=0)
    return at_once, summed.itemsize * (around + sum(layers))


def _elements(
    parameters: Iterable[tuple[str, nn.Parameter]], computed: torch.dtype
) -> tuple[int, list[int]]:
    """Return the gathered elements of parameters outside the layers, and of those of each layer."""
    around, layers = 0, dict[str, int]()
    for name, parameter in parameters:
        layer = LAYER.match(name)
        if layer is None:
            around += _gathered_elements(parameter, computed)
        else:
            size = _gathered_elements(parameter, computed)
            layers[layer[0]] = layers.get(layer[0], 0) + size
    return around, [*layers.values()]


def _gathered_elements(parameter: nn.Parameter, computed: torch.dtype) -> int:
    """Return the elements of a parameter when gathered: all but the experts of other ranks.

    A parameter that this rank has in full, in the dtype of computation, is not copied.
    """
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    held = parameter.numel() // (mesh["expert"].size() if "expert" in names else 1)
    whole = local_part(parameter).numel() == held and parameter.dtype == computed
    return 0 if whole else held
