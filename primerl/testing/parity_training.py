"""A few steps of training on packed documents, by this library or by plain Hugging Face code."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from primerl import loss, parallel
from primerl.packing import PackedBatch
from primerl.parallel.experts import expert_modules

LENGTHS = ((7, 5, 20), (16, 16), (3, 9, 11, 9), (31, 1))
"""Of the documents of each micro-batch: 32 rows, which two or four context peers can share."""
ROWS = 32
STEPS = 3
MAX_NORM = 1.0
# eps: a gradient that is 0 but for rounding must not become a step of the size of the others.
ADAMW: dict[str, Any] = {"lr": 3e-4, "eps": 1e-5}


@attrs.frozen(kw_only=True)
class Training:
    """What a few steps of training did."""

    losses: list[float]
    """Of this rank's rows."""
    norms: list[float]
    logprobs: Tensor
    """Of the first step, ``[batches, rows]``; 0 in masked rows, and in rows of other ranks."""
    gradients: dict[str, Tensor]
    """Of the first step, before they are clipped, whole."""
    choices: dict[str, Tensor]
    """The experts of each token, by layer: ``[steps, batches, rows, k]``, sorted; or -1."""
    parameters: dict[str, Tensor]
    """After the last step, whole."""


def micro_batches(vocabulary: int, *, special: Sequence[int] = ()) -> list[PackedBatch]:
    """Packed documents of random tokens; ``versions`` numbers their rows through."""
    generator = torch.Generator().manual_seed(0)
    ordinary = torch.tensor([token for token in range(vocabulary) if token not in special])
    made = []
    for index, lengths in enumerate(LENGTHS):
        ends = torch.tensor(lengths).cumsum(0)
        tokens = ordinary[torch.randint(len(ordinary), (ROWS,), generator=generator)]
        mask = torch.ones(ROWS, dtype=torch.bool)
        mask[ends - 1] = False
        made.append(
            PackedBatch(
                token_ids=tokens,
                position_ids=torch.cat([torch.arange(length) for length in lengths]),
                cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32),
                labels=tokens.roll(-1),
                loss_mask=mask,
                behavior_logprobs=torch.zeros(ROWS),
                advantages=mask.float(),
                versions=torch.arange(index * ROWS, (index + 1) * ROWS, dtype=torch.int32),
                temperature=torch.ones(ROWS),
                sequence_ids=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
            )
        )
    return made


def each_alone(model: Any, batch: PackedBatch) -> Tensor:
    """The logprobs of a pack's labels, each document computed alone by the model as it is."""
    bounds = batch.cu_seqlens.tolist()
    parts = []
    for begin, end in pairwise(bounds):
        logits = model(input_ids=batch.token_ids[None, begin:end], use_cache=False).logits[0]
        log_p = logits.float().log_softmax(-1)
        parts.append(log_p.gather(1, batch.labels[begin:end, None]).squeeze(1))
    return torch.cat(parts) * batch.loss_mask


def packed(model: nn.Module, batch: PackedBatch) -> Tensor:
    """The same by this library: of this rank's rows."""
    return loss.model_logprobs(
        model, batch.token_ids, batch.position_ids, batch.labels, rows=batch.loss_mask
    )


def train(
    model: nn.Module,
    batches: Sequence[PackedBatch],
    logprobs_of: Callable[[Any, PackedBatch], Tensor],
    *,
    trained: int,
    steps: int = STEPS,
) -> Training:
    """A few steps of AdamW on the mean negative logprob of all trained tokens.

    Args:
        model: sharded or not.
        batches: this rank's.
        logprobs_of: ``each_alone`` or ``packed``.
        trained: how many tokens all ranks train.
        steps: how many.
    """
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, norms, gradients = [], [], {}
    logprobs = torch.zeros(len(LENGTHS) * ROWS)
    chosen: dict[str, Tensor] = {}
    for step in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            rows = batch.versions.long()
            real = rows >= 0  # the others are there to fill up ranks
            with _recorded(model) as choices:
                of_rows = logprobs_of(model, batch)
            for name, parts in choices.items():
                # The last: a model that turns out to need its logits runs a second time.
                ids = torch.cat(parts)[-len(rows) :].sort(-1).values
                blank = torch.full((steps, len(LENGTHS) * ROWS, ids.shape[1]), -1)
                chosen.setdefault(name, blank)[step, rows[real]] = ids[real].to(torch.int64)
            if step == 0:
                logprobs[rows[real]] = of_rows.detach()[real]
            mean = -of_rows.sum() / trained
            mean.backward()  # type: ignore[no-untyped-call]
            total += mean.detach().double()
        if step == 0:
            gradients = {n: whole(p.grad).clone() for n, p in model.named_parameters()
                         if p.grad is not None}  # fmt: skip
        norms.append(parallel.clip_gradients(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return Training(
        losses=losses,
        norms=norms,
        logprobs=logprobs,
        gradients=gradients,
        choices=chosen,
        parameters={n: whole(p.detach()).clone() for n, p in model.named_parameters()},
    )


def shares(batches: Sequence[PackedBatch], ranks: int) -> list[list[PackedBatch]]:
    """Equally many micro-batches for each rank, some perhaps without a row to train."""
    none = torch.zeros_like(batches[0].loss_mask)
    blank = attrs.evolve(
        batches[0], loss_mask=none, advantages=none.float(), versions=none.int() - 1
    )
    padded = [*batches, *[blank] * (-len(batches) % ranks)]
    return [padded[index::ranks] for index in range(ranks)]


def batches_of(model: Any) -> list[PackedBatch]:
    """Micro-batches for a model: tokens that mean something else to it are left out."""
    config = model.config.get_text_config(decoder=True)
    special: set[int] = set()
    for name, value in config.to_dict().items():
        if name.endswith("token_id") and value is not None:
            special.update(value if isinstance(value, list) else [value])
    return micro_batches(config.vocab_size, special=sorted(special))


def tokens_of(batches: Sequence[PackedBatch]) -> int:
    """How many tokens are trained."""
    return sum(int(batch.loss_mask.sum()) for batch in batches)


def whole(tensor: Tensor) -> Tensor:
    """A tensor, gathered where it is sharded; then every rank calls this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """The experts that each layer's router chose, while the model runs forward."""
    choices: dict[str, list[Tensor]] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001
            indices = [x for x in (*args, *kwargs.values()) if _are_indices(x)]
            choices.setdefault(name, []).append(indices[0].detach().clone())

        return hook

    hooks = [
        module.register_forward_pre_hook(record(name), with_kwargs=True)
        for name, module in expert_modules(model).items()
    ]
    try:
        yield choices
    finally:
        for hook in hooks:
            hook.remove()


def _are_indices(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 2 and not x.is_floating_point()
