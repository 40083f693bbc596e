"""Metrics of the mismatch between trainer and sampler, and of how far the policy has moved.

    statistics = loss.Statistics(version=step)
    for batch in batches:
        ...
        statistics.add(logprobs, batch.behavior_logprobs, batch.loss_mask, batch.versions,
                       loss=objective, aux=aux)
    metrics = statistics.summary(parallel.all_sum)

Everything is kept as sums, which are added over micro-batches and ranks; means and other quotients
are computed last.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from primerl._common.host_memory import HostMemory, true_rows
from primerl.loss.arguments import checked, require_finite
from primerl.loss.ratio import LOG_RATIO_LIMIT, log_ratio

AllSum = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
QUANTILES = (0.01, 0.5, 0.99)
FINEST_LOG_RATIO = 1e-7
BINS_PER_SIDE = 128
AUX = "tokens/"


class Statistics:
    """Metrics of one policy step, accumulated over its micro-batches, then over ranks.

    Args:
        version: the trainer's version before the step.
        max_staleness: the staleness of the last bucket of ``off_policy_kl``, which also counts
            staler tokens. Tokens newer than the trainer are in no bucket.

    Raises:
        ValueError: ``max_staleness`` is below 1.
    """

    def __init__(self, *, version: int, max_staleness: int = 8) -> None:
        if max_staleness < 1:
            raise ValueError(f"max_staleness={max_staleness}: expected at least 1")
        self._version = version
        self._max_staleness = max_staleness
        self._sums: Counter[str] = Counter()
        self._minibatches = 0
        self._minibatch_ended = True
        self._rows: list[dict[str, Tensor]] = []

    def add(
        self,
        logprobs: Float[Tensor, " t"],
        behavior_logprobs: Float[Tensor, " t"],
        loss_mask: Bool[Tensor, " t"],
        versions: Int[Tensor, " t"],
        *,
        loss: Float[Tensor, ""] | None = None,
        entropy: Float[Tensor, " t"] | None = None,
        aux: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add a micro-batch. All tensors are detached; sums are float64.

        Args:
            logprobs: current logprobs of the trainer.
            behavior_logprobs: logprobs of the sampler.
            loss_mask: true at the trained tokens.
            versions: the policy version that sampled each token.
            loss: this micro-batch's part of the objective.
            entropy: the policy's entropy at each row, in nats, if it was computed.
            aux: the second result of the token loss.

        Raises:
            ValueError: a tensor has the wrong shape or dtype, or ``behavior_logprobs`` is not
                finite at a trained token.
        """
        self._minibatches += self._minibatch_ended
        self._minibatch_ended = False
        sums = token_statistics(
            logprobs,
            behavior_logprobs,
            loss_mask,
            versions,
            version=self._version,
            max_staleness=self._max_staleness,
            entropy=entropy,
            aux=aux,
        )
        if self._minibatches > 1:
            # The weights are no longer those of this version, so a difference is not a mismatch.
            sums["kl_by_staleness"][0] = 0.0
        if loss is not None:
            sums["loss"] = loss.detach().double()
        self._sums.update(sums)
        rows = {"logprobs": logprobs.detach()}
        if entropy is not None:
            rows["entropy"] = entropy.detach()
        self._rows.append(rows)

    def end_minibatch(self) -> list[dict[str, Tensor]]:
        """Record that the optimizer has stepped, so that the weights no longer have a version.

        ``mismatch_kl`` covers only the first minibatch of a step. ``loss`` is the mean over all
        minibatches.

        Returns:
            For each micro-batch of the minibatch, the ``logprobs`` and, if given, the ``entropy``
            of its rows, for ``parallel.gather``, ``packing.unpack`` and ``track.Run.log``.
        """
        self._minibatch_ended = True
        rows, self._rows = self._rows, []
        return rows

    def summary(self, all_sum: AllSum = dict) -> dict[str, float]:
        """Return the metrics of the step, by name.

        - ``loss``: the objective.
        - ``mismatch_kl``: the mean of ``r - 1 - log r`` over the ``mismatch_tokens`` tokens of the
          trainer's own version. It measures only numerics.
        - ``off_policy_kl/s``: the same mean over tokens that are s versions old. It measures
          numerics and the change of the policy.
        - ``effective_sample_size``: ``(sum r)^2 / (n sum r^2)``, from 1 (on policy) to ``1/n``.
        - ``ratio_p1``, ``ratio_p50``, ``ratio_p99``: quantiles of r, exact to 16% of ``log r``.
        - ``entropy``: the mean entropy, in nats.
        - ``tokens/NAME``: the mean of each entry of ``aux``, such as the share of clipped tokens.

        A metric that no token contributes to is left out.

        Args:
            all_sum: adds a dictionary of tensors over ranks, as ``parallel.all_sum`` does; all
                ranks must call it. The default is for a single process.
        """
        metrics = summarize(all_sum(dict(self._sums)))  # type: ignore[arg-type]
        if "loss" in metrics:
            metrics["loss"] /= self._minibatches
        return metrics


