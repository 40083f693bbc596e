"""Logprobs, entropies and top tokens from hidden states, without materializing the logits.

The logits ``[t, v]`` are the largest tensor of a training step. Here they are computed tile by tile
(a chunk of tokens by a block of the vocabulary), and recomputed in the backward pass. The forward
pass saves three numbers per token: the highest logit, and two sums for the normalizer and the
entropy. Blocks of the vocabulary are the outer loop, so each block of the weight's gradient is
completed before the next one begins.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from primerl._common.host_memory import together, true_rows
from primerl.loss.arguments import checked
from primerl.loss.linear_head_tiles import (
    CHUNK_TOKENS,
    add_product,
    add_statistics,
    as_columns,
    gradient,
    logits,
    places,
    slices,
    tile_shape,
    wide,
)


@checked()
def linear_logprobs(
    hidden: Float[Tensor, "t h"],
    weight: Float[Tensor, "v h"],
    labels: Int[Tensor, " t"],
    *,
    temperature: float | Tensor = 1.0,
    rows: Bool[Tensor, " t"] | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Float[Tensor, " t"], Float[Tensor, " t"]]:
    """The logprob of each label, and the entropy of the distribution that it was drawn from.

    With ``p = softmax(hidden @ weight.T / temperature)``, these are ``log p[labels]`` and
    ``-sum p log p`` in nats. Both are ``[t]`` and differentiable with respect to ``hidden`` and
    ``weight``. The extra memory is a few tiles of logits, the two gradients, and the gradient of
    ``hidden`` in float32. Products are computed in the dtype of ``hidden``, everything else in at
    least float32.

    Args:
        hidden: the last hidden states.
        weight: the weight of the output head, or the tied embedding, in the dtype of ``hidden``.
        labels: integers in ``0 .. v - 1`` (any values where ``rows`` is false).
        temperature: divides the logits: one number for all rows, or ``[t]``. It gets no gradient.
        rows: the rows to compute. The others give 0, without gradient, and their hidden states are
            not read. None selects all rows.
        chunk_tokens: the maximum number of rows to compute at once.

    Raises:
        ValueError: a shape or dtype does not match the others, a selected label is outside the
            vocabulary, ``temperature`` is not finite and above 0, or ``chunk_tokens`` is below 1.
    """
    _check_head(hidden, weight, chunk_tokens)
    check_values(labels, temperature, rows, vocabulary=len(weight))
    return head_logprobs(hidden, weight, labels, temperature, rows, chunk_tokens)


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    rows: Tensor | None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """``linear_logprobs`` without its checks of arguments; labels may also be ``[t, c]``."""
    hidden, weight, labels, divisor, chosen = _operands(hidden, weight, labels, temperature, rows)
    logprobs, entropy = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, as_columns(labels).contiguous(), divisor, chunk_tokens
    )
    logprobs = logprobs.view(labels.shape)
    return in_place(logprobs, rows, chosen), in_place(entropy, rows, chosen)


@torch.no_grad()
def head_top_k(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    k: int,
    temperature: float | Tensor,
    rows: Tensor | None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each label's logprob ``[t]``, the k likeliest tokens and their logprobs, both ``[t, k]``.

    The arguments are those of ``head_logprobs``, and are not checked. No result has a gradient.
    """
    hidden, weight, labels, divisor, chosen = _operands(hidden, weight, labels, temperature, rows)
    dtype = wide(hidden.dtype)
    logprobs = hidden.new_zeros(len(hidden), dtype=dtype)
    top_logprobs = hidden.new_zeros(len(hidden), k, dtype=dtype)
    top_ids = labels.new_zeros(len(hidden), k, dtype=torch.int64)
    tokens, block = tile_shape(hidden, chunk_tokens)
    for part in slices(len(hidden), tokens):
        label = logprobs.new_zeros(part.stop - part.start)
        total = torch.full_like(label, -torch.inf)
        best, ids = label.new_zeros(len(label), 0), top_ids.new_zeros(len(label), 0)
        for columns in slices(len(weight), block):
            z = logits(hidden, weight, part, columns)
            if divisor is not None:
                z.div_(as_columns(divisor[part]))
            place, inside = places(as_columns(labels[part]), columns.start, z.shape[1])
            label += z.gather(1, place).where(inside, 0.0).squeeze(1)
            total = torch.logaddexp(total, z.logsumexp(1))
            found, where = z.topk(min(k, z.shape[1]))
            best, ids = torch.cat([best, found], 1), torch.cat([ids, where + columns.start], 1)
            best, order = best.topk(min(k, best.shape[1]))
            ids = ids.gather(1, order)
        logprobs[part], top_ids[part] = label - total, ids
        top_logprobs[part] = best - as_columns(total)
    return (
        in_place(logprobs, rows, chosen),
        in_place(top_ids, rows, chosen),
        in_place(top_logprobs, rows, chosen),
    )


