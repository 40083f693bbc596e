"""Bytes that travel in a step: expert routes to the trainer, and weights to the servers."""

import attrs
import numpy as np
from torch import nn

from primerl import replay
from primerl._common.expert_modules import expert_modules
from primerl.replay.codec import column_bytes
from primerl.weights.transports import delta

_SAMPLE = 2**20
"""16-bit words of which a difference is encoded, to see its size."""


@attrs.frozen(kw_only=True)
class Traffic:
    """Bytes of a step."""

    route_token: int
    """Of the routes of a token, before they are compressed (to 0.5 to 0.8: ``replay.encode``)."""
    routes: int
    """Of the tokens of a step."""
    weights: int
    """Of a full publication, which each server reads."""
    weights_delta: int
    """Of a difference to the version before."""


def plan_traffic(
    model: nn.Module, *, step_tokens: int, published: int, changed: float = 0.02
) -> Traffic:
    """What a step sends.

    Args:
        model: before it is sharded.
        step_tokens: of all rollouts of a step.
        published: bytes of the weights, ``ServerPlan.published``.
        changed: the part of 16-bit words that a step changes. Measured elsewhere: 0.01 to 0.03 in
            bfloat16 at the learning rates of policy training, less in FP8.

    Raises:
        ValueError: ``changed`` is not within [0, 1].
    """
    if not 0 <= changed <= 1:
        raise ValueError(f"changed is {changed}, expected a part of all words, 0 to 1")
    token = 0
    if expert_modules(model):
        routes = replay.shape(model)
        token = column_bytes(1, len(routes.layers), routes.k, routes.experts)
    return Traffic(
        route_token=token,
        routes=token * step_tokens,
        weights=published,
        weights_delta=int(published * _delta_part(changed)),
    )


def _delta_part(changed: float) -> float:
    """The size of the transport's own difference, in parts of a tensor's bytes."""
    generator = np.random.default_rng(0)
    old = generator.integers(0, 2**16, _SAMPLE, dtype=np.uint16)
    places = generator.random(_SAMPLE) < changed
    # Most changes are by one: to the next number that 16 bits can tell apart.
    new = np.where(places, old + generator.choice([-1, 1], _SAMPLE), old).astype(np.uint16)
    encoded = delta.encode(old.view(np.uint8), new.view(np.uint8))
    return 1.0 if encoded is None else len(encoded) / old.nbytes
