"""Which parameters of a model are matrices for ``Muon``, and which are AdamW's.

Decided by the kind of module: linear layer, stacked experts, router, embedding. Where the role of a
parameter is unknown, an error asks the caller to state it.
"""

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from primerl._common.expert_modules import is_experts
from primerl.attention.indexer import DocumentIndexer
from primerl.optim import layouts
from primerl.optim.layouts import Matrices, classes, inner, sizes
from primerl.optim.routers import Routers

Stated = Mapping[str, str | Matrices]


@attrs.frozen(kw_only=True, eq=False)
class ParameterRole:
    """The role of a parameter for ``Muon``."""

    name: str
    parameter: Tensor = attrs.field(repr=False)
    role: str
    """``linear``, ``experts``, ``router``, ``embedding``, ``head``, ``norm``, ..."""
    matrices: Matrices | None
    """None for AdamW."""

    @property
    def algorithm(self) -> str:
        """``"muon"`` or ``"adamw"``."""
        return "adamw" if self.matrices is None else "muon"

    @property
    def description(self) -> str:
        """The matrices, for display."""
        if self.matrices is None:
            return ""
        each = f"{self.parameter.shape[0]} x " if self.parameter.ndim == 3 else ""
        split = self.matrices.split
        words = "1"
        if split is not None:
            names = self.matrices.names or tuple(str(size) for size in split)
            alike = len(names) > 3
            words = f"{len(names)}: {names[0]} .. {names[-1]}" if alike else " | ".join(names)
            repeats = self.matrices.outputs(self.parameter) // sum(split)
            words += "" if repeats == 1 else f", {repeats} times in turn"
        return f"{each}{words}" + (", transposed" if self.matrices.transposed else "")


class MuonParameters(list[dict[str, Any]]):
    """Groups of parameters for ``Muon``. Their ``str`` is a table of each parameter's role."""

    def __init__(self, roles: Iterable[ParameterRole]) -> None:
        self.roles = tuple(roles)
        groups: dict[Any, dict[str, Any]] = {}
        for one in sorted(self.roles, key=lambda one: _order(one.matrices)):
            matrices = one.matrices
            split = None if matrices is None else matrices.split
            key = matrices and (split, matrices.transposed)
            new: dict[str, Any] = {"params": [], "algorithm": one.algorithm}
            if matrices is not None:
                new |= {"split": split, "transposed": matrices.transposed}
            groups.setdefault(key, new)["params"].append(one.parameter)
        super().__init__(groups.values())

    def __str__(self) -> str:
        rows = [("parameter", "shape", "role", "algorithm", "matrices")]
        for one in self.roles:
            shape = " x ".join(map(str, one.parameter.shape))
            rows.append((one.name, shape, one.role, one.algorithm, one.description))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)


def _order(matrices: Matrices | None) -> int:
    """The order of groups: matrices, then split ones, then AdamW's."""
    if matrices is None:
        return 2
    return int(matrices.split is not None)


def muon_parameters(model: nn.Module, *, roles: Stated | None = None) -> MuonParameters:
    """The groups that ``Muon`` takes: a model's matrices, and everything else for AdamW.

    Matrices are the weights of linear layers and of stacked experts. A fused weight (gate and up
    projections; query, key and value) is as many matrices, whatever their layout. AdamW gets
    embeddings, the head and what is tied to them, routers, weights with one output or with one for
    each head, convolutions, norms and biases. ``print`` the result to see the role of each
    parameter.

    Args:
        model: a Hugging Face model, sharded or not, with adapters or not; frozen parameters are
            left out.
        roles: ``"adamw"`` or ``Matrices`` for parameters by name or by a pattern such as
            ``"*.mixer.in_proj.weight"``; overrides what is found.

    Returns:
        Groups that are not empty, to which other hyperparameters can be added.

    Raises:
        ValueError: the role of a parameter is unknown, or ``roles`` match no parameter.
    """
    stated = _stated(model, roles or {})
    special = _embeddings(model)
    modules = dict(model.named_modules())
    routers = Routers(modules, stated.keys())
    found = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in stated:
            role, matrices = "stated", stated[name]
        elif id(parameter) in special:
            role, matrices = special[id(parameter)], None
        else:
            role, matrices = _role(name, parameter, modules, routers)
        if matrices is not None and not (parameter.ndim in (2, 3) and matrices.fits(parameter)):
            why = f"its outputs don't come in parts of {matrices.split}"
            raise _unknown(name, parameter, why)
        found.append(ParameterRole(name=name, parameter=parameter, role=role, matrices=matrices))
    return MuonParameters(found)


def _stated(model: nn.Module, roles: Stated) -> dict[str, Matrices | None]:
    names = [name for name, _ in model.named_parameters()]
    stated: dict[str, Matrices | None] = {}
    for pattern, role in roles.items():
        fitting = fnmatch.filter(names, pattern)
        if not fitting:
            raise ValueError(f"roles has {pattern!r}, which matches no parameter of the model")
        if role != "adamw" and not isinstance(role, Matrices):
            raise ValueError(f"roles[{pattern!r}] is {role!r}; expected 'adamw' or optim.Matrices")
        stated |= dict.fromkeys(fitting, role if isinstance(role, Matrices) else None)
    return stated


