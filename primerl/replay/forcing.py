"""Forcing of recorded experts in the routers of an unmodified model, with counts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from primerl._common.forward_passes import PassTotal, is_compiled, recomputes, recomputing
from primerl.replay.recorder import ExpertLayer, chosen_experts, expert_layers


class RouteCounts:
    """Counts of (token, layer) pairs whose routes were replayed, summed over forward passes.

        counts = replay.RouteCounts()
        for batch, rows in replay.fetch(batches):
            with replay.forced(model, rows, counts=counts):
                ...
        metrics |= counts.summary(parallel.all_sum)

    Each forward pass counts once, even if activations are recomputed.
    """

    def __init__(self) -> None:
        self._total = PassTotal()
        self._lost = 0

    def add_lost(self) -> None:
        """Count a sample whose recorded routes are missing or damaged."""
        self._lost += 1

    def add(self, recorded: Tensor, differing: Tensor) -> None:
        """Count one layer's tokens: those with recorded experts, and those where they differ."""
        numbers = [recorded.new_tensor(recorded.numel(), dtype=torch.int64)]
        self._total.add(torch.stack([*numbers, recorded.sum(), differing.sum()]))

    def summary(
        self,
        all_sum: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
    ) -> dict[str, float]:
        """Return metrics since the last summary; empty if nothing was replayed.

        ``routes_differ``: the share of all (token, layer) pairs for which the router would have
        chosen other experts than those recorded. ``routes_missing``: the share for which no experts
        were recorded, so that the router chose. ``routes_lost``: the number of samples whose
        recorded routes were missing or damaged, summed over the ranks that needed them.

        Args:
            all_sum: sums tensors over ranks: ``parallel.all_sum``.
        """
        total = self._total.take()
        here = torch.zeros(3, dtype=torch.int64) if total is None else total.cpu()
        lost, self._lost = self._lost, 0
        numbers = all_sum({"routes": torch.cat([here, torch.tensor([lost])])})["routes"].tolist()
        pairs, recorded, differing, lost = (int(number) for number in numbers)
        if pairs == 0:
            return {"routes_lost": lost} if lost else {}
        return {
            "routes_differ": differing / pairs,
            "routes_missing": 1 - recorded / pairs,
            "routes_lost": lost,
        }


_TOP_K = (torch.topk, Tensor.topk)


@contextmanager
def forced(
    model: nn.Module,
    rows: Int[Tensor, "t layers k"] | None,
    *,
    counts: RouteCounts | None = None,
) -> Iterator[None]:
    """Route each token to the experts that were recorded for it, forward and backward.

        with replay.forced(model, rows):
            logprobs = loss.model_logprobs(model, ...)
            ...
            objective.backward()

    A router ends in ``topk`` over the scores of all experts. The result of ``topk`` is replaced by
    the recorded experts and the router's scores for them, from which the model's code computes
    expert weights, with gradients to the router. The result is kept, bit for bit, for tokens whose
    experts were not recorded (-1) and for tokens whose recorded experts the router has chosen
    itself. The order of a token's experts has no meaning.

    This works with expert, context and fully sharded data parallelism (each rank forces the rows of
    its own tokens), packed documents, shared prefixes and recomputed activations. With recomputed
    activations, the backward pass must run in the body too. Compiled layers are refused, because
    compiled code does not see hooks that are added later. The hooks are removed at the end; the
    model is not changed otherwise.

    Args:
        model: a ``transformers`` model with routed experts.
        rows: routes of the tokens of each forward pass in the body, as ``fetch`` and ``capture``
            return them. None forces nothing.
        counts: counts replayed, differing and missing routes.

    Raises:
        ValueError: the rows are of another model or another number of tokens, or hold an expert
            that the layer doesn't have, or an expert twice. The message names layer and tokens.
        RuntimeError: a router can't be forced, because it does not choose by ``topk`` or its hooks
            did not run; or recomputation is left for after the body. Raised at the end of the
            body, so before the optimizer's step.
    """
    if rows is None:
        yield
        return
    layers = expert_layers(model)
    _refuse_compiled(model)
    ordered = _ordered(rows, layers)
    routers = [
        _ForcedRouter(layer, _LayerRoutes(layer, rows[:, place], ordered[:, place]), counts)
        for place, layer in enumerate(layers)
    ]
    passes = _Passes()
    hooks = [model.register_forward_pre_hook(passes.begin)]
    for router in routers:
        hooks += router.attach()
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for router in routers:
        router.check(passes)
    if passes.to_recompute and not any(router.recomputed for router in routers):
        raise RuntimeError(
            "activations are recomputed in the backward pass, which did not run within `with "
            "replay.forced(...)`; outside, the recorded routes would not be forced. Call "
            "backward() in the body, or run the model under torch.no_grad()"
        )


class _Passes:
    """A counter of the forward passes of a model in the body of ``forced``."""

    def __init__(self) -> None:
        self.count = 0
        self.to_recompute = False

    def begin(self, model: Any, _args: Any) -> None:
        self.count += 1
        if torch.is_grad_enabled() and model.training:
            self.to_recompute |= recomputes(model)


class _LayerRoutes:
    """The recorded experts of one layer, ``[t, k]``, in recorded order and sorted by id."""

    def __init__(self, layer: ExpertLayer, rows: Tensor, ordered: Tensor) -> None:
        device = next(layer.experts.parameters()).device
        self.rows = rows.to(device, torch.long)
        self.recorded = self.rows[:, 0] >= 0
        self._ordered = ordered.to(device, torch.long)

    def differ(self, chosen: Tensor) -> Tensor:
        """Return a mask of tokens whose recorded experts are not the set ``chosen``."""
        same = (chosen.sort(-1).values == self._ordered).all(-1)
        return self.recorded & ~same


