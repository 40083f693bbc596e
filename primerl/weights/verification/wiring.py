"""``wiring_test``, which tests that every tensor of the trainer reaches the engines."""

import logging
import operator
import re
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from primerl._common.ranks import is_first_rank, local_part, on_first_rank, saved_tensors
from primerl.weights.transports.adapter import Adapter
from primerl.weights.transports.transport import Transport
from primerl.weights.verification.canary import Canary
from primerl.weights.verification.scoring import movement, rms, trainer_logprobs

LENGTH = 96  # tokens of the scored sequence: enough for large changes
# A perturbation is visible if it changes the logprobs by VISIBLE nats (root mean square), or with
# the largest of SCALES by FAINT nats, and in either case by at least ABOVE_NOISE times the noise.
VISIBLE = 0.02
FAINT = 0.001
ABOVE_NOISE = 20.0
SCALES = tuple(0.05 * 2.0**k for k in range(10))  # times a tensor's root mean square
ARRIVED = (0.8, 1.2)  # the share of the predicted change that must be seen
# The unpredicted part of a change may be REST of the predicted change plus REST_NOISE times the
# noise, but at most REST_MOST of the predicted change.
REST = 0.02
REST_NOISE = 5.0
REST_MOST = 0.3

log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class GroupWiring:
    """The result of the wiring test for one group of tensors, the same tensor of every layer."""

    group: str
    tensors: int
    scale: float
    """The perturbation's standard deviation, divided by the tensor's root mean square."""
    predicted: float
    """Root mean square change of the trainer's logprobs, in nats."""
    moved: Mapping[str, float]
    """The share of the predicted change that each server showed."""
    rest: Mapping[str, float]
    """The root mean square of each server's deviation from the predicted change, divided by
    ``predicted``."""
    arrived: bool | None
    """Whether the group arrived; None if no perturbation was visible, so nothing was verified."""


@attrs.frozen(kw_only=True)
class WiringReport:
    """The results of a wiring test for all groups of tensors; ``str`` formats them as a table."""

    groups: tuple[GroupWiring, ...]
    seconds: float

    @property
    def missing(self) -> tuple[str, ...]:
        """The groups that did not arrive as they were sent."""
        return tuple(one.group for one in self.groups if one.arrived is False)

    @property
    def unseen(self) -> tuple[str, ...]:
        """The groups in which no perturbation was visible, so that they were not verified."""
        return tuple(one.group for one in self.groups if one.arrived is None)

    def __str__(self) -> str:
        width = max((len(one.group) for one in self.groups), default=5)
        lines = [f"{'group':{width}}  tensors  predicted      moved       rest  arrived"]
        words = {True: "yes", False: "NO", None: "unseen"}
        lines += [
            f"{one.group:{width}}  {one.tensors:7d}  {one.predicted:9.3g}  "
            f"{_span(one.moved):>9}  {_span(one.rest):>9}  {words[one.arrived]}"
            for one in self.groups
        ]
        return "\n".join([*lines, f"{len(self.groups)} groups in {self.seconds:.1f} s"])


def wiring_test(
    model: nn.Module,
    transport: Transport,
    canary: Canary,
    *,
    version: int,
    restore: bool = True,
) -> WiringReport:
    """Perturb each group of tensors, publish, and check that engines change as the trainer does.

    A group is a parameter or saved buffer of all layers: ``layers.*.self_attn.q_proj.weight``. The
    test adds noise to the group and publishes the result as ``version``. The noise is the least
    that is visible in the trainer's own forward pass: it changes the logprobs by 0.02 nats and 20
    times the noise of the comparison, or by 0.001 nats if no noise changes them more. A server has
    received the group if it shows between 0.8 and 1.2 of the predicted change and deviates from the
    prediction by at most 2% of it plus 5 times the noise, and at most 30% of it.

    At the end, and after any error, the weights are restored bit for bit and published as
    ``version``. Then the canary must pass. The test takes one publication per group, and two more.
    Call it on all ranks before rollouts start: while it runs, engines serve other weights than
    their version says.

    Args:
        model: the trainer's model, which ``transport`` publishes and ``canary`` scores.
        transport: publishes the model.
        canary: probes all engines.
        version: the version of the unperturbed weights.
        restore: whether to publish the restored weights if all groups arrived. With False, the
            engines keep the last perturbation, so publish and check ``version`` next.

    Raises:
        RuntimeError: a group did not arrive (the message has the table), or the canary did not pass
            before the test or with the restored weights.
    """
    began = time.monotonic()
    transport.publish(version)
    _require_passed(canary, version, "before any perturbation")
    left = False
    try:
        rows = _perturb_each(model, transport, canary, version=version)
        left = not restore and all(one.arrived is not False for one in rows)
    finally:
        if not left:
            transport.publish(version)
    if not left:
        _require_passed(canary, version, "with the weights restored")
    report = WiringReport(groups=tuple(rows), seconds=time.monotonic() - began)
    if report.missing:
        raise RuntimeError(
            "wiring test: these tensors of the trainer do not reach the engines as they are sent: "
            f"{', '.join(report.missing)}\n{report}"
        )
    if report.unseen and is_first_rank():
        log.warning(
            "wiring test: no perturbation was visible, so these tensors were not verified: %s",
            report.unseen,
        )
    return report


