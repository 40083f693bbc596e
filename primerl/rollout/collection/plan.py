"""How a worker collects: the arguments of ``worker`` that are plain values."""

import attrs

from primerl.types import SamplingParams


@attrs.frozen(kw_only=True)
class Plan:
    """The settings of a worker; see ``primerl.rollout.worker`` for their meaning."""

    params: SamplingParams
    group_size: int
    min_group: int
    groups_per_step: int
    max_staleness: int
    on_stale: str
    retries: int
    quarantine_after: int
    group_timeout_s: float
    timeout_s: float
    await_verification: bool | None = None