def _embeddings(model: Any) -> dict[int, str]:
    """The roles of embeddings and heads, by the ids of their parameters, which may be tied."""
    if not hasattr(model, "get_output_embeddings"):
        raise ValueError(
            f"{type(model).__name__} has no get_output_embeddings, so that its head can't be told "
            "from other linear layers; expected a model of transformers. For others, make groups "
            'with the keys "params" and "algorithm"'
        )
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    by_role = {"head": [model.get_output_embeddings()]}
    by_role["embedding"] = [*tables, model.get_input_embeddings()]
    return {
        id(parameter): role
        for role, modules in by_role.items()
        for module in modules
        if module is not None
        for parameter in module.parameters()
    }


def _role(
    name: str, parameter: Tensor, modules: dict[str, nn.Module], routers: Routers
) -> tuple[str, Matrices | None]:
    path, _, own = name.rpartition(".")
    module = modules[path]
    if isinstance(module, _ConvNd):
        return "convolution", None
    if any(kind.endswith("Norm") for kind in classes(module)):
        return "norm", None
    if parameter.ndim < 2:
        return "bias" if own.endswith("bias") else "vector", None
    layer, adapter = _adapted_layer(path, modules)
    owner_path, _, layer_name = layer.rpartition(".")
    owner = modules[owner_path]
    if isinstance(owner, DocumentIndexer):
        owner = owner.wrapped[0]
    if routers.includes(layer, own):
        return "router", None
    if is_experts(module) and parameter.ndim == 2 and own.endswith("bias"):
        return "bias", None
    if min(parameter.shape[-2:]) == 1:
        return "vector", None
    if parameter.ndim == 3:
        parent = owner if path else None
        stack = layouts.stacked_matrices(parent, layer_name, module, own, parameter)
        if stack is None:
            raise _unknown(name, parameter, f"{type(module).__name__} has an unknown layout")
        return "experts", stack
    if not layouts.is_linear(module) or own != "weight":
        raise _unknown(name, parameter, f"{type(module).__name__} is an unknown kind of layer")
    if classes(owner) & set(layouts.COEFFICIENTS):
        return "coefficients", None
    if adapter and not layouts.is_linear(inner(modules[layer])):
        raise _unknown(name, parameter, f"it adapts a {type(inner(modules[layer])).__name__}")
    if _is_head_gate(name, parameter, owner, inner(modules[layer])):
        return "head gate", None
    if adapter == "inputs":
        return "linear", Matrices()
    transposed = layouts.is_transposed_linear(module)
    matrices = layouts.linear_matrices(owner, layer_name, parameter, transposed=transposed)
    if matrices.split is None and not layouts.is_known(owner, layer_name):
        _refuse_surplus(name, parameter, owner, layer_name)
    return "linear", matrices


def _adapted_layer(path: str, modules: dict[str, nn.Module]) -> tuple[str, str]:
    """The layer that a linear module is or adapts (``peft``), and which half of the adapter it is.

    The first matrix of a low-rank adapter takes the layer's inputs, the second makes its outputs.
    """
    while path.endswith(".base_layer"):
        path = path.removesuffix(".base_layer")
    holder = path.rpartition(".")[0]
    layer, _, half = holder.rpartition(".")
    if isinstance(modules[holder], nn.ModuleDict) and hasattr(modules[layer], "base_layer"):
        while layer.endswith(".base_layer"):
            layer = layer.removesuffix(".base_layer")
        return layer, "outputs" if half == "lora_B" else "inputs"
    return path, ""


def _is_head_gate(name: str, parameter: Tensor, owner: Any, linear: nn.Module) -> bool:
    """Whether each output of the layer scales one attention head."""
    outputs = sizes(linear)[1]
    counts = [getattr(owner, count, None) for count in ("num_heads", "n_heads")]
    if outputs not in counts:
        return False
    size = getattr(owner, "head_dim", None)
    if isinstance(size, int) and outputs % size == 0:
        why = f"{outputs} outputs may be one for each head, or whole heads of {size}"
        raise _unknown(name, parameter, why)
    return True


def _refuse_surplus(name: str, parameter: Tensor, owner: nn.Module, layer: str) -> None:
    """Refuse an unknown layer with more outputs than its siblings take: it may be fused."""
    siblings = layouts.linear_children(owner)
    linear = siblings.pop(layer, None)
    if linear is None:
        return
    inputs, outputs = sizes(linear)
    takers = [sizes(other)[0] for other in siblings.values() if sizes(other)[1] == inputs]
    if takers and outputs > max(takers):
        why = (
            f"{type(owner).__name__} takes {max(takers)} inputs back, but {layer} has {outputs} "
            "outputs, which may be several matrices"
        )
        raise _unknown(name, parameter, why)


def _unknown(name: str, parameter: Tensor, why: str) -> ValueError:
    return layouts.unknown(f"{name}, of shape {tuple(parameter.shape)},", why)