def tensor_groups(model: nn.Module) -> dict[str, list[tuple[str, Tensor]]]:
    """Group floating-point parameters and saved buffers by their name without layer numbers.

    A tensor that is shared under two names is in only one group.
    """
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in saved_tensors(model).items():
        if tensor.is_floating_point():
            pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
            groups.setdefault(pattern, []).append((name, tensor))
    return groups


@attrs.frozen
class _Measured:
    """Logprobs of the sequences, computed by the trainer and by each server."""

    expected: list[np.ndarray]
    seen: Mapping[str, np.ndarray]

    @property
    def scores(self) -> np.ndarray:
        return np.concatenate([row[1:] for row in self.expected])

    @property
    def noise(self) -> float:
        return max(rms(one - self.scores) for one in self.seen.values())


def _perturb_each(
    model: nn.Module, transport: Any, canary: Canary, *, version: int
) -> list[GroupWiring]:
    """Publish the weights once per group, with noise in that group only.

    Afterwards, engines still have the noise of the last group.
    """
    # The sequence is reversed, so that prefixes that were cached under perturbed weights match no
    # sequence that is checked later.
    sequences = [canary.sequences[0][::-1][:LENGTH]]
    before = _Measured(trainer_logprobs(model, sequences), canary.scores(sequences))
    rows = []
    groups = tensor_groups(model)
    if isinstance(transport, Adapter):  # only the adapter's tensors are sent
        own = re.compile(rf"\.lora_[^.]+\.{re.escape(transport.adapter)}\.")
        groups = {group: tensors for group, tensors in groups.items() if own.search(group)}
    for group, tensors in groups.items():
        with _perturbed(model, tensors, sequences, before) as (scale, predicted):
            seen = {}
            if scale is not None:
                transport.publish(version)
                seen = canary.scores(sequences)
        rows.append(_row(group, tensors, scale, predicted, before, seen))
    return rows


@contextmanager
def _perturbed(
    model: nn.Module,
    tensors: list[tuple[str, Tensor]],
    sequences: list[tuple[int, ...]],
    before: _Measured,
) -> Iterator[tuple[float | None, np.ndarray]]:
    """Add visible noise to a group for the body.

    Yields the scale of the noise (None if no noise is visible) and the predicted change.
    """
    kept = [local_part(tensor).clone() for _, tensor in tensors]
    least = ABOVE_NOISE * before.noise
    predicted = np.zeros(0)
    try:
        found = None
        for scale in SCALES:
            for (name, tensor), original in zip(tensors, kept, strict=True):
                _add_noise(local_part(tensor), original, scale, seed=zlib.crc32(name.encode()))
            expected = trainer_logprobs(model, sequences)
            predicted = np.concatenate([row[1:] for row in expected]) - before.scores
            enough = max(FAINT if scale == SCALES[-1] else VISIBLE, least)
            # Rank 0 decides, because ranks' results may differ in the last bit.
            if on_first_rank(partial(operator.ge, rms(predicted), enough)):
                found = scale
                break
        yield found, predicted
    finally:
        for (_, tensor), original in zip(tensors, kept, strict=True):
            local_part(tensor).copy_(original)


def _add_noise(target: Tensor, original: Tensor, scale: float, *, seed: int) -> None:
    """Set ``target`` to the original plus noise, which is the same on ranks with the same shard."""
    if not original.numel():
        return
    generator = torch.Generator(device=original.device).manual_seed(seed)
    noise = torch.randn(original.shape, generator=generator, device=original.device)
    size = original.float().square().mean().sqrt()
    size = torch.where(size > 0, size, 0.02)  # a new bias may be all zero
    target.copy_(original.float() + scale * size * noise)


def _row(
    group: str,
    tensors: list[tuple[str, Tensor]],
    scale: float | None,
    predicted: np.ndarray,
    before: _Measured,
    seen: Mapping[str, np.ndarray],
) -> GroupWiring:
    """Evaluate the servers' logprobs ``seen``, which are empty if no noise was visible."""
    moved, rest, arrived = {}, {}, None
    for server, scores in seen.items():
        change = scores - before.seen.get(server, before.scores)
        moved[server] = movement(predicted, change)[0]
        rest[server] = rms(change - predicted) / rms(predicted)
    if scale is not None:
        low, high = ARRIVED
        most = min(REST_MOST, REST + REST_NOISE * before.noise / rms(predicted))
        near = all(low < one < high for one in moved.values())
        arrived = near and all(one < most for one in rest.values())
    return GroupWiring(
        group=group,
        tensors=len(tensors),
        scale=SCALES[-1] if scale is None else scale,
        predicted=rms(predicted),
        moved=moved,
        rest=rest,
        arrived=arrived,
    )


def _require_passed(canary: Canary, version: int, when: str) -> None:
    verdict = canary.check(version)
    if not verdict.passed:
        raise RuntimeError(f"wiring test, {when}: {verdict.reason}")


def _span(values: Mapping[str, float]) -> str:
    numbers = sorted(values.values())
    if not numbers:
        return "-"
    low, high = f"{numbers[0]:.2f}", f"{numbers[-1]:.2f}"
    return low if low == high else f"{low}..{high}"
