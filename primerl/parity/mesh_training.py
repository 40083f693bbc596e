"""The same training as in ``parity.reference``, by this library: packed, sharded, resumed."""

import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from primerl import checkpoint, loss, optim, parallel
from primerl.packing import PackedBatch, pack
from primerl.parity.reference import (
    BETAS,
    CLIP,
    ENTROPY_BONUS,
    EPS,
    LR,
    MOMENTUM,
    WEIGHT_DECAY,
    Records,
    ReferenceDocument,
    Training,
    documents,
    recorded,
)
from primerl.types import NOT_SAMPLED, TrainingSample

MAX_TOKENS = 48
"""Maximum number of tokens of a micro-batch."""
RESUMED = 2
"""The number of steps after which training is saved and resumed, if ``restart`` is given."""

Restart = Callable[[nn.Module, Optimizer], tuple[nn.Module, Optimizer]]
"""Takes the model and optimizer so far, and returns those that continue."""


def model_documents(model: Any) -> list[ReferenceDocument]:
    """Draw documents for a model, without its special tokens."""
    config = model.config.get_text_config(decoder=True)
    special: set[int] = set()
    for name, value in config.to_dict().items():
        if name.endswith("token_id") and value is not None:
            special.update(value if isinstance(value, list) else [value])
    return documents(config.vocab_size, special=sorted(special))


def make_batches(
    sequences: Sequence[ReferenceDocument], *, ranks: int = 1, share_prefixes: bool = False
) -> list[list[PackedBatch]]:
    """Pack documents into each rank's micro-batches.

    The field ``versions`` holds each token's number over all documents.
    """
    samples, begin = [], 0
    for one in sequences:
        mask, end = np.array(one.trained), begin + len(one.token_ids)
        samples.append(
            TrainingSample(
                token_ids=one.token_ids,
                loss_mask=mask,
                behavior_logprobs=np.where(mask, one.behavior_logprobs, 0.0),
                versions=np.where(mask, np.arange(begin, end), NOT_SAMPLED),
                advantages=np.where(mask, one.advantages, 0.0),
                temperature=one.temperature,
            )
        )
        begin = end
    return pack(samples, max_tokens=MAX_TOKENS, ranks=ranks, share_prefixes=share_prefixes)


def score(model: nn.Module, batch: PackedBatch, *, entropy: bool = True) -> tuple[Tensor, Tensor]:
    """Compute logprobs and entropies of this rank's rows; entropies are 0 unless ``entropy``."""
    arguments = (model, batch.token_ids, batch.position_ids, batch.labels)
    how: dict[str, Any] = {"temperature": batch.temperature, "rows": batch.loss_mask}
    if entropy:
        return loss.model_logprobs_and_entropy(*arguments, **how)
    logprobs = loss.model_logprobs(*arguments, **how)
    return logprobs, torch.zeros_like(logprobs)


def optimizer_for(model: nn.Module, name: str) -> Optimizer:
    """Make ``"adamw"`` or ``"muon"`` with the reference's hyperparameters."""
    shared: dict[str, Any] = {
        "lr": LR,
        "betas": BETAS,
        "eps": EPS,
        "weight_decay": WEIGHT_DECAY,
    }
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), **shared)
    groups = optim.muon_parameters(model)
    # float32, because bfloat16 would round the gradients of the two sides differently.
    return optim.Muon(groups, momentum=MOMENTUM, dtype=torch.float32, **shared)


def train(
    model: nn.Module,
    batches: Sequence[PackedBatch],
    reference: Training,
    *,
    optimizer: Literal["adamw", "muon"] = "adamw",
    restart: Restart | None = None,
    all_sum: Callable[[Any], Tensor] = parallel.all_sum,
) -> Training:
    """Train the same steps as ``reference``.

    Args:
        model: the model, sharded or not.
        batches: this rank's micro-batches.
        reference: the reference results; gradients are clipped to its ``max_norm``.
        optimizer: as in ``optimizer_for``.
        restart: called after ``RESUMED`` steps to save the model and optimizer, and load them into
            others.
        all_sum: sums losses and tokens over the ranks that train together.
    """
    before = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    trained = all_sum(sum(int(batch.loss_mask.sum()) for batch in batches))
    steps = optimizer_for(model, optimizer)
    records = Records(len(reference.logprobs))
    losses, norms, gradients, clipped = [], [], {}, {}
    for step, bonus in enumerate(ENTROPY_BONUS):
        if step == RESUMED and restart is not None:
            model, steps = restart(model, steps)
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            rows = batch.loss_mask
            with recorded(model) as choices:
                logprobs, entropies = score(model, batch, entropy=bonus > 0)
            tokens = batch.versions[rows].long()
            records.add(step, tokens, logprobs[rows], entropies[rows], choices, rows)
            sampled = batch.behavior_logprobs, batch.advantages
            per_token, _ = loss.clipped(logprobs, *sampled, clip_low=CLIP, clip_high=CLIP)
            mean = loss.token_mean(per_token - bonus * entropies, rows, denom=trained)
            mean.backward()  # type: ignore[no-untyped-call]
            total += mean.detach().double()
        if step == 0:
            gradients = _gradients(model)
        norms.append(parallel.clip_gradients(model.parameters(), reference.max_norm).item())
        if step == 0:
            clipped = _gradients(model)
        steps.step()
        steps.zero_grad()
        losses.append(all_sum(total).item())
    after = {name: whole(p.detach()) for name, p in model.named_parameters()}
    return Training(
        losses=losses,
        norms=norms,
        logprobs=records.logprobs,
        entropies=records.entropies,
        gradients=gradients,
        clipped=clipped,
        choices=records.choices,
        updates={name: after[name] - old for name, old in before.items()},
        max_norm=reference.max_norm,
    )


def resumed(
    trained: tuple[nn.Module, Optimizer], fresh: tuple[nn.Module, Optimizer], folder: Any
) -> int:
    """Save one training run and load it into another; return how many random generators differ.

    ``folder`` is the folder of the run; None on ranks other than 0.
    """
    rank = dist.get_rank()
    with checkpoint.Checkpoints(folder, *trained) as saves:
        _seed(2 * rank)
        saves.save(RESUMED, wait=True)
        expected = _draws()
        _seed(2 * rank + 1)
    with checkpoint.Checkpoints(folder, *fresh) as saves:
        saves.load(checkpoint.last_good(folder))
        return sum(one != other for one, other in zip(_draws(), expected, strict=True))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  checkpoints keep numpy's global generator
    random.seed(seed)


def _draws() -> list[float]:
    return [torch.rand(()).item(), np.random.random(), random.random()]  # noqa: NPY002


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    found = ((name, p.grad) for name, p in model.named_parameters())
    return {name: whole(grad).clone() for name, grad in found if grad is not None}


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor if it is sharded: a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
