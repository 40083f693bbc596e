"""Fixed sequences that tell whether an engine computes with the weights that it was sent."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import attrs
import msgspec
import numpy as np
import torch
from torch import nn

from primerl._common.checkpoint_tensors import Quantizer, checkpoint_layout, checkpoint_tensors
from primerl._common.ranks import is_first_rank, on_first_rank, on_first_rank_gathering
from primerl.weights.verification.scoring import (
    Prober,
    mismatch_kl,
    probed,
    rounding_noise,
    sequences_for,
    trainer_logprobs,
)
from primerl.weights.verification.served_tensors import (
    Comparison,
    Reading,
    WeightReader,
    compare,
    from_builtins,
)
from primerl.weights.verification.verdicts import (
    NOISE_BOUND,
    ReplicaChecks,
    ReplicaVerdict,
    observations,
)

LENGTH = 288  # more than two blocks of 128 tokens, the longest of vLLM's prefix cache
OTHER_TEMPERATURE = 2.0  # at which logprobs that leave temperature out are far off

log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class CanaryVerdict:
    """Whether every replica computes with the weights of ``version``, and why not."""

    version: int
    passed: bool
    reason: str
    tolerance: float
    """The largest root mean square difference that passes, in nats."""
    mismatch_kl: float
    """Mean of ``r - 1 - log r`` over the sequences, r trainer over engine, of the worst replica."""
    replicas: tuple[ReplicaVerdict, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """``mismatch_kl`` and ``canary_difference``, in nats, of the worst replica."""
        difference = max(one.difference for one in self.replicas)
        return {"mismatch_kl": self.mismatch_kl, "canary_difference": difference}


class Canary:
    """Compares engines with the trainer on fixed sequences, after each publication.

        canary = weights.Canary(model, engine)
        canary.check(version=0)  # calibrates; raises if the engine does not hold these weights
        ...
        transport.publish(version)
        verdict = canary.check(version)
        if not verdict.passed:
            raise RuntimeError(verdict.reason)

    Each check reads the tensors that every replica computes with, has it score the sequences
    and continue them; the trainer scores the same tokens by a forward pass. A replica passes when

    - each tensor that the engine reports is the trainer's, bit for bit (see ``served_tensors``);
    - the scores differ by no more than the tolerance: 3 times the noise, which is the median of the
      last 16 checks that passed;
    - the mean difference has not shifted since the last of these by 8 of its standard errors;
    - the sampled tokens' logprobs are those of their temperature, within 3 times the noise (6 in 16
      bits). They read the prefix cache, which scores do not, so the sequences are longer than its
      blocks and always the same;
    - and it *moved*: of the change that the trainer predicts since an earlier check, more than half
      was seen. That is a projection over all tokens, so it can be conclusive where the noise of
      each is larger than the change; where its standard error is above 0.2, or the prediction is
      not well above the trainer's own rounding, nothing is concluded.

    With an engine that samples under an adapter, the tensors are those of the base model, which are
    compared until they were right once: nobody trains them. The adapter's own are in the receipt of
    each publication, and the scores see both.

    In 16 bits, where all tensors were the trainer's bit for bit, the tolerance and the most that
    one token may differ are doubled, and nothing is concluded from movement: there the scores watch
    for gross faults alone.

    All ranks make a canary and call ``check``, since the forward pass of a sharded model is a
    collective; rank 0 alone has an engine, and all get its verdict. docs/verification.md says what
    is caught at which precision.

    Args:
        model: the trainer's, a causal language model that returns ``logits``.
        engine: with ``probe``; on rank 0.
        count: of the sequences, which are random.
        length: of each of them, in tokens: more than two blocks of the engine's prefix cache.
        new_tokens: with which the engine continues each.
        temperature: of the rollouts, at which the first sequence is continued; the others are
            continued at 2, where logprobs that ignore temperature are far off.
        compare_tensors: whether to compare tensors, with engines that have ``read_weights``. False
            for a model whose tensors the engine rearranges in an unknown way (the error names
            them).
        dtype: that the *engine* computes in. The first check must find a root mean square
            difference of at most 1e-4 nats in float32 and 0.3 in bfloat16 and float16: more is
            not noise.
        tolerance: in nats, instead of the calibrated one; also of the first check.
        quantize: what the transport quantizes with; the tensors that engines read are compared with
            its, bit for bit.
        timeout_s: of one probe; a busy engine finishes a request first.

    Raises:
        ValueError: rank 0 has no engine or another rank has one, a number is out of range, or
            ``dtype`` has no known noise and there is no ``tolerance``.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Prober | None,
        *,
        count: int = 2,
        length: int = LENGTH,
        new_tokens: int = 8,
        temperature: float = 1.0,
        compare_tensors: bool = True,
        dtype: torch.dtype = torch.float32,
        tolerance: float | None = None,
        quantize: Quantizer | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if is_first_rank() != (engine is not None):
            raise ValueError("rank 0 alone probes the engine: pass it there, and None elsewhere")
        if count < 1 or length < 2 or new_tokens < 1:
            raise ValueError(
                f"count={count}, length={length}, new_tokens={new_tokens}: expected at least "
                "1 sequence of 2 tokens and 1 new token"
            )
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature is {temperature}, expected a positive number")
        if tolerance is None and dtype not in NOISE_BOUND:
            raise ValueError(f"the noise of {dtype} is not known; pass tolerance= in nats")
        if tolerance is not None and not 0 < tolerance < math.inf:
            raise ValueError(f"tolerance is {tolerance}, expected a positive number of nats")
        rows = sequences_for(model, count=count, length=length)
        self.sequences = tuple(tuple(row) for row in rows)
        self.model = model
        self.dtype = dtype
        self._quantize = quantize
        self._engine = engine
        self._new_tokens = new_tokens
        others = [OTHER_TEMPERATURE] * (len(self.sequences) - 1)
        self._temperatures = [temperature, *others]
        self._timeout_s = timeout_s
        self._names: list[str] | None = None
        self._has_read = self._has_warned = False
        self._reads = compare_tensors and isinstance(engine, WeightReader)
        self._checks = ReplicaChecks(dtype=dtype, tolerance=tolerance)
        self._rounding: float | None = None
        self._base: dict[str, Comparison] = {}
        """Of the base model under an adapter, which neither side changes once it was right."""

    @property
    def tolerance(self) -> float | None:
        """The largest root mean square difference that passes, in nats; None before a check."""
        return self._checks.tolerance

    def check(self, version: int) -> CanaryVerdict:
        """Compare every replica with the trainer, whose weights were published as ``version``.

        Raises:
            RuntimeError: this is the first check, and the difference is too large to be noise; or
                the engine could not be probed.
            ValueError: the engine refuses the sequences, on rank 0; the others raise RuntimeError.
        """
        if self._rounding is None:
            self._rounding = rounding_noise(self.model, self.sequences[0])
        compared = self._compared(version)
        rows = on_first_rank(self._probe)
        sampled = [(len(row["logprobs"]), row["temperature"]) for row in rows]
        expected = trainer_logprobs(self.model, [row["token_ids"] for row in rows], sampled=sampled)
        content = on_first_rank(lambda: self._verdict(version, rows, expected, compared))
        verdict = msgspec.convert(content, CanaryVerdict)
        self._checks.tolerance = verdict.tolerance
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

    def _compared(self, version: int) -> dict[str, Comparison]:
        """The tensors of each replica against the trainer's; empty where none can be read.

        All ranks gather; rank 0 compares.
        """
        readings: dict[str, list[Reading]] = {}
        merged = getattr(self._engine, "adapter", None) is None

        def read() -> list[bool]:
            readings.update(self._read(version) if self._reads and not self._base else {})
            return [bool(readings), merged]

        found, merged = on_first_rank(read)
        if not found:
            return self._base
        tensors = checkpoint_tensors(self.model, merge_adapters=merged, quantize=self._quantize)
        compared = on_first_rank_gathering(
            lambda: compare(tensors, readings, wire=self.dtype), tensors
        )
        if compared and not merged and not any(one.wrong for one in compared.values()):
            self._base = compared
        return compared or {}

    def _read(self, version: int) -> dict[str, list[Reading]]:
        assert isinstance(self._engine, WeightReader)
        self._names = self._names or list(checkpoint_layout(self.model, quantize=self._quantize))
        try:
            answers = self._engine.read_weights(
                self._names, turn=version, timeout_s=self._timeout_s
            )
        except (RuntimeError, ValueError) as error:
            if self._has_read:
                raise
            if not self._has_warned:
                log.warning(
                    "the engine's tensors can't be read, so scores alone are compared: %s", error
                )
            self._has_warned = True
            return {}  # the next version's are tried again: a server may have been busy
        self._has_read = True
        return {replica: from_builtins(rows) for replica, rows in answers.items()}

    def _probe(self) -> list[dict[str, Any]]:
        assert self._engine is not None
        return probed(
            self._engine,
            self.sequences,
            new_tokens=self._new_tokens,
            temperatures=self._temperatures,
            timeout_s=self._timeout_s,
        )

    def _verdict(
        self,
        version: int,
        rows: list[dict[str, Any]],
        expected: list[np.ndarray],
        compared: dict[str, Comparison],
    ) -> dict[str, Any]:
        """The verdict as builtins, for every rank; rank 0 keeps the history."""
        assert self._rounding is not None
        replicas = len(rows) // len(self.sequences)
        observed = observations(rows, expected, [len(one) for one in self.sequences] * replicas)
        found = self._checks.verdicts(observed, compared, rounding=self._rounding)
        bad = [one for one in found if not one.passed]
        reasons = "; ".join(f"{one.replica}: {one.reason}" for one in (bad or found))
        assert self._checks.tolerance is not None
        verdict = CanaryVerdict(
            version=int(version),
            passed=not bad,
            reason=f"version {version} {'failed' if bad else 'passed'} the canary: {reasons}",
            tolerance=float(self._checks.tolerance),
            mismatch_kl=max(mismatch_kl(-one.differences) for one in observed.values()),
            replicas=tuple(found),
        )
        content: dict[str, Any] = attrs.asdict(verdict)
        return content
