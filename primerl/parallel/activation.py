"""Activation checkpointing, full or selective, with optional offloading to host memory."""

import functools
import inspect
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from primerl._common.forward_passes import is_compiled, place_on_host, recomputation_method
from primerl._common.supported_adapters import refuse_virtual_tokens

M = TypeVar("M", bound=nn.Module)

ORDER = "recompute -> shard -> compile"
# Operations whose results selective checkpointing saves: matrix products, attention, communication
# between ranks, and the choice of experts.
KEPT_OPERATIONS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_grouped_mm",
        "aten::topk",
    }
)
KEPT_PREFIXES = (
    "aten::_scaled_dot_product_",
    "aten::_flash_attention_",
    "aten::_efficient_attention_",
    "torch_attn::",
    "flash_attn",
    "_c10d_functional::",
    "primerl::",
)
SMALLEST_OFFLOADED = 2**16
"""Minimum size of an offloaded activation, in bytes; smaller ones stay on the device."""


def recompute(model: M, *, selective: bool = False, every: int = 1, offload: bool = False) -> M:
    """Enable activation checkpointing: recompute each layer in the backward pass.

    Only each layer's input is saved (``transformers``' activation checkpointing). Losses
    and gradients stay bitwise equal. Call it before ``shard``:

        parallel.shard(parallel.recompute(model), mesh)

    Args:
        model: a Hugging Face model in training mode, on any device.
        selective: also save the results of matrix products, attention and communication between
            ranks. This takes more memory and leaves little to recompute. Compiled layers are not
            checkpointed: their compiler chooses what to recompute, and may save more.
        every: checkpoint every n-th layer: 2 recomputes every second layer, 3 every third.
        offload: move layers' inputs, and activations outside layers, to pinned host memory on a
            separate stream, and back before they are needed.

    Raises:
        ValueError: the model is already sharded, is in evaluation mode (where transformers
            does not recompute) or does not support recomputation, or ``every`` is below 1.
    """
    refuse_virtual_tokens(model)
    if every < 1:
        raise ValueError(f"every is {every}, expected at least 1")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(f"the model is already sharded; apply these steps in the order {ORDER}")
    if not model.training:
        raise ValueError(
            "the model is in evaluation mode, where transformers does not recompute activations; "
            "call model.train() first"
        )
    enable = recomputation_method(model)
    if enable is None:
        raise ValueError(
            f"{type(model).__name__} has no activation_checkpointing_enable; expected a "
            "transformers model"
        )
    arguments: dict[str, Any] = {"use_reentrant": False}
    if selective:
        arguments["context_fn"] = _selective_contexts
        if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
            # From torch 2.14 on: keep the saved results on the device, even with ``offload``.
            arguments["respect_saved_tensors_hooks"] = False
    layers = {} if every == 1 else {"every_n_layers": every}
    if layers and "every_n_layers" not in inspect.signature(enable).parameters:
        raise ValueError(f"every is {every}, but this version of transformers only supports 1")
    enable(arguments, **layers)
    if selective:
        model.register_forward_pre_hook(_leave_to_compilers(model))
    if offload:
        _Offloading().attach(model)
    return model


@functools.cache
def _is_kept(operation: Any) -> bool:
    """Whether selective checkpointing saves the results of an operation.

    It does not if the operation writes into a given tensor, as in compiled code: reusing its result
    would leave that tensor unwritten.
    """
    if operation._schema.is_mutable:
        return False
    name: str = operation.name()
    # Overloads may have a suffix: aten::mm.dtype
    return name.partition(".")[0] in KEPT_OPERATIONS or name.startswith(KEPT_PREFIXES)


def _leave_to_compilers(model: nn.Module) -> Callable[..., None]:
    """Return a hook that stops checkpointing of layers once they are compiled.

    Around a compiled layer, checkpointing would run all of its kernels again, products included.
    """
    layers: list[Any] = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]

    def leave(*_: Any) -> None:
        for layer in layers:
            if is_compiled(layer):
                layer.gradient_checkpointing = False

    return leave


def _selective_contexts() -> tuple["_Save", "_Reuse"]:
    """Return the contexts of a layer's forward pass and of its recomputation.

    They do what ``create_selective_checkpoint_contexts`` does, in a third of the host's time: on a
    GPU, many small operations would otherwise wait for the host.
    """
    results: deque[tuple[Any, Any]] = deque()
    return _Save(results), _Reuse(results)


