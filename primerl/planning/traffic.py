"""Traffic of a step in bytes: expert routes to the trainer, and weights to the servers."""

import attrs
import numpy as np
from torch import nn

from primerl import replay
from primerl._common.expert_modules import expert_modules
from primerl.replay.codec import column_bytes
from primerl.weights.transports.publications import delta

_SAMPLE = 2**20
"""Number of 16-bit words whose delta is encoded, to measure its size."""


@attrs.frozen(kw_only=True)
class Traffic:
    """Numbers of bytes that are sent in one training step."""

    route_token: int
    """Bytes of routes per token. ``replay.encode`` compresses them to 0.5 to 0.8 of that."""
    routes: int
    """Bytes of routes of all tokens of a step, before compression."""
    weights: int
    """Bytes of a full publication."""
    weights_delta: int
    """Bytes of the delta to the previous version."""


def plan_traffic(
    model: nn.Module, *, step_tokens: int, published: int, changed: float = 0.02
) -> Traffic:
    """Estimate the traffic of a step.

    Args:
        model: the model before it is sharded.
        step_tokens: the number of tokens of all rollouts of a step.
        published: bytes of the weights, ``ServerPlan.published``.
        changed: the fraction of 16-bit words that a step changes. Measured elsewhere: 0.01 to 0.03
            in bfloat16 at the learning rates of policy training, less in FP8.

    Raises:
        ValueError: ``changed`` is not within [0, 1].
    """
    if not 0 <= changed <= 1:
        raise ValueError(f"changed is {changed}, expected a fraction of all words, 0 to 1")
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
    """Measure the size of the delta transport's encoding, as a fraction of a tensor's bytes."""
    generator = np.random.default_rng(0)
    old = generator.integers(0, 2**16, _SAMPLE, dtype=np.uint16)
    places = generator.random(_SAMPLE) < changed
    # Most changes are to the adjacent 16-bit number, so by one as a word.
    new = np.where(places, old + generator.choice([-1, 1], _SAMPLE), old).astype(np.uint16)
    encoded = delta.encode(old.view(np.uint8), new.view(np.uint8))
    return 1.0 if encoded is None else len(encoded) / old.nbytes
