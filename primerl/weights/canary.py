"""Fixed sequences that say whether an engine computes with the weights that it was sent."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn

from primerl.weights.gathering import is_first_rank
from primerl.weights.outcomes import on_first_rank
from primerl.weights.probing import Prober, probed
from primerl.weights.scoring import (
    mismatch_kl,
    movement,
    rms,
    rounding_noise,
    sequences_for,
    trainer_logprobs,
)

LENGTH = 288  # two blocks of 128 tokens, as long as those of vLLM's prefix cache get, and a rest
NOISE_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.3, torch.float16: 0.3}
NOISE_LEAST = {torch.float32: 3e-6, torch.bfloat16: 3e-3, torch.float16: 3e-3}
ABOVE_NOISE = 3.0  # the tolerance: so many times the noise of the first check
PEAK = 8.0  # a single token may differ by so many tolerances
SURE = 0.2  # the largest standard error of ``moved`` from which anything is concluded
MOVED = 0.5
OWN_NOISE = 4.5  # a predicted change is that of weights where it is so many times the rounding

log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class ReplicaVerdict:
    """What the canary found on one replica; differences of logprobs in nats, engine - trainer."""

    replica: str
    passed: bool
    reason: str
    difference: float
    """Root mean square over the tokens of the sequences."""
    largest: float
    """Of all tokens, those of the continuation included."""
    continuation: float
    """Root mean square over the tokens that the engine went on with."""
    moved: float | None
    """The share of the predicted change that was seen: 1 for the new weights, 0 for the old ones;
    None where noise allows no conclusion."""
    moved_error: float | None
    """Its standard error; None where no change was predicted."""


@attrs.frozen(kw_only=True)
class Verdict:
    """Whether every replica computes with the weights of ``version``, and why not."""

    version: int
    passed: bool
    reason: str
    tolerance: float
    """The largest root mean square difference that passes, in nats."""
    mismatch_kl: float
    """Mean of ``r - 1 - log r`` over the sequences, r trainer over engine, of the worst replica."""
    replicas: tuple[ReplicaVerdict, ...]


@attrs.frozen
class _Reference:
    """What was expected and seen at an earlier check."""

    expected: np.ndarray
    seen: Mapping[str, np.ndarray]


class Canary:
    """Compares engines with the trainer on fixed sequences, after each publication.

        canary = weights.Canary(model, engine)
        canary.check(version=0)  # calibrates: the engine holds these weights, or it is refused
        ...
        transport.publish(version)
        verdict = canary.check(version)
        if not verdict.passed:
            raise RuntimeError(verdict.reason)

    Each check scores the sequences on every replica and lets it continue them; the trainer scores
    the same tokens by a forward pass. A replica passes when

    - the differences, of the sequences and of the continuation each, are within the tolerance: 3
      times those of the first check. The continuation reads the prefix cache, which scores do not,
      so the sequences are longer than its blocks and always the same;
    - and it *moved*: of the change that the trainer predicts since an earlier check, more than half
      was seen. That is a projection over all tokens, so it can be conclusive where the noise of
      each is larger than the change; where its standard error is above 0.2, or the prediction is
      not well above the trainer's own rounding, nothing is concluded.

    All ranks make a canary and call ``check``, since the forward pass of a sharded model is a
    collective; rank 0 alone has an engine, and all get its verdict. docs/proof.md says what is
    caught at which precision.

    Args:
        model: the trainer's, a causal language model that returns ``logits``.
        engine: with ``probe``; on rank 0.
        sequences: token ids, longer than two blocks of the engine's prefix cache; by default
            random ones, from ``seed``.
        count: of the default sequences.
        length: of each of them, in tokens.
        new_tokens: with which the engine continues each.
        dtype: that the *engine* computes in. The first check must find a root mean square
            difference of at most 1e-4 nats in float32 and 0.3 in bfloat16 and float16: more is
            not noise.
        tolerance: in nats, instead of the calibrated one.
        timeout_s: of one probe, for which a busy engine has to end a request first.
        seed: of the default sequences.

    Raises:
        ValueError: rank 0 has no engine or another rank has one, a number is out of range, or
            ``dtype`` has no known noise and there is no ``tolerance``.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Prober | None,
        *,
        sequences: Sequence[Sequence[int]] | None = None,
        count: int = 2,
        length: int = LENGTH,
        new_tokens: int = 8,
        dtype: torch.dtype = torch.float32,
        tolerance: float | None = None,
        timeout_s: float = 600.0,
        seed: int = 0,
    ) -> None:
        if is_first_rank() != (engine is not None):
            raise ValueError("rank 0 alone probes the engine: pass it there, and None elsewhere")
        if count < 1 or length < 2 or new_tokens < 1:
            raise ValueError(
                f"count={count}, length={length}, new_tokens={new_tokens}: expected at least "
                "1 sequence of 2 tokens and 1 new token"
            )
        if tolerance is None and dtype not in NOISE_BOUND:
            raise ValueError(f"the noise of {dtype} is not known; pass tolerance= in nats")
        if tolerance is not None and not 0 < tolerance < math.inf:
            raise ValueError(f"tolerance is {tolerance}, expected a positive number of nats")
        if sequences is None:
            sequences = sequences_for(model, count=count, length=length, seed=seed)
        self.sequences = tuple(tuple(int(token) for token in row) for row in sequences)
        if not self.sequences or min(map(len, self.sequences)) < 2:
            raise ValueError("expected at least one sequence, each of at least 2 tokens")
        self.model = model
        self.tolerance = tolerance
        self.dtype = dtype
        self._engine = engine
        self._new_tokens = new_tokens
        self._timeout_s = timeout_s
        self._last: _Reference | None = None
        self._anchor: _Reference | None = None
        self._own_noise: float | None = None

    def check(self, version: int) -> Verdict:
        """Compare every replica with the trainer, whose weights were published as ``version``.

        Raises:
            RuntimeError: this is the first check, and the difference is too large to be noise; or
                the engine could not be probed.
            ValueError: the engine refuses the sequences, on rank 0; the others raise RuntimeError.
        """
        if self._own_noise is None:
            self._own_noise = rounding_noise(self.model, self.sequences[0])
        rows = on_first_rank(self._probe)
        expected = trainer_logprobs(self.model, [row["token_ids"] for row in rows])
        content = on_first_rank(lambda: self._judge(version, rows, expected))
        replicas = tuple(ReplicaVerdict(**one) for one in content.pop("replicas"))
        verdict = Verdict(**content, replicas=replicas)
        self.tolerance = verdict.tolerance
        if is_first_rank() and not verdict.passed:
            log.error("%s", verdict.reason)
        return verdict

    def scores(self, sequences: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        """Each replica's logprobs of all tokens but the first of each sequence, on every rank."""
        engine = self._engine

        def ask() -> dict[str, list[float]]:
            assert engine is not None
            found: dict[str, list[float]] = {}
            for row in probed(engine, sequences, new_tokens=1, timeout_s=self._timeout_s):
                found.setdefault(row["replica"], []).extend(row["scores"][1:])
            return found

        return {name: np.array(values) for name, values in on_first_rank(ask).items()}

    def _probe(self) -> list[dict[str, Any]]:
        assert self._engine is not None
        return probed(
            self._engine, self.sequences, new_tokens=self._new_tokens, timeout_s=self._timeout_s
        )

    def _judge(
        self, version: int, rows: list[dict[str, Any]], expected: list[np.ndarray]
    ) -> dict[str, Any]:
        """The verdict as builtins, for every rank; rank 0 keeps what it has seen."""
        prompts = [len(sequence) for sequence in self.sequences] * (
            len(rows) // len(self.sequences)
        )
        fixed: dict[str, list[np.ndarray]] = {}
        seen: dict[str, list[np.ndarray]] = {}
        ends: dict[str, list[np.ndarray]] = {}
        for row, own, prompt in zip(rows, expected, prompts, strict=True):
            fixed.setdefault(row["replica"], []).append(own[1:prompt])
            seen.setdefault(row["replica"], []).append(np.asarray(row["scores"][1:]))
            end = np.asarray(row["logprobs"]) - own[prompt:]
            ends.setdefault(row["replica"], []).append(end)
        own_scores = np.concatenate(next(iter(fixed.values())))
        scores = {name: np.concatenate(parts) for name, parts in seen.items()}
        after = {name: np.concatenate(parts) for name, parts in ends.items()}
        if self.tolerance is None:
            self.tolerance = self._calibrated([one - own_scores for one in scores.values()])
        found = [self._replica(name, scores[name], own_scores, after[name]) for name in scores]
        bad = [one for one in found if not one.passed]
        if not bad:
            self._remember(own_scores, scores, found)
        told = "; ".join(f"{one.replica}: {one.reason}" for one in (bad or found))
        verdict = Verdict(
            version=version,
            passed=not bad,
            reason=f"version {version} {'failed' if bad else 'passed'} the canary: {told}",
            tolerance=self.tolerance,
            mismatch_kl=max(mismatch_kl(own_scores - one) for one in scores.values()),
            replicas=tuple(found),
        )
        content: dict[str, Any] = attrs.asdict(verdict)
        return content

    def _calibrated(self, differences: list[np.ndarray]) -> float:
        noise, bound = max(map(rms, differences)), NOISE_BOUND[self.dtype]
        if not noise <= bound:
            raise RuntimeError(
                f"at the first check, engine and trainer differ by {noise:.2g} nats (root mean "
                f"square), more than {bound:g}, the most that {self.dtype} explains: the engine "
                "does not hold the trainer's weights, or computes otherwise (pass dtype= of the "
                "engine, or tolerance= if the difference is known)"
            )
        return ABOVE_NOISE * max(noise, NOISE_LEAST[self.dtype])

    def _replica(
        self, name: str, scores: np.ndarray, expected: np.ndarray, after: np.ndarray
    ) -> ReplicaVerdict:
        assert self.tolerance is not None
        differences = scores - expected
        difference, continuation = rms(differences), rms(after) if len(after) else math.nan
        largest = float(np.abs(np.concatenate([differences, after])).max())
        moved, error = self._moved(name, scores, expected)
        reasons = []
        if not difference <= self.tolerance:
            reasons.append(
                f"scores differ by {difference:.2g} nats (tolerance {self.tolerance:.2g})"
            )
        if not continuation <= self.tolerance:
            what = (
                "no token was sampled" if not len(after) else f"differs by {continuation:.2g} nats"
            )
            reasons.append(
                f"the continuation {what}"
                + ("" if reasons else ": a prefix cache of other weights")
            )
        if not largest <= PEAK * self.tolerance and not reasons:
            reasons.append(f"a token differs by {largest:.2g} nats")
        if moved is not None and not moved > MOVED:
            reasons.append(f"{moved:.0%} of the change since an earlier check arrived: old weights")
        passed = not reasons
        if passed:
            seen = (
                "too little changed to tell" if moved is None else f"{moved:.0%} of the change seen"
            )
            reasons.append(f"differs by {difference:.2g} nats, {seen}")
        return ReplicaVerdict(
            replica=name,
            passed=passed,
            reason=", ".join(reasons),
            difference=difference,
            largest=largest,
            continuation=continuation,
            moved=moved,
            moved_error=None if math.isinf(error) else error,
        )

    def _moved(
        self, name: str, scores: np.ndarray, expected: np.ndarray
    ) -> tuple[float | None, float]:
        """The share of the change seen since the last check, or since the last conclusive one."""
        error = math.inf
        for reference in (self._last, self._anchor):
            if reference is None:
                continue
            # Its own scores cancel what rounding adds to both; a replica that joined has none.
            before = reference.seen.get(name, reference.expected)
            predicted = expected - reference.expected
            moved, error = movement(predicted, scores - before)
            assert self._own_noise is not None
            if error < SURE and rms(predicted) > OWN_NOISE * self._own_noise:
                return moved, error
        return None, error

    def _remember(
        self,
        expected: np.ndarray,
        scores: dict[str, np.ndarray],
        found: list[ReplicaVerdict],
    ) -> None:
        self._last = _Reference(expected, scores)
        if self._anchor is None or all(one.moved is not None for one in found):
            self._anchor = self._last
