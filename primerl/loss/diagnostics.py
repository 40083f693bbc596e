"""Metrics that say whether trainer and sampler agree, and how far the policy has moved.

    statistics = loss.Statistics(version=step)
    for batch in batches:
        ...
        statistics.add(logprobs, batch.behavior_logprobs, batch.loss_mask, batch.versions,
                       loss=objective, aux=aux)
    metrics = statistics.summary(parallel.all_sum)

Everything is kept as sums, which add up over micro-batches and ranks; quotients come last.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from primerl.loss.arguments import checked, require_finite
from primerl.loss.ratio import LOG_RATIO_LIMIT, log_ratio

AllSum = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
QUANTILES = (0.01, 0.5, 0.99)
FINEST_LOG_RATIO = 1e-7
BINS_PER_SIDE = 128
AUX = "tokens/"


class Statistics:
    """The metrics of one policy step, added up over its micro-batches; then over ranks.

    Args:
        version: the trainer's, before the step.
        max_staleness: the last bucket of ``off_policy_kl``, which counts staler tokens too. Tokens
            newer than the trainer count in none.

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
        """Add a micro-batch. Nothing here has a gradient; sums are float64.

        Args:
            logprobs: by the trainer, now.
            behavior_logprobs: by the sampler.
            loss_mask: the trained tokens.
            versions: the version that sampled each token.
            loss: this micro-batch's part of the objective.
            entropy: of the policy at each row, in nats, if it was computed.
            aux: what the token loss returned beside the loss.

        Raises:
            ValueError: the tensors do not fit, or ``behavior_logprobs`` is not finite at a trained
                token.
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
            # The trainer has moved on from the version that it began with: this is no mismatch.
            sums["kl_by_staleness"][0] = 0.0
        if loss is not None:
            sums["loss"] = loss.detach().double()
        self._sums.update(sums)
        rows = {"logprobs": logprobs.detach()}
        if entropy is not None:
            rows["entropy"] = entropy.detach()
        self._rows.append(rows)

    def end_minibatch(self) -> list[dict[str, Tensor]]:
        """Note that the optimizer stepped: later micro-batches meet weights of no version.

        ``mismatch_kl`` is then of the first minibatch, and ``loss`` the mean over all of them.

        Returns:
            For each micro-batch of the minibatch, the ``logprobs`` and, if given, the ``entropy``
            of its rows: for ``parallel.gather``, ``packing.unpack`` and ``track.Run.log``.
        """
        self._minibatch_ended = True
        rows, self._rows = self._rows, []
        return rows

    def summary(self, all_sum: AllSum = dict) -> dict[str, float]:
        """The metrics of the step.

        - ``loss``: the objective.
        - ``mismatch_kl``: mean of ``r - 1 - log r`` over tokens of the trainer's own version,
          ``mismatch_tokens`` many: numerics.
        - ``off_policy_kl/s``: the same over tokens s versions old: numerics and policy.
        - ``effective_sample_size``: ``(sum r)^2 / (n sum r^2)``, from 1 (on policy) to ``1/n``.
        - ``ratio_p1``, ``ratio_p50``, ``ratio_p99``: quantiles of r, exact to 16% of ``log r``.
        - ``entropy``: mean, in nats.
        - ``tokens/NAME``: the mean of each entry of ``aux``: the share clipped, dropped and so on.

        A metric without a token is left out.

        Args:
            all_sum: adds tensors by name over ranks, such as ``parallel.all_sum``; by default, this
                process is the only one. All ranks call it.
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
    """The numerical distance of trainer and sampler: the sum and the count of ``r - 1 - log r``.

    ``r`` is trainer over sampler, over the trained tokens *whose version is the trainer's*: the
    same weights gave both logprobs, so anything above rounding is a difference in numerics, not in
    policy. An unbiased, non-negative estimate of ``KL(sampler || trainer)`` (k3 of Schulman's
    "Approximating KL divergence", 2020). Sum and count are returned apart, to be added over
    micro-batches and ranks; the mean is their quotient.

    Args:
        logprobs: by the trainer, now.
        behavior_logprobs: by the sampler.
        loss_mask: the trained tokens.
        versions: the version that sampled each token.
        version: the trainer's version: of the weights that gave ``logprobs``.

    Raises:
        ValueError: the tensors do not fit, or ``behavior_logprobs`` is not finite at a trained
            token.
    """
    require_finite("behavior_logprobs", behavior_logprobs, loss_mask)
    same = loss_mask & (versions == version)
    log_r = log_ratio(logprobs.detach(), behavior_logprobs).where(same, 0.0)
    return _excess(log_r).sum(), same.sum()


def _excess(log_r: Tensor) -> Tensor:
    """``r - 1 - log r``, exact for small ``log r``."""
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
    """Sums over the trained tokens of a micro-batch, for ``summarize``: see ``Statistics.add``."""
    require_finite("behavior_logprobs", behavior_logprobs, loss_mask)
    trained = loss_mask.nonzero().squeeze(1)  # once: a device is waited for
    log_r = log_ratio(logprobs.detach(), behavior_logprobs).index_select(0, trained).double()
    r = log_r.exp()
    kl = _excess(log_r)
    staleness = (version - versions.index_select(0, trained).long()).clamp(-1, max_staleness)
    buckets = kl.new_zeros(max_staleness + 2, 2)  # the last, -1, is of what is newer
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
    """Metrics from the sums of ``token_statistics``: see ``Statistics.summary``."""
    metrics: dict[str, float] = {}
    for name, sums in ((name, sums.cpu()) for name, sums in totals.items()):
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
    """Where bins of the log-ratio begin: evenly spaced in its logarithm, mirrored around zero."""
    exponents = torch.linspace(0, 1, BINS_PER_SIDE, dtype=torch.float64, device=device)
    side = FINEST_LOG_RATIO * (LOG_RATIO_LIMIT / FINEST_LOG_RATIO) ** exponents
    return torch.cat([-side.flip(0), side])


def _histogram(log_r: Tensor) -> Tensor:
    edges = _edges(log_r.device)
    counted = log_r.isfinite().double()  # NaN would count as the largest of all
    return torch.bincount(torch.bucketize(log_r, edges), counted, minlength=len(edges) + 1)


def _quantiles(histogram: Tensor) -> dict[str, float]:
    if not histogram.sum() > 0:
        return {}
    edges = _edges(histogram.device)
    middles = torch.cat([edges[:1], (edges[1:] + edges[:-1]) / 2, edges[-1:]])
    below = histogram.cumsum(0) / histogram.sum()
    places = torch.searchsorted(below, below.new_tensor(QUANTILES))
    values = middles[places.clamp(max=len(middles) - 1)].exp().tolist()
    return {f"ratio_p{100 * q:g}": value for q, value in zip(QUANTILES, values, strict=True)}
