"""``Canary``, which checks that engines compute with the weights that they were sent."""

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import attrs
import msgspec
import numpy as np
import torch
from torch import nn

from primerl._common.checkpoint_tensors import Quantizer, checkpoint_layout
from primerl._common.ranks import is_first_rank, on_first_rank
from primerl.weights.verification.comparison import TensorComparer, TensorComparison
from primerl.weights.verification.scoring import (
    Prober,
    default_length,
    mismatch_kl,
    probed,
    rounding_noise,
    sequences_for,
    trainer_logprobs,
)
from primerl.weights.verification.served_tensors import Reading, WeightReader, from_builtins
from primerl.weights.verification.verdicts import (
    NOISE_BOUND,
    ServerChecks,
    ServerVerdict,
    observations,
)

OTHER_TEMPERATURE = 2.0  # logprobs that ignore this temperature are far off

log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class CanaryVerdict:
    """The canary's verdict: whether every server computes with the weights of ``version``."""

    version: int
    passed: bool
    reason: str
    tolerance: float
    """The largest root mean square difference that passes, in nats."""
    mismatch_kl: float
    """Mean of ``r - 1 - log r`` over the sequences, r trainer over engine, of the worst server."""
    servers: tuple[ServerVerdict, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """``mismatch_kl`` and ``canary_difference`` of the worst server, in nats."""
        difference = max(one.difference for one in self.servers)
        return {"mismatch_kl": self.mismatch_kl, "canary_difference": difference}


@attrs.frozen(kw_only=True, eq=False)
class CanaryAnswers:
    """The engines' answers to a canary: digests of their tensors, and scored sequences."""

    readings: dict[str, list[Reading]]
    """The tensors of each server; empty if none are compared."""
    rows: list[dict[str, Any]]
    """The sequences as each server scored and continued them; see ``scoring.probed``."""
    seconds: float
    """How long the engines took."""


class Canary:
    """A check of an engine's weights after each publication, by comparison with the trainer.

        canary = weights.Canary(model, engine)
        canary.check(version=0)  # calibrates; raises if the engine does not hold these weights
        ...
        transport.publish(version)
        verdict = canary.check(version)
        if not verdict.passed:
            raise RuntimeError(verdict.reason)

    Each check reads digests of the tensors that every server computes with, and has every server
    score and continue fixed sequences. The trainer scores the same tokens by a forward pass. A
    server passes if

    - each tensor that the server reports equals the trainer's, bit for bit (see
      ``comparison``);
    - the scores differ by no more than the tolerance, which is 3 times the noise. The noise is the
      median difference of the last 16 checks that passed;
    - since the last passed check, the mean difference has not shifted by more than 8 of its
      standard errors;
    - the sampled tokens' logprobs are those at their temperature, within 3 times the noise (6 times
      in 16 bits). Sampling uses the prefix cache and scoring does not. Therefore the sequences are
      longer than the cache's blocks and always the same;
    - its scores *moved*: the trainer's scores predict how the server's scores change between an
      earlier check and this one, and the server shows more than half of that change. The share is
      a projection over all tokens, so it can be conclusive even if each token's noise is larger
      than its change. Nothing is concluded if the standard error of the share is above 0.2, or if
      the predicted change is not well above the trainer's own rounding error.

    If the engine samples under an adapter, the compared tensors are those of the base model. They
    are not trained, so they are no longer compared once they have been right on all servers. The
    adapter's own tensors are checked by the receipt of each publication. The scores depend on both.

    In 16 bits, if all tensors equal the trainer's bit for bit, the scores only have to reveal
    gross faults: the largest eighth of the differences is not counted, and nothing is concluded
    from movement.

    All ranks create a canary and call ``check``: the forward pass of a sharded model is a
    collective, and each rank compares the tensors of some of the layers. Only rank 0 has an engine,
    and all ranks get its verdict. docs/verification.md lists which faults are caught at which
    precision.

    Args:
        model: the trainer's model, a causal language model that returns ``logits``.
        engine: an engine with ``probe``, on rank 0; None on the other ranks.
        count: the number of sequences, which are random.
        length: the number of tokens per sequence; by default 8 more than two blocks of the engine's
            prefix cache, but at least 72, or 288 for an engine in 16 bits whose tensors are not
            compared. It is 288 if the engine does not know its blocks.
        new_tokens: the number of tokens with which the engine continues each sequence.
        temperature: the sampling temperature of rollouts, at which the first sequence is continued.
            The others are continued at 2, where logprobs that ignore the temperature are far off.
        compare_tensors: whether to compare tensors, with engines that have ``read_weights``. Pass
            False for a model whose tensors the engine rearranges in an unknown way (the error names
            them).
        dtype: the dtype that the *engine* computes in. It bounds the root mean square difference of
            the first check: 1e-4 nats in float32, and 0.3 nats in bfloat16 and float16. A
            larger difference can't be noise.
        tolerance: a tolerance in nats that replaces the calibrated one, also in the first check.
        quantize: the transport's quantizer. The engine's tensors are compared with the quantized
            ones, bit for bit.
        timeout_s: the timeout of one probe, which includes the engine's current work.

    Raises:
        ValueError: rank 0 has no engine or another rank has one, the engine has no ``probe``, a
            number is out of range, or ``dtype`` has no known noise and there is no ``tolerance``.
        RuntimeError: no server could be reached.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Prober | None,
        *,
        count: int = 2,
        length: int | None = None,
        new_tokens: int = 8,
        temperature: float = 1.0,
        compare_tensors: bool = True,
        dtype: torch.dtype = torch.float32,
        tolerance: float | None = None,
        quantize: Quantizer | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if is_first_rank() != (engine is not None):
            raise ValueError("pass the engine on rank 0 and engine=None on all other ranks")
        if engine is not None and not isinstance(engine, Prober):
            raise ValueError(
                f"{type(engine).__name__} has no probe(), with which a canary has it score "
                "sequences. An engine in this process copies the trainer's tensors and needs no "
                "canary; publish to it with weights.SharedMemory or weights.transport_to"
            )
        reads = compare_tensors and isinstance(engine, WeightReader)
        if length is None:
            few_show = dtype == torch.float32 or reads
            length = on_first_rank(
                lambda: default_length(engine, few_show=few_show, new_tokens=new_tokens)
            )
        if count < 1 or length < 2 or new_tokens < 1:
            raise ValueError(
                f"count={count}, length={length}, new_tokens={new_tokens}: expected at least "
                "1 sequence of 2 tokens and 1 new token"
            )
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature is {temperature}, expected a positive number")
        if tolerance is None and dtype not in NOISE_BOUND:
            raise ValueError(f"the canary does not know the noise of {dtype}; pass tolerance=")
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
        self._reads = reads
        self._checks = ServerChecks(dtype=dtype, tolerance=tolerance)
        self._rounding: float | None = None
        self._comparer = TensorComparer(model, wire=dtype, quantize=quantize)
        self._base: dict[str, TensorComparison] = {}
        """The comparison of the base model under an adapter; empty until its tensors were right."""

    @property
    def tolerance(self) -> float | None:
        """The largest root mean square difference that passes, in nats; None before it is known."""
        return self._checks.tolerance

    def ask(self, version: int) -> CanaryAnswers:
        """Have the engines, which serve ``version``, answer what ``check`` compares.

        Only rank 0 calls this. It uses neither the model's tensors nor collectives, so it may run
        in a thread while the model is trained.

        Raises:
            RuntimeError: the engine could not be probed.
            ValueError: the engine refuses the sequences.
        """
        began = time.perf_counter()
        readings = self._read(version) if self._reads and not self._base else {}
        rows = self._probe()
        return CanaryAnswers(readings=readings, rows=rows, seconds=time.perf_counter() - began)

    def check(self, version: int, answers: CanaryAnswers | None = None) -> CanaryVerdict:
        """Compare every server with the trainer, whose weights were published as ``version``.

        Args:
            version: the version that was published.
            answers: what ``ask`` returned for the version, on rank 0; None to ask now.

        Raises:
            RuntimeError: the difference at the first check is too large to be noise, or the engine
                could not be probed.
            ValueError: on rank 0, the engine refuses the sequences; other ranks then raise
                RuntimeError.
        """
        if self._rounding is None:
            self._rounding = rounding_noise(self.model, self.sequences[0])
        readings: dict[str, list[Reading]] = {}

        def answered() -> list[Any]:
            found = self.ask(version) if answers is None else answers
            readings.update(found.readings)
            merged = getattr(self._engine, "adapter", None) is None
            return [found.rows, bool(readings), merged]

        rows, has_readings, merged = on_first_rank(answered)
        compared = self._compared(readings, merged=merged) if has_readings else self._base
        sampled = [(len(row["logprobs"]), row["temperature"]) for row in rows]
        expected = trainer_logprobs(self.model, [row["token_ids"] for row in rows], sampled=sampled)
        content = on_first_rank(lambda: self._verdict(version, rows, expected, compared))
        verdict = msgspec.convert(content, CanaryVerdict)
        self._checks.tolerance = verdict.tolerance
        if is_first_rank() and not verdict.passed:
            log.error("%s", verdict.reason)
        return verdict

    def scores(self, sequences: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        """Return each server's logprobs, without each sequence's first token, on every rank."""
        engine = self._engine

        def ask() -> dict[str, list[float]]:
            assert engine is not None
            found: dict[str, list[float]] = {}
            for row in probed(engine, sequences, new_tokens=1, timeout_s=self._timeout_s):
                found.setdefault(row["server"], []).extend(row["scores"][1:])
            return found

        return {name: np.array(values) for name, values in on_first_rank(ask).items()}

    def _compared(
        self, readings: dict[str, list[Reading]], *, merged: bool
    ) -> dict[str, TensorComparison]:
        """Compare the tensors of each server with the trainer's.

        All ranks compare, and rank 0 has the result.
        """
        compared = self._comparer.compare(readings, merge_adapters=merged)
        if compared and not merged and not any(one.wrong for one in compared.values()):
            self._base = compared
        return compared

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
                    "the engine's tensors can't be read, so only scores are compared: %s", error
                )
            self._has_warned = True
            return {}  # the next check tries again, because a server may only have been busy
        self._has_read = True
        return {server: from_builtins(rows) for server, rows in answers.items()}

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
        compared: dict[str, TensorComparison],
    ) -> dict[str, Any]:
        """Return the verdict as built-in types, to send to every rank; rank 0 keeps the history."""
        assert self._rounding is not None
        servers = len(rows) // len(self.sequences)
        observed = observations(rows, expected, [len(one) for one in self.sequences] * servers)
        found = self._checks.verdicts(observed, compared, rounding=self._rounding)
        bad = [one for one in found if not one.passed]
        reasons = "; ".join(f"{one.server}: {one.reason}" for one in (bad or found))
        assert self._checks.tolerance is not None
        verdict = CanaryVerdict(
            version=int(version),
            passed=not bad,
            reason=f"version {version} {'failed' if bad else 'passed'} the canary: {reasons}",
            tolerance=float(self._checks.tolerance),
            mismatch_kl=max(mismatch_kl(-one.differences) for one in observed.values()),
            servers=tuple(found),
        )
        content: dict[str, Any] = attrs.asdict(verdict)
        return content
