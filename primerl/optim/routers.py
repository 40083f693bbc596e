"""Search for the routers of a model, which are the layers that score experts."""

from collections.abc import Collection

from torch import nn
from torch.nn.modules.conv import _ConvNd

from primerl.optim.fused_matrices import is_linear, linear_children, sizes, unknown


class Routers:
    """The routers of a model: the layers with one output per expert of their block."""

    def __init__(self, modules: dict[str, nn.Module], stated: Collection[str]) -> None:
        self._modules, self._stated = modules, stated
        self._routers: set[tuple[str, str]] = set()
        """Entries are (path of a layer, "") or (path of a module, name of its parameter)."""
        stacks: dict[str, set[tuple[int, ...]]] = {}
        for path, module in modules.items():
            shapes = {tuple(p.shape) for p in module.parameters(recurse=False) if p.ndim == 3}
            if shapes and not isinstance(module, _ConvNd):
                stacks.setdefault(self._block(path), set()).update(shapes)
            if isinstance(module, nn.ModuleList) and len({type(one) for one in module}) == 1:
                found = self._scoring(path.rpartition(".")[0], {len(module)}, None)
                self._routers |= found if len(module) > 1 and len(found) == 1 else set()
        for block, shapes in stacks.items():
            self._find(block, shapes)

    def includes(self, layer: str, own: str) -> bool:
        """Whether a layer's parameter belongs to a router."""
        return (layer, "") in self._routers or (layer, own) in self._routers

    def _block(self, path: str) -> str:
        """Return the path of the module that contains the experts, skipping adapters' wrappers."""
        path = path.rpartition(".")[0]
        while path and hasattr(self._modules[path], "base_layer"):
            path = path.rpartition(".")[0]
        return path

    def _find(self, block: str, stacks: set[tuple[int, ...]]) -> None:
        if not any(one.requires_grad for one in self._modules[block].parameters()):
            return  # of a frozen encoder, for example
        experts = {shape[0] for shape in stacks}
        widths = {width for shape in stacks for width in shape[1:]}
        for around in (block, block.rpartition(".")[0]):
            found = self._scoring(around, experts, widths)
            if len(found) == 1:
                self._routers |= found
                return
            if found:
                break
        inside = f"{block}." if block else ""
        if any(name.startswith(inside) for name in self._stated):
            return
        names = ", ".join(".".join(one).rstrip(".") for one in sorted(found)) or "no layer"
        raise unknown(
            f"the router of {block or 'the model'}",
            f"{names} has one output per expert, for experts of shapes {sorted(stacks)}",
        )

    def _scoring(
        self, block: str, experts: set[int], widths: set[int] | None
    ) -> set[tuple[str, str]]:
        """Find layers with one output per expert: children of a block, or a child's only layer."""
        found = set()
        children = {
            f"{block}.{name}".lstrip("."): child
            for name, child in self._modules[block].named_children()
        }

        def fits(outputs: int, inputs: int) -> bool:
            return outputs in experts and (widths is None or inputs in widths)

        for path, part in {block: self._modules[block], **children}.items():
            linears = linear_children(part)
            if isinstance(part, nn.ModuleList) or (path != block and len(linears) > 1):
                continue
            for name, linear in linears.items():
                inputs, outputs = sizes(linear)
                if fits(outputs, inputs):
                    found.add((f"{path}.{name}".lstrip("."), ""))
            own = dict(part.named_parameters(recurse=False))
            holds_experts = any(parameter.ndim == 3 for parameter in own.values())
            if not (is_linear(part) or isinstance(part, nn.Embedding) or holds_experts):
                for name, parameter in own.items():
                    if parameter.ndim == 2 and fits(*parameter.shape):
                        found.add((path, name))
        return found