class _ForcedRouter:
    """Forces the experts of one layer."""

    def __init__(
        self, layer: ExpertLayer, routes: _LayerRoutes, counts: RouteCounts | None
    ) -> None:
        self.layer = layer
        self.recomputed = False
        self._routes = routes
        self._counts = counts
        self._passes = 0
        self._entered = ExitStack()
        """Holds the mode that replaces ``topk`` between the block's start and its experts."""
        self._top_k: _ForcedTopK | None = None
        self._wrong: list[tuple[Tensor, bool]] = []
        """Per pass: whether other experts were reached, and whether ``topk`` was replaced."""

    def attach(self) -> list[Any]:
        return [
            self.layer.block.register_forward_pre_hook(self._begin),
            self.layer.experts.register_forward_pre_hook(self._end, with_kwargs=True),
            self.layer.block.register_forward_hook(self._leave, always_call=True),
        ]

    def check(self, passes: _Passes) -> None:
        """Check that the forced routes reached the experts in every forward pass."""
        name = self.layer.name
        if self._passes < passes.count:
            raise RuntimeError(
                f"{name} ran {self._passes} times in {passes.count} forward passes, so its routes "
                "were not forced; was its block replaced or compiled?"
            )
        for wrong, seen in self._wrong:
            if wrong.item() and seen:
                raise RuntimeError(
                    f"{name} ran other experts than those that were forced: its block changes the "
                    "result of topk, so its routes can't be replayed"
                )
            if wrong.item():
                raise RuntimeError(
                    f"{name} can't be forced: it does not choose experts by topk over the scores "
                    f"of {self.layer.count} experts"
                )

    def _begin(self, _block: nn.Module, _args: Any) -> None:
        self._top_k = _ForcedTopK(self.layer, self._routes)
        self._entered.enter_context(self._top_k)

    def _end(self, _experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._entered.close()
        top_k, self._top_k = self._top_k, None
        if top_k is None:
            return  # called outside its block, which check() reports
        if recomputing():
            self.recomputed = True
            return
        self._passes += 1
        reached = chosen_experts(args, kwargs).detach()
        reached = reached.reshape(-1, reached.shape[-1])
        rows = self._routes.rows
        if reached.shape != rows.shape:
            raise ValueError(
                f"{self.layer.name} sends {reached.shape[0]} tokens to {reached.shape[1]} experts "
                f"each, but the routes have {rows.shape[0]} rows of {rows.shape[1]}"
            )
        wrong = self._routes.differ(reached)
        seen = top_k.forced is not None
        self._wrong.append((wrong.any(), seen))
        if self._counts is not None:
            forced = wrong if top_k.forced is None else top_k.forced
            self._counts.add(self._routes.recorded, forced)

    def _leave(self, _block: nn.Module, _args: Any, _output: Any) -> None:
        """Remove the mode after the block, even if the block raised."""
        self._entered.close()


class _ForcedTopK(TorchFunctionMode):
    """A function mode that replaces the result of ``topk`` over a layer's experts."""

    def __init__(self, layer: ExpertLayer, routes: _LayerRoutes) -> None:
        super().__init__()
        self.forced: Tensor | None = None
        """Mask of the tokens replaced by the last ``topk`` over experts; None before the first."""
        self._layer = layer
        self._routes = routes

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in _TOP_K:
            return result
        scores = args[0] if args else kwargs["input"]
        chosen: Tensor = result[1]
        rows = self._routes.rows
        k = rows.shape[1]
        if scores.shape[-1] != self._layer.count or chosen.shape[-1] != k:
            return result  # a topk over groups of experts, or over keys
        if chosen.numel() != rows.numel():
            raise ValueError(
                f"{self._layer.name} routes {chosen.numel() // k} tokens, but the routes have "
                f"{len(rows)} rows"
            )
        own = chosen.detach().reshape(-1, k)
        self.forced = self._routes.differ(own)
        indices = torch.where(self.forced[:, None], rows, own).view(chosen.shape)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if is_compiled(module):
            raise ValueError(
                f"{name or 'the model'} is compiled, so routes can't be forced: compiled code does "
                "not run hooks that are added later. Train without torch.compile"
            )


def _ordered(rows: Tensor, layers: Sequence[ExpertLayer]) -> Tensor:
    """Sort each set of experts, and check that the rows fit these layers."""
    fits = rows.ndim == 3 and rows.shape[1] == len(layers) and rows.shape[2] > 0
    if not fits or rows.is_floating_point():
        raise ValueError(
            f"rows is {rows.dtype} of shape {tuple(rows.shape)}; expected integers [t, layers, k] "
            f"for the {len(layers)} layers with experts, {layers[0].name} to {layers[-1].name}"
        )
    counts = torch.tensor([layer.count for layer in layers], device=rows.device)
    ordered = rows.sort(-1).values
    lowest, highest = ordered[..., 0], ordered[..., -1]
    repeated = ordered[..., 1:] == ordered[..., :-1]
    faults = {
        "experts that it does not have": (lowest < -1) | (highest >= counts),
        "some experts, and -1 for others": (lowest < 0) & (highest >= 0),
        "an expert twice": (repeated & (ordered[..., 1:] >= 0)).any(-1),
    }
    for what, where in faults.items():
        if where.any():
            place = int(where.any(0).nonzero()[0])
            tokens = where[:, place].nonzero()[:, 0]
            raise ValueError(
                f"{layers[place].name} is to be forced to {what}, in {len(tokens)} tokens from "
                f"token {int(tokens[0])} to {int(tokens[-1])}: {rows[tokens[0], place].tolist()} "
                f"of {layers[place].count} experts"
            )
    return ordered