@checked()
def mismatch_kl(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    loss_mask: Bool[Tensor, " t"],
    versions: Int[Tensor, " t"],
    *,
    version: int,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """The numerical mismatch of trainer and sampler: the sum of ``r - 1 - log r``, and its count.

    ``r`` is the probability by the trainer over that by the sampler. Only trained tokens *of the
    trainer's own version* are counted: the same weights gave both logprobs, so anything above
    rounding is a difference in numerics, not in policy. The mean, sum over count, is an unbiased,
    non-negative estimate of ``KL(sampler || trainer)`` (k3 of Schulman's "Approximating KL
    divergence", 2020). Sum and count are returned separately, to be added over micro-batches and
    ranks.

    Args:
        logprobs: current logprobs of the trainer.
        behavior_logprobs: logprobs of the sampler.
        loss_mask: true at the trained tokens.
        versions: the policy version that sampled each token.
        version: the version of the trainer's weights, which gave ``logprobs``.

    Raises:
        ValueError: a tensor has the wrong shape or dtype, or ``behavior_logprobs`` is not finite at
            a trained token.
    """
    require_finite("behavior_logprobs", behavior_logprobs, loss_mask)
    same = loss_mask & (versions == version)
    log_r = log_ratio(logprobs.detach(), behavior_logprobs).where(same, 0.0)
    return _excess(log_r).sum(), same.sum()


def _excess(log_r: Tensor) -> Tensor:
    """Compute ``r - 1 - log r`` so that it is exact for small ``log r``."""
    return log_r.expm1() - log_r


@checked()
def token_statistics(
    logprobs: Float[Tensor, " t"],
    behavior_logprobs: Float[Tensor, " t"],
    loss_mask: Bool[Tensor, " t"],
    versions: Int[Tensor, " t"],
    *,
    version: int,
    max_staleness: int = 8,
    entropy: Float[Tensor, " t"] | None = None,
    aux: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Sum over the trained tokens of a micro-batch, for ``summarize``; see ``Statistics.add``."""
    require_finite("behavior_logprobs", behavior_logprobs, loss_mask)
    trained = true_rows(loss_mask)
    log_r = log_ratio(logprobs.detach(), behavior_logprobs).index_select(0, trained).double()
    r = log_r.exp()
    kl = _excess(log_r)
    staleness = (version - versions.index_select(0, trained).long()).clamp(-1, max_staleness)
    buckets = kl.new_zeros(max_staleness + 2, 2)  # the last (-1): newer tokens
    buckets.index_add_(0, staleness % len(buckets), torch.stack([kl, torch.ones_like(kl)], dim=1))
    sums = {
        "kl_by_staleness": buckets[:-1],
        "importance": torch.stack([torch.ones_like(r).sum(), r.sum(), r.square().sum()]),
        "log_ratio_histogram": _histogram(log_r),
    }
    per_token = {AUX + name: value for name, value in (aux or {}).items()}
    if entropy is not None:
        per_token["entropy"] = entropy
    for name, value in per_token.items():
        if value.shape != loss_mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, but loss_mask has shape "
                f"{tuple(loss_mask.shape)}: expected the same"
            )
        chosen = value.detach().index_select(0, trained).double()
        sums[name] = torch.stack([chosen.sum(), torch.ones_like(chosen).sum()])
    return sums


def summarize(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """Compute metrics from the sums of ``token_statistics``; see ``Statistics.summary``."""
    metrics: dict[str, float] = {}
    for name, sums in HostMemory().copied(totals.items()):
        if name == "kl_by_staleness":
            for staleness, (total, count) in enumerate(sums.tolist()):
                if count:
                    key = f"off_policy_kl/{staleness}" if staleness else "mismatch_kl"
                    metrics[key] = total / count
                if count and not staleness:
                    metrics["mismatch_tokens"] = count
        elif name == "importance":
            count, total, squares = sums.tolist()
            if count:
                metrics["effective_sample_size"] = total**2 / (count * squares)
        elif name == "log_ratio_histogram":
            metrics |= _quantiles(sums)
        elif sums.ndim == 0:
            metrics[name] = sums.item()
        elif sums[1] > 0:
            metrics[name] = (sums[0] / sums[1]).item()
    return metrics


def _edges(device: torch.device) -> Tensor:
    """Edges of the log-ratio's bins, evenly spaced in its logarithm and mirrored around zero."""
    exponents = torch.linspace(0, 1, BINS_PER_SIDE, dtype=torch.float64, device=device)
    side = FINEST_LOG_RATIO * (LOG_RATIO_LIMIT / FINEST_LOG_RATIO) ** exponents
    return torch.cat([-side.flip(0), side])


def _histogram(log_r: Tensor) -> Tensor:
    edges = _edges(log_r.device)
    counted = log_r.isfinite().double()  # bucketize puts NaN into the last bin
    bins = counted.new_zeros(len(edges) + 1)  # unlike bincount, without a wait for the device
    return bins.index_add_(0, torch.bucketize(log_r, edges), counted)


def _quantiles(histogram: Tensor) -> dict[str, float]:
    if not histogram.sum() > 0:
        return {}
    edges = _edges(histogram.device)
    middles = torch.cat([edges[:1], (edges[1:] + edges[:-1]) / 2, edges[-1:]])
    below = histogram.cumsum(0) / histogram.sum()
    places = torch.searchsorted(below, below.new_tensor(QUANTILES))
    values = middles[places.clamp(max=len(middles) - 1)].exp().tolist()
    return {f"ratio_p{100 * q:g}": value for q, value in zip(QUANTILES, values, strict=True)}
