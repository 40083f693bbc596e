"""Digests of the tensors that vLLM's model computes with; runs inside vLLM's process.

Written against vLLM 0.32. If vLLM keeps a tensor as it was loaded, all of its bytes are read. If
vLLM keeps a packed copy instead (linear layers and heads on a CPU), the layer is applied to unit
vectors: for ``e_j`` it returns column j of its weight exactly, because all other terms are zero.
Each check reads some of the columns, different ones each time. Packed experts are compared by their
elements in any order.

Tensors that can't be related to a published tensor are left out: those of quantized layers, fused
tensors that are published as one, and experts divided over ranks. The trainer reports how many
tensors were compared.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from primerl.weights.verification.served_tensors import (
    Reading,
    TensorSlice,
    reading_of,
    rearranged_reading,
)

COLUMNS = 16  # read from a packed layer at each check
_EXPERT = re.compile(r"(.*?\.experts)\.(\d+)\.")
MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def served_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Map vLLM's names of tensors, before it merges layers, to the published names."""
    served_name = _name_mapping(model)
    served = {served_name(name): name for name in names}
    return {name: published for name, published in served.items() if name is not None}


def _name_mapping(model: nn.Module) -> Callable[[str], str | None]:
    """Return the function from a published name to vLLM's name, before it merges layers."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return lambda name: name
    mapping: Callable[[str], str | None] = replace(mapper, orig_to_new_stacked={}).map_name
    return mapping


def tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter with several names, such as a head tied to embeddings."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def needed_here(model: nn.Module) -> Callable[[str], bool]:
    """Return a function from a published name to whether this worker needs the tensor.

    It needs all but the experts that vLLM gave to other workers of the server.
    """
    elsewhere: set[tuple[str, int]] = set()
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            base = without_adapters(name).removesuffix(".routed_experts")
            own = module.expert_map_manager.get_local_expert_ids()
            others = set(range(module.global_num_experts)).difference(own)
            elsewhere |= {(base, index) for index in others}
    served_name = _name_mapping(model)

    def needed(published: str) -> bool:
        found = _EXPERT.match(served_name(published) or "") if elsewhere else None
        return found is None or (found[1], int(found[2])) not in elsewhere

    return needed


def without_adapters(path: str) -> str:
    """Return the path that a module would have if no layer were wrapped for adapters."""
    return path.removesuffix(".base_layer").replace(".base_layer.", ".")


class ServedTensors:
    """The readings (digests) of the tensors that a model computes with.

    Args:
        model: vLLM's model.
        names: the names of the published tensors.
        turn: selects which columns of packed layers are read; increase it each time.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], *, turn: int) -> None:
        self._model: Any = model
        self._turn = turn
        self._published = served_names(model, names)
        self._merged = MERGED | dict(getattr(model, "packed_modules_mapping", None) or {})

    @torch.inference_mode()
    def readings(self) -> Iterator[Reading]:
        """Yield the readings of all tensors that can be related to published ones."""
        for name, module in self._model.named_modules(remove_duplicate=False):
            path = without_adapters(name)
            if isinstance(module, RoutedExperts):
                yield from self._experts(path, module)
            elif isinstance(module, VocabParallelEmbedding):
                yield from self._vocabulary(path, module)
            elif isinstance(module, LinearBase):
                yield from self._linear(path, module)
            else:
                yield from self._plain(path, module)

    def _plain(self, path: str, module: nn.Module) -> Iterator[Reading]:
        """Read parameters and buffers that vLLM keeps unchanged, such as norms."""
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in tensors:
            published = self._published.get(f"{path}.{name}".removeprefix("."))
            if published is not None:
                yield reading_of(tensor, TensorSlice(name=published))

    # ---- linear layers ----

    def _linear(self, path: str, module: Any) -> Iterator[Reading]:
        if not isinstance(module.quant_method, UnquantizedLinearMethod):
            return
        width = getattr(module, "input_size_per_partition", module.input_size)
        first = module.tp_rank * width if isinstance(module, RowParallelLinear) else 0
        for name, here, there in self._rows(path, module):
            weight = self._published.get(f"{name}.weight")
            if weight is not None:
                yield from self._matrix(module, weight, here, there, (first, first + width))
            bias = self._published.get(f"{name}.bias")
            if bias is not None and getattr(module, "bias", None) is not None:
                yield reading_of(module.bias[slice(*here)], TensorSlice(name=bias, rows=there))

    def _rows(self, path: str, module: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yield the published layers in a module: name, rows in the module, rows as published."""
        prefix, _, last = path.rpartition(".")
        if isinstance(module, QKVParallelLinear | MergedColumnParallelLinear):
            names = self._merged.get(last, [])
            if len(names) != len(module.output_partition_sizes):
                return  # the layers are published as one tensor, in an unknown order of rows
            ranks = [module.tp_rank] * len(names)
            if isinstance(module, QKVParallelLinear):  # keys and values may be on several ranks
                shared = module.tp_rank // module.num_kv_head_replicas
                ranks[1:] = [shared] * (len(names) - 1)
            start = 0
            for name, size, rank in zip(names, module.output_partition_sizes, ranks, strict=True):
                here, there = (start, start + size, 1), (rank * size, (rank + 1) * size, 1)
                yield f"{prefix}.{name}".removeprefix("."), here, there
                start += size
        elif isinstance(module, ColumnParallelLinear):
            size, rank = module.output_partition_sizes[0], module.tp_rank
            yield path, (0, size, 1), (rank * size, (rank + 1) * size, 1)
        elif isinstance(module, RowParallelLinear | ReplicatedLinear):
            size = module.output_size
            yield path, (0, size, 1), (0, size, 1)

    def _matrix(
        self, module: Any, name: str, here: Any, there: Any, columns: tuple[int, int]
    ) -> Iterator[Reading]:
        """Read rows ``here`` of a weight: rows ``there`` and ``columns`` of a published tensor."""
        first, last = columns
        width = last - first
        weight = module.weight
        if weight.numel():
            part = TensorSlice(name=name, rows=there, columns=(first, last, 1))
            yield reading_of(weight[slice(*here), :width], part)
            return
        chosen = self._chosen(width)
        asked = _columns(module, weight, width, chosen)[slice(*here)]
        start, _, step = chosen
        yield reading_of(
            asked, TensorSlice(name=name, rows=there, columns=(first + start, last, step))
        )

    def _chosen(self, width: int) -> tuple[int, int, int]:
        step = max(1, width // COLUMNS)
        return self._turn % step, width, step

    # ---- embeddings and heads ----

    def _vocabulary(self, path: str, module: Any) -> Iterator[Reading]:
        if not isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            return
        shard = module.shard_indices
        there = (shard.org_vocab_start_index, shard.org_vocab_end_index, 1)
        count = there[1] - there[0]
        name = self._published.get(f"{path}.weight")
        is_head = name is None or isinstance(module, ParallelLMHead)
        name = name or self._embedding()  # the trainer's head is tied to it
        if name is None:
            return
        width = module.embedding_dim
        if module.weight.numel():
            yield reading_of(module.weight[:count], TensorSlice(name=name, rows=there))
        if is_head and hasattr(module, "cpu_linear"):
            chosen = self._chosen(width)
            asked = _columns(module, module.weight, width, chosen)[:count]
            yield reading_of(asked, TensorSlice(name=name, rows=there, columns=chosen))
        bias = self._published.get(f"{path}.bias")
        if bias is not None and getattr(module, "bias", None) is not None:
            yield reading_of(module.bias[:count], TensorSlice(name=bias, rows=there))

    def _embedding(self) -> str | None:
        """Return the published name of the token embedding, if there is exactly one."""
        names = [
            self._published[f"{path}.weight"]
            for path, module in (
                (without_adapters(name), module) for name, module in self._model.named_modules()
            )
            if isinstance(module, VocabParallelEmbedding)
            and not isinstance(module, ParallelLMHead)
            and f"{path}.weight" in self._published
        ]
        return names[0] if len(names) == 1 else None

    # ---- experts ----

    def _experts(self, path: str, module: Any) -> Iterator[Reading]:
        whole = module.local_num_experts == module.global_num_experts
        if module.quant_config is not None or not whole or module.moe_config.tp_size != 1:
            return
        base = path.removesuffix(".routed_experts")
        gate, up = module.ckpt_gate_proj_name, module.ckpt_up_proj_name
        merged = [name for name in (gate, up) if name is not None]
        for index in range(module.local_num_experts):
            for own, names in (("w13", merged), ("w2", [module.ckpt_down_proj_name])):
                for kind in ("weight", "bias"):
                    tensor = getattr(module, f"{own}_{kind}", None)
                    published = [self._published.get(f"{base}.{index}.{n}.{kind}") for n in names]
                    found = [TensorSlice(name=name) for name in published if name is not None]
                    if tensor is not None and len(found) == len(names):
                        yield rearranged_reading(tensor[index], found)


def _columns(module: Any, weight: Tensor, width: int, chosen: tuple[int, int, int]) -> Tensor:
    """Compute columns of a layer's weight by applying the layer to unit vectors."""
    indices = torch.arange(*chosen, device=weight.device)
    units = torch.zeros(len(indices), width, dtype=weight.dtype, device=weight.device)
    units[torch.arange(len(indices), device=weight.device), indices] = 1
    found: Tensor = module.quant_method.apply(module, units, bias=None)
    return found.T
