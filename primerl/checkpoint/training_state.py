"""The state of a model and its optimizers as named tensors and JSON values."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from primerl._common.ranks import saved_tensors


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers as ``model/NAME``; shared tensors once."""
    return {f"model/{name}": tensor for name, tensor in saved_tensors(model).items()}


def optimizer_state(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state's tensors as ``optimizer/PARAMETER/NAME``, and the rest as JSON values."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    groups = []
    for group in _groups(optimizers):
        values = {key: value for key, value in group.items() if key != "params"}
        inside = [_name(names, parameter) for parameter in group["params"]]
        groups.append({"params": inside, "values": {k: _plain(k, v) for k, v in values.items()}})
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            name = _name(names, parameter)
            for key, value in state.items():
                if isinstance(value, Tensor):
                    _require_whole(f"{name}: {key}", value, parameter)
                    tensors[f"optimizer/{name}/{key}"] = value
                else:
                    numbers.setdefault(name, {})[key] = _plain(f"{name}: {key}", value)
    return tensors, {"groups": groups, "numbers": numbers}


def prepare_optimizers(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    saved: Mapping[str, Any],
    names: Iterable[str],
) -> dict[str, Tensor]:
    """Restore all of the optimizers' values but tensors; return the tensors to load into, by name.

    An optimizer creates its state in its first step, so a step with zero gradients and a learning
    rate of 0 is made here. State that was not saved, such as of experts that never got a token, is
    removed.
    """
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = list(_groups(optimizers))
    here = [[_name(named, parameter) for parameter in group["params"]] for group in groups]
    there = [group["params"] for group in saved["groups"]]
    if here != there:
        odd = sorted({n for group in here for n in group} ^ {n for group in there for n in group})
        what = f"{odd[0]} is in only one of them" if odd else "parameters are grouped differently"
        raise ValueError(
            f"the checkpoint does not fit the optimizer: {len(there)} parameter group(s) were "
            f"saved, the optimizer has {len(here)}; {what}"
        )
    kept = {name.removeprefix("optimizer/").rpartition("/")[0] for name in names}
    kept |= saved["numbers"].keys()
    for optimizer in optimizers:
        _make_state(optimizer, [p for p in _parameters(optimizer) if named[id(p)] in kept])
        for parameter in list(optimizer.state):
            if named[id(parameter)] not in kept:
                del optimizer.state[parameter]
        for parameter, state in optimizer.state.items():
            state.update(saved["numbers"].get(named[id(parameter)], {}))
    for group, values in zip(groups, (one["values"] for one in saved["groups"]), strict=True):
        for key, value in values.items():
            _set(group, key, value)
    tensors, _ = optimizer_state(model, optimizers)
    return tensors


def _make_state(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    if all(parameter in optimizer.state for parameter in parameters):
        return
    gradients = {parameter: parameter.grad for parameter in _parameters(optimizer)}
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in gradients:
        parameter.grad = None
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _groups(optimizers: Sequence[Optimizer]) -> Iterable[dict[str, Any]]:
    return (group for optimizer in optimizers for group in optimizer.param_groups)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _name(names: Mapping[int, str], parameter: Tensor) -> str:
    if id(parameter) not in names:
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the "
            "model's; create the optimizer after parallel.shard, from model.parameters()"
        )
    return names[id(parameter)]


def _require_whole(what: str, value: Tensor, parameter: Tensor) -> None:
    sharded = isinstance(parameter, DTensor) and value.ndim > 0
    if sharded and not isinstance(value, DTensor) and value.shape != parameter.shape:
        raise ValueError(
            f"{what} is a plain tensor of shape {tuple(value.shape)}, this rank's part of the "
            f"state of a sharded parameter of shape {tuple(parameter.shape)}; make it a DTensor"
        )


def _plain(what: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.ndim == 0:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(what, one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"the optimizer's {what} is a {type(value).__name__}, which cannot be saved; expected a "
        "number, a string, a scalar tensor, a list of these, or None"
    )


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    now = group.get(key)
    if isinstance(now, Tensor):
        now.fill_(value)
    else:
        group[key] = tuple(value) if isinstance(now, tuple) else value
