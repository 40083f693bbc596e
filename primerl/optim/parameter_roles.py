"""Assignment of a model's parameters to the algorithms of ``Muon``: Muon or AdamW.

A parameter's role follows from its kind of module: linear layer, stacked experts, router,
embedding and so on. If the role is unknown, an error asks the caller to state it.
"""

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from primerl._common.expert_modules import is_experts
from primerl.attention.indexer import DocumentIndexer
from primerl.optim import fused_matrices
from primerl.optim.fused_matrices import Matrices, classes, inner, sizes
from primerl.optim.routers import Routers

Stated = Mapping[str, str | Matrices]


@attrs.frozen(kw_only=True, eq=False)
class ParameterRole:
    """The role of one parameter, and its matrices if Muon updates it."""

    name: str
    parameter: Tensor = attrs.field(repr=False)
    role: str
    """Kind of parameter, such as ``linear``, ``experts``, ``router``, ``embedding`` or ``norm``."""
    matrices: Matrices | None
    """The matrices that the parameter holds; None if AdamW updates it."""

    @property
    def algorithm(self) -> str:
        """The algorithm that updates the parameter: ``"muon"`` or ``"adamw"``."""
        return "adamw" if self.matrices is None else "muon"

    @property
    def description(self) -> str:
        """A description of the matrices, for display; empty for AdamW."""
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
    """Parameter groups for ``Muon``, with a ``str`` that is a table of each parameter's role."""

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
    """Return the sort key of a group: single matrices, then fused matrices, then AdamW."""
    if matrices is None:
        return 2
    return int(matrices.split is not None)


def muon_parameters(model: nn.Module, *, roles: Stated | None = None) -> MuonParameters:
    """Divide a model's parameters into groups for ``Muon``: matrices, and the rest for AdamW.

    Muon updates the weights of linear layers and of stacked experts. A fused weight (gate and up
    projections; query, key and value) counts as several matrices, whatever its layout. AdamW
    updates embeddings, the head, weights tied to these, routers, weights with a single output or
    one output per head, convolutions, norms and biases. ``print`` the result to see the role of
    each parameter.

    Args:
        model: a Hugging Face model, sharded or not, with or without adapters; frozen parameters are
            omitted.
        roles: explicit roles, ``"adamw"`` or ``Matrices``, keyed by a parameter's name or a pattern
            such as ``"*.mixer.in_proj.weight"``. They override the roles found automatically.

    Returns:
        Nonempty groups, to which other hyperparameters can be added.

    Raises:
        ValueError: the role of a parameter is unknown, or an entry of ``roles`` matches no
            parameter or has an invalid role.
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
            why = f"its outputs can't be divided into parts of {matrices.split}"
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
    """Return the roles of embeddings and heads, by parameter id, because they may be tied."""
    if not hasattr(model, "get_output_embeddings"):
        raise ValueError(
            f"{type(model).__name__} has no get_output_embeddings, so its head can't be "
            "distinguished from other linear layers; expected a transformers model. For other "
            'models, create groups with the keys "params" and "algorithm"'
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
        stack = fused_matrices.stacked_matrices(parent, layer_name, module, own, parameter)
        if stack is None:
            raise _unknown(name, parameter, f"{type(module).__name__} has an unknown layout")
        return "experts", stack
    if not fused_matrices.is_linear(module) or own != "weight":
        raise _unknown(name, parameter, f"{type(module).__name__} is an unknown kind of layer")
    if classes(owner) & set(fused_matrices.COEFFICIENTS):
        return "coefficients", None
    if adapter and not fused_matrices.is_linear(inner(modules[layer])):
        raise _unknown(name, parameter, f"it adapts a {type(inner(modules[layer])).__name__}")
    if _is_head_gate(name, parameter, owner, inner(modules[layer])):
        return "head gate", None
    if adapter == "inputs":
        return "linear", Matrices()
    transposed = fused_matrices.is_transposed_linear(module)
    matrices = fused_matrices.linear_matrices(owner, layer_name, parameter, transposed=transposed)
    if matrices.split is None and not fused_matrices.is_known(owner, layer_name):
        _refuse_surplus(name, parameter, owner, layer_name)
    return "linear", matrices


def _adapted_layer(path: str, modules: dict[str, nn.Module]) -> tuple[str, str]:
    """Return the path of the layer that a linear module is or adapts (``peft``), and its half.

    The half is ``"inputs"`` for the first matrix of a low-rank adapter, which takes the layer's
    inputs, ``"outputs"`` for the second, and empty if the module is the layer itself.
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
        why = f"{outputs} outputs may be one per head, or whole heads of size {size}"
        raise _unknown(name, parameter, why)
    return True


def _refuse_surplus(name: str, parameter: Tensor, owner: nn.Module, layer: str) -> None:
    """Refuse an unknown layer with more outputs than its siblings have inputs: it may be fused."""
    siblings = fused_matrices.linear_children(owner)
    linear = siblings.pop(layer, None)
    if linear is None:
        return
    inputs, outputs = sizes(linear)
    takers = [sizes(other)[0] for other in siblings.values() if sizes(other)[1] == inputs]
    if takers and outputs > max(takers):
        why = (
            f"{type(owner).__name__}'s other layers take at most {max(takers)} inputs, but {layer} "
            f"has {outputs} outputs, so it may hold several matrices"
        )
        raise _unknown(name, parameter, why)


def _unknown(name: str, parameter: Tensor, why: str) -> ValueError:
    return fused_matrices.unknown(f"{name}, of shape {tuple(parameter.shape)},", why)