class _Save(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Saves the results of the operations that are not recomputed, in their order."""

    def __init__(self, results: deque[tuple[Any, Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let operations compile their own kernels, as flex attention does."""
        return True

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = operation(*args, **kwargs) if kwargs else operation(*args)
        if _is_kept(operation):
            self._results.append((operation, tree_map_only(Tensor, _SavedResult, found)))
        return found


class _Reuse(_Save):  # type: ignore[no-untyped-call]
    """Returns saved results in place of operations; each once, to free its memory early."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _is_kept(operation):
            return operation(*args, **kwargs) if kwargs else operation(*args)
        if not self._results:
            raise RuntimeError(
                f"{operation} was not saved in the forward pass, or a backward pass has already "
                "used it; selective recomputation allows one backward pass"
            )
        saved, found = self._results.popleft()
        if saved is not operation:
            raise RuntimeError(
                f"the layer recomputes {operation} where its forward pass computed {saved}; "
                "selective recomputation needs the same operations in both"
            )
        return tree_map_only(_SavedResult, _SavedResult.value, found)


class _SavedResult:
    """A saved result, without its graph."""

    def __init__(self, tensor: Tensor) -> None:
        # With this key, the detached tensor shares the version of the original.
        key = torch._C.DispatchKey.ADInplaceOrView
        with torch._C._SetExcludeDispatchKeyGuard(key, False):
            self._tensor = tensor.detach()
        self._version = self._tensor._version

    def value(self) -> Tensor:
        """Return the tensor; raise RuntimeError if it was modified in place."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                "a layer modifies the result of a product or of attention in place; selective "
                "recomputation can't save it: use parallel.recompute(model)"
            )
        return self._tensor


class _Kept:
    """An activation offloaded to host memory."""

    def __init__(self, tensor: Tensor, on_host: Tensor, before: "_Kept | None") -> None:
        self.on_host = on_host
        self.device, self.strides = tensor.device, tensor.stride()
        self.before = before
        """The activation saved before this one; the backward pass needs it next."""
        self.fetched: Tensor | None = None


class _Offloading:
    """Hooks that offload the activations saved by a model's forward pass, and fetch them back."""

    def __init__(self) -> None:
        self._last: _Kept | None = None
        self._stream: torch.cuda.Stream | None = None
        self._entered: list[saved_tensors_hooks] = []

    def attach(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: Any) -> None:
        self._last = None
        hooks = saved_tensors_hooks(self._keep, self._bring_back)
        hooks.__enter__()
        self._entered.append(hooks)

    def _end(self, *_: Any) -> None:
        self._entered.pop().__exit__()
        self._last = None

    def _keep(self, tensor: Tensor) -> Any:
        if not _is_activation(tensor):
            return tensor
        if self._stream is not None and not tensor.is_cuda:  # it is in host memory already
            return tensor
        if tensor.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        on_host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        place_on_host(on_host)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            on_host.copy_(tensor, non_blocking=True)
        if self._stream is not None:
            tensor.record_stream(self._stream)
        self._last = _Kept(tensor, on_host, self._last)
        return self._last

    def _bring_back(self, kept: Any) -> Tensor:
        if not isinstance(kept, _Kept):
            tensor: Tensor = kept
            return tensor
        fetched = kept.fetched if kept.fetched is not None else self._fetch(kept)
        kept.fetched = None
        if self._stream is not None and kept.device.type == "cuda":
            current = torch.cuda.current_stream(kept.device)
            current.wait_stream(self._stream)
            fetched.record_stream(current)
        if kept.before is not None and kept.before.fetched is None:
            kept.before.fetched = self._fetch(kept.before)  # overlaps with the use of ``fetched``
        return fetched

    def _fetch(self, kept: _Kept) -> Tensor:
        like = kept.on_host
        with torch.cuda.stream(self._stream):
            # Keep the original strides: rounding in matrix products may depend on them.
            fetched = like.new_empty_strided(like.shape, kept.strides, device=kept.device)
            return fetched.copy_(like, non_blocking=True)


def _is_activation(tensor: Tensor) -> bool:
    """Whether to offload: a large tensor that is not a parameter, view of one, or expanded."""
    whole = tensor if tensor._base is None else tensor._base
    return (
        not isinstance(tensor, DTensor)
        and not isinstance(whole, nn.Parameter)
        and 0 not in tensor.stride()
        and tensor.nbytes >= SMALLEST_OFFLOADED
    )