def _operands(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    rows: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Hidden states, weight, labels, divisors (if any) and indices (or None) of selected rows."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:  # as for F.linear
        hidden, weight = (x.to(torch.get_autocast_dtype(device)) for x in (hidden, weight))
    divisor = None
    if isinstance(temperature, Tensor) or temperature != 1:
        divisor = torch.as_tensor(temperature, dtype=wide(hidden.dtype), device=hidden.device)
        divisor = divisor.detach().expand(hidden.shape[:1]).contiguous()
    if rows is None:
        return hidden, weight, labels, divisor, None
    chosen = true_rows(rows)
    hidden, labels = hidden.index_select(0, chosen), labels.index_select(0, chosen)
    divisor = None if divisor is None else divisor.index_select(0, chosen)
    return hidden, weight, labels, divisor, chosen


def in_place(values: Tensor, rows: Tensor | None, chosen: Tensor | None) -> Tensor:
    """Scatter the values of the chosen rows into a tensor of all rows, zero elsewhere."""
    if rows is None or chosen is None:
        return values
    return values.new_zeros(len(rows), *values.shape[1:]).index_copy(0, chosen, values)


class _LinearLogprobs(torch.autograd.Function):
    """Logprobs of labels ``[t, c]`` and entropies ``[t]``, tile by tile (see the module)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        divisor: Tensor | None,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        # For each row, over the blocks so far: the highest logit m, sum e^(z-m),
        # sum (z-m) e^(z-m), and the logits of its labels.
        lowest, dtype = torch.finfo(torch.float32).min, wide(hidden.dtype)
        highest = hidden.new_full(hidden.shape[:1], lowest, dtype=dtype)
        total, weighted = torch.zeros_like(highest), torch.zeros_like(highest)
        chosen = hidden.new_zeros(labels.shape, dtype=dtype)
        tokens, block = tile_shape(hidden, chunk_tokens)
        for columns in slices(len(weight), block):
            for rows in slices(len(hidden), tokens):
                add_statistics(
                    logits(hidden, weight, rows, columns),
                    None if divisor is None else divisor[rows],
                    labels[rows],
                    columns.start,
                    *(highest[rows], total[rows], weighted[rows], chosen[rows]),
                )
        ctx.save_for_backward(hidden, weight, labels, divisor, highest, total, weighted)
        ctx.chunk_tokens = chunk_tokens
        ctx.set_materialize_grads(False)
        logprobs = chosen - as_columns(highest) - as_columns(total.log())
        return logprobs, total.log() - weighted / total

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, labels, divisor, highest, total, weighted = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = hidden.new_empty(hidden.shape, dtype=highest.dtype) if wants_hidden else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        a, b, c = _coefficients(grad_logprobs, grad_entropy, divisor, total, weighted)
        tokens, block = tile_shape(hidden, ctx.chunk_tokens)
        kept = hidden.dtype if len(hidden) <= tokens else highest.dtype  # one product: no sum
        for columns in slices(len(weight), block):
            part = None if grad_weight is None else grad_weight[columns]
            if part is not None and part.dtype != kept:
                part = part.new_empty(part.shape, dtype=kept)
            for rows in slices(len(hidden), tokens):
                g = gradient(
                    logits(hidden, weight, rows, columns),
                    None if divisor is None else divisor[rows],
                    labels[rows],
                    columns.start,
                    highest[rows],
                    *(None if a is None else a[rows], b[rows], None if c is None else c[rows]),
                    hidden.dtype,
                )
                if grad_hidden is not None:
                    add_product(grad_hidden[rows], g, weight[columns], first=columns.start == 0)
                if part is not None:
                    add_product(part, g.t(), hidden[rows], first=rows.start == 0)
                del g  # before the next tile is made
            if grad_weight is not None and part is not None and part.dtype != grad_weight.dtype:
                grad_weight[columns] = part
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None


def _coefficients(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    divisor: Tensor | None,
    total: Tensor,
    weighted: Tensor,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Coefficients a, b and c of the gradient of the logits.

    The gradient of a row's logit j is ``sum_i a_i [j = label_i] + e^(z_j - m) (b + c (z_j - m))``.
    This follows from d log p_label / dz_j = [j = label] - p_j and dH / dz_j = -p_j (log p_j + H),
    where log p_j = z_j - m - log total and H = log total - weighted / total. ``a`` is ``[t, c]``,
    ``b`` and ``c`` are ``[t]``. ``a`` is None if the logprobs have no gradient, ``c`` if the
    entropy has none.
    """
    a, h = grad_logprobs, grad_entropy
    if divisor is not None:
        a, h = None if a is None else a / as_columns(divisor), None if h is None else h / divisor
    a = None if a is None else a.contiguous()  # the gradient of a sum is one number, expanded
    all_labels = torch.zeros_like(total) if a is None else a.sum(1)
    if h is None:
        return a, -all_labels / total, None
    return a, (h * weighted / total - all_labels) / total, -h / total


def _check_head(hidden: Tensor, weight: Tensor, chunk_tokens: int) -> None:
    if isinstance(weight, DTensor):
        raise ValueError(
            "weight is sharded; use model_logprobs, which gathers it in the forward pass, or pass "
            "weight.full_tensor()"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden has dtype {hidden.dtype}, but weight {weight.dtype}; expected the same dtype"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; expected 1 or more")


def check_values(
    labels: Tensor,
    temperature: float | Tensor,
    rows: Tensor | None,
    *,
    vocabulary: int,
    name: str = "labels",
) -> None:
    """Refuse labels outside the vocabulary and unusable temperatures, in the selected rows.

    Labels are ``[t]`` or ``[t, c]``; ``name`` is the name of the caller's argument in errors.
    """
    if not isinstance(temperature, int | float | Tensor):
        kind = type(temperature).__name__
        raise ValueError(f"temperature is of type {kind}, expected a number or a torch tensor")
    divisor = torch.as_tensor(temperature)
    if divisor.ndim and divisor.shape != labels.shape[:1]:
        raise ValueError(
            f"temperature has shape {tuple(divisor.shape)}, but {name} has shape "
            f"{tuple(labels.shape)}: expected a number, or [t]"
        )
    if rows is None:
        labels, divisor = together(labels, divisor)
    else:
        labels, divisor, rows = together(labels, divisor, rows)
    outside = (labels < 0) | (labels >= vocabulary)
    unusable = ~((divisor > 0) & divisor.isfinite())
    if rows is not None:
        outside = outside & (rows if labels.ndim == 1 else as_columns(rows))
        unusable = unusable & rows if divisor.ndim else unusable
    if outside.any():
        place = tuple(outside.nonzero()[0].tolist())
        raise ValueError(
            f"{name}[{', '.join(map(str, place))}] is {int(labels[place])}, outside the vocabulary "
            f"of {vocabulary} tokens; expected a token id in each selected row"
        )
    if unusable.any():
        first = float(divisor[unusable].flatten()[0])
        raise ValueError(f"temperature is {first}; expected finite values above 0")
