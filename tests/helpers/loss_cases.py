"""Test helpers for primerl.loss: a common interface to token losses, rows, threads as ranks."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
import torch

from primerl import loss, packing
from primerl.types import NOT_SAMPLED, TrainingSample

F64 = {"dtype": torch.float64}


@attrs.frozen(eq=False, kw_only=True)
class Rows:
    """The inputs of token losses for each row, besides the trainer's logprobs."""

    behavior: torch.Tensor
    advantages: torch.Tensor
    proximal: torch.Tensor
    ref: torch.Tensor
    loss_mask: torch.Tensor
    sequence_ids: torch.Tensor

    def __getitem__(self, rows):
        return Rows(**{f.name: getattr(self, f.name)[rows] for f in attrs.fields(Rows)})


def random_rows(lengths=(6, 3, 1, 8, 4), *, seed=0, spread=0.3, **kind):
    """Make logprobs and rows of documents with a masked prompt; every third trains no token."""
    generator = torch.Generator().manual_seed(seed)
    kind = F64 | kind
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    first = torch.cat([torch.arange(n) == 0 for n in lengths])

    def noise():
        return torch.randn(len(ids), generator=generator, dtype=torch.float64)

    behavior = -noise().abs() - 0.5

    def near():
        return (behavior + spread * noise()).to(kind["dtype"])

    rows = Rows(
        behavior=behavior.to(kind["dtype"]),
        advantages=noise().to(kind["dtype"]),
        proximal=near(),
        ref=near(),
        loss_mask=~first & (ids % 3 != 2),
        sequence_ids=ids,
    )
    return near(), rows


def _over_sequences(rows, all_sum, **kwargs):
    return functools.partial(
        loss.sequence_ratio,
        loss_mask=rows.loss_mask,
        sequence_ids=rows.sequence_ids,
        all_sum=all_sum,
        **kwargs,
    )


def _elementwise(fn, **kwargs):
    return lambda x, rows, all_sum: fn(x, rows.behavior, rows.advantages, **kwargs)


def _by_sequence(fn, **ratio):
    def call(x, rows, all_sum):
        over = _over_sequences(rows, all_sum, **ratio)
        return fn(x, rows.behavior, rows.advantages, ratio=over)

    return call


ELEMENTWISE = {
    "reinforce": _elementwise(loss.reinforce),
    "clipped": _elementwise(loss.clipped),
    "clipped, dual": _elementwise(loss.clipped, dual_clip=1.5),
    "cispo": _elementwise(loss.cispo, clip_low=0.2, clip_high=0.2),
    "topr": _elementwise(loss.topr),
    "sapo": _elementwise(loss.sapo),
    "decoupled": lambda x, b, _: loss.decoupled(x, b.behavior, b.advantages, b.proximal),
    "dppo": _elementwise(loss.dppo, mask_low=0.05, mask_high=0.05),
    "ipo": _elementwise(loss.ipo),
    "distill": lambda x, b, _: loss.distill(x, b.behavior, b.ref, mask_low=0.05),
}
BY_SEQUENCE = {
    "gspo": lambda x, b, all_sum: loss.gspo(
        x,
        b.behavior,
        b.advantages,
        b.loss_mask,
        b.sequence_ids,
        clip_low=0.1,
        clip_high=0.1,
        all_sum=all_sum,
    ),
    "reinforce, ratio of sequences": _by_sequence(loss.reinforce),
    "cispo, ratio of sequences": _by_sequence(
        functools.partial(loss.cispo, clip_low=0.12, clip_high=0.12)
    ),
    "topr, product of ratios": _by_sequence(loss.topr, length_normalized=False),
}
SURROGATES = ELEMENTWISE | BY_SEQUENCE
"""Name -> ``(logprobs, rows, all_sum) -> (loss, aux)``."""

OTHERS = {
    "k1": lambda x, b, _: (loss.k1(x, b.ref), {}),
    "k2": lambda x, b, _: (loss.k2(x, b.ref), {}),
    "k3": lambda x, b, _: (loss.k3(x, b.ref), {}),
    "cross_entropy": lambda x, b, _: (loss.cross_entropy(x), {}),
}
TOKEN_LOSSES = SURROGATES | OTHERS

CORRECTIONS = {
    "token_tis": lambda x, b, _: loss.token_tis(x, b.behavior, cap=1.1),
    "token_mis": lambda x, b, _: loss.token_mis(x, b.behavior, cap=1.1),
    "icepop": lambda x, b, _: loss.icepop(x, b.behavior, low=0.9, high=1.2),
}


def _sequence_correction(fn, **kwargs):
    return lambda x, b, all_sum: fn(
        x, b.behavior, b.loss_mask, b.sequence_ids, all_sum=all_sum, **kwargs
    )


SEQUENCE_CORRECTIONS = {
    "sequence_tis": _sequence_correction(loss.sequence_tis, cap=1.1),
    "sequence_mis": _sequence_correction(loss.sequence_mis, cap=1.1),
    "geometric_rejection": _sequence_correction(loss.geometric_rejection, low=0.85, high=1.2),
    "veto": _sequence_correction(loss.veto, threshold=0.7),
}
CORRECTIONS |= SEQUENCE_CORRECTIONS
"""Name -> ``(logprobs, rows, all_sum) -> weight``."""

