"""Token dispatch to experts with the DeepEP library, over NVLink and RDMA."""

import importlib
import inspect
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from primerl.parallel.expert_parallel.dispatch import Compute

INSTALL = (
    "build it from https://github.com/deepseek-ai/DeepEP (see docs/parallel.md); packages with "
    "similar names on PyPI are placeholders"
)
# The methods of deep_ep.Buffer that this module calls, with the arguments that it passes.
SIGNATURES = {
    "get_dispatch_layout": ["topk_idx", "num_experts"],
    "dispatch": [
        *["x", "handle", "num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank"],
        *["num_tokens_per_expert", "topk_idx", "topk_weights"],
    ],
    "combine": ["x", "handle", "topk_weights"],
}


class DeepEP:
    """``Dispatch`` with DeepEP's kernels (https://github.com/deepseek-ai/DeepEP), for GPUs.

        parallel.shard(model, mesh, dispatch=parallel.DeepEP)

    A token is sent once to each rank that holds any of its experts. That rank computes the weighted
    sum of their outputs and sends back only the sum, so fewer bytes are sent than by ``AllToAll``.

    Args:
        experts: total number of experts on all ranks.
        group: the NCCL group of the ranks that hold the experts.

    Raises:
        ImportError: DeepEP is not installed.
        ValueError: ``group`` is None, or the installed version has a different interface.
    """

    def __init__(self, experts: int, group: dist.ProcessGroup | None) -> None:
        self._library: Any = _library()
        if group is None:
            raise ValueError("DeepEP needs several ranks per expert group; use a mesh with ep > 1")
        self.experts = experts
        self.group = group
        self._buffer: Any = None

    def __call__(
        self,
        hidden: Float[Tensor, "t h"],
        indices: Int[Tensor, "t k"],
        weights: Float[Tensor, "t k"],
        compute: Compute,
    ) -> Float[Tensor, "t h"]:
        """Dispatch tokens, compute, and combine the experts' outputs."""
        buffer = self._buffer_for(hidden)
        arrived, local, local_weights, counts, handle = _Dispatch.apply(  # type: ignore[no-untyped-call]
            hidden, weights.float(), indices, self.experts, buffer
        )
        choices = local.reshape(-1)
        # Choices of other ranks' experts (-1) sort last. Slice by counts, which are on the host.
        ours = torch.argsort(choices.where(choices >= 0, self.experts), stable=True)
        ours = ours[: sum(counts)]
        rows = ours // local.shape[1]
        per_expert = torch.tensor(counts, device=hidden.device)
        outputs = compute(arrived[rows], per_expert)
        weighted = outputs * local_weights.reshape(-1)[ours].unsqueeze(-1).to(outputs.dtype)
        mixed = torch.zeros_like(arrived).index_add(0, rows, weighted.to(arrived.dtype))
        combined: Tensor = _Combine.apply(mixed, handle, buffer)  # type: ignore[no-untyped-call]
        return combined

    def _buffer_for(self, hidden: Tensor) -> Any:
        """Return the buffer; it is created at the first call, when the token size is known."""
        if self._buffer is None:
            token = hidden.shape[1] * max(hidden.element_size(), 2)
            ranks = dist.get_world_size(self.group)
            make = self._library.Buffer
            configs = [make.get_dispatch_config(ranks), make.get_combine_config(ranks)]
            nvlink = max(c.get_nvl_buffer_size_hint(token, ranks) for c in configs)
            rdma = max(c.get_rdma_buffer_size_hint(token, ranks) for c in configs)
            self._buffer = make(self.group, nvlink, rdma)
        return self._buffer


def _library() -> Any:
    try:
        library = importlib.import_module("deep_ep")
    except ImportError as error:
        raise ImportError(f"DeepEP is not installed: {INSTALL}") from error
    buffer = getattr(library, "Buffer", None)
    for method, needed in SIGNATURES.items():
        function = getattr(buffer, method, None)
        has = inspect.signature(function).parameters if function is not None else {}
        missing = [name for name in needed if name not in has]
        if function is None or missing:
            raise ValueError(
                f"the installed deep_ep has no Buffer.{method} with {', '.join(missing)}: it is an "
                f"unsupported version, or a placeholder; {INSTALL}"
            )
    return library


class _Dispatch(torch.autograd.Function):
    """Dispatch of tokens; the backward pass combines their gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weights: Tensor, indices: Tensor, experts: int, buffer: Any
    ) -> tuple[Any, ...]:
        per_rank, per_node, per_expert, goes_to, _ = buffer.get_dispatch_layout(indices, experts)
        arrived, local, local_weights, counts, handle, _ = buffer.dispatch(
            hidden,
            topk_idx=indices,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=goes_to,
            num_tokens_per_expert=per_expert,
        )
        ctx.buffer, ctx.handle, ctx.weights_dtype = buffer, handle, weights.dtype
        ctx.mark_non_differentiable(local)
        return arrived, local, local_weights, counts, handle

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None, None, None]:
        tokens, _, token_weights, *_ = gradients
        hidden, weights, _ = ctx.buffer.combine(
            tokens.contiguous(), ctx.handle, topk_weights=token_weights.float()
        )
        return hidden, weights.to(ctx.weights_dtype), None, None, None


class _Combine(torch.autograd.Function):
    """Combination of outputs; the backward pass dispatches their gradients."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, handle: Any, buffer: Any) -> Tensor:
        ctx.handle, ctx.buffer = handle, buffer
        combined: Tensor = buffer.combine(mixed, handle)[0]
        return combined

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.buffer.dispatch(gradient.contiguous(), handle=ctx.handle)[0], None, None