REDUCTIONS = {
    "token_mean": lambda x, b, all_sum, tokens, sequences: loss.token_mean(
        x, b.loss_mask, denom=tokens
    ),
    "sequence_mean": lambda x, b, all_sum, tokens, sequences: loss.sequence_mean(
        x, b.loss_mask, b.sequence_ids, denom=sequences, all_sum=all_sum
    ),
    "fixed_length_mean": lambda x, b, all_sum, tokens, sequences: loss.fixed_length_mean(
        x, b.loss_mask, length=7, denom=sequences
    ),
}
"""Name -> ``(x, rows, all_sum, tokens, sequences) -> mean``."""


def alone(x):
    """Sum over a single rank, which returns ``x``."""
    return x


class Ranks:
    """Threads that act as ranks, with a sum over all ranks."""

    def __init__(self, count):
        self._parts = [None] * count
        self._barrier = threading.Barrier(count, timeout=30)

    def run(self, fn):
        """Run ``fn(rank, all_sum)`` on all ranks concurrently."""
        with ThreadPoolExecutor(len(self._parts)) as pool:
            futures = [pool.submit(self._guarded, fn, rank) for rank in range(len(self._parts))]
        return [future.result() for future in futures]

    def _guarded(self, fn, rank):
        try:
            return fn(rank, functools.partial(self._all_sum, rank))
        except BaseException:
            self._barrier.abort()
            raise

    def _all_sum(self, rank, x):
        assert not x.requires_grad, "only sums without gradient may cross ranks"
        self._parts[rank] = x
        self._barrier.wait()
        total = torch.stack(self._parts).sum(0)  # fails if the shapes of the ranks differ
        self._barrier.wait()
        return total


@attrs.frozen(eq=False, kw_only=True)
class Step:
    """The documents of one step. Token i of the step has the id i, and its own logprobs."""

    samples: list
    logprobs: torch.Tensor
    proximal: torch.Tensor

    def rows(self, batch):
        """Return the rows of a packed batch."""
        return Rows(
            behavior=batch.behavior_logprobs.double(),
            advantages=batch.advantages.double(),
            proximal=self.proximal[batch.labels],
            ref=batch.ref_logprobs.double(),
            loss_mask=batch.loss_mask,
            sequence_ids=batch.sequence_ids,
        )

    def mean(self, x, rows, recipe, all_sum=alone):
        """Compute a part of the step's loss with a recipe: (token loss, correction, reduction)."""
        surrogate, correction, reduction = recipe
        per_token = SURROGATES[surrogate](x, rows, all_sum)[0]
        if correction is not None:
            per_token = CORRECTIONS[correction](x, rows, all_sum) * per_token
        tokens = sum(int(sample.loss_mask.sum()) for sample in self.samples)
        sequences = sum(bool(sample.loss_mask.any()) for sample in self.samples)
        return REDUCTIONS[reduction](per_token, rows, all_sum, tokens, sequences)

    def gradient(self, parts, recipe, all_sum=alone):
        """Return the loss of the parts ``(labels, rows)`` of a step, and its gradient by token."""
        table = self.logprobs.clone().requires_grad_()
        total = torch.zeros((), **F64)
        for labels, rows in parts:
            mean = self.mean(table[labels], rows, recipe, all_sum)
            mean.backward()
            total += mean.detach()
        return total, table.grad

    def packed(self, *, max_tokens, ranks, order=None):
        """Pack the step; return the parts ``(labels, rows)`` of each rank."""
        samples = [self.samples[i] for i in order] if order is not None else self.samples
        batches = packing.pack(samples, max_tokens=max_tokens, ranks=ranks)
        return [[(b.labels, self.rows(b)) for b in mine] for mine in batches]


def random_step(lengths=(5, 17, 9, 2, 30, 12, 7, 3, 21, 4), *, seed=0):
    """Make a step of random documents with masked prompts; one of them has no trained token."""
    rng = np.random.default_rng(seed)
    samples, start = [], 0
    for number, length in enumerate(lengths):
        mask = np.arange(length) >= (1 + length // 3 if number != 6 else length)
        behavior = np.where(mask, -0.5 - 2 * rng.random(length), 0.0)
        samples.append(
            TrainingSample(
                token_ids=np.arange(start, start + length),
                loss_mask=mask,
                behavior_logprobs=behavior,
                versions=np.where(mask, 3, NOT_SAMPLED),
                advantages=np.where(mask, rng.standard_normal(length), 0.0),
                ref_logprobs=behavior + 0.3 * rng.standard_normal(length),
            )
        )
        start += length
    behavior = np.concatenate([sample.behavior_logprobs for sample in samples])
    noise = rng.standard_normal((2, start))
    # Shift whole documents off policy, so that some ratios are clipped.
    drift = np.repeat(0.2 * rng.standard_normal(len(lengths)), lengths)
    logprobs, proximal = torch.from_numpy(behavior + drift + 0.3 * noise)
    return Step(samples=samples, logprobs=logprobs, proximal=proximal)


RECIPES = [
    *((surrogate, None, reduction) for surrogate in SURROGATES for reduction in REDUCTIONS),
    *(("clipped", correction, "sequence_mean") for correction in CORRECTIONS),
]
"""(token loss, correction, reduction)."""
