"""Expert routes of requests that are batched together."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, runtime_checkable

import attrs
import numpy as np
from torch import nn

from primerl.types import PolicyVersion


@runtime_checkable
class CapturedRows(Protocol):
    """What ``replay.capture`` yields."""

    @property
    def rows(self) -> Any:
        """The experts of each token of the latest forward pass, a tensor ``[t, layers, k]``."""
        ...


Capture = Callable[[nn.Module], AbstractContextManager[CapturedRows]]
"""Records the experts that a model's tokens are sent to: ``replay.capture``."""


@attrs.frozen
class _Span:
    """The routes of one request's tokens in one forward pass."""

    start: int
    rows: np.ndarray
    version: PolicyVersion


class RouteRecorder:
    """Divides the routes of each forward pass among the requests of its batch.

    Args:
        model: that serves; hooks stay on it until ``close``.
        capture: ``replay.capture``.
    """

    def __init__(self, model: nn.Module, capture: Capture) -> None:
        self._entered = ExitStack()
        self._captured = self._entered.enter_context(capture(model))
        handle = model.register_forward_hook(self._record)
        self._entered.callback(handle.remove)
        self._manager: Any = None
        self._version: Callable[[], PolicyVersion] = int
        self._spans: dict[str, list[_Span]] = {}

    def follow(self, manager: Any, version: Callable[[], PolicyVersion]) -> None:
        """Record the batches of ``manager``, whose forward passes are of the current version."""
        self._manager = manager
        self._version = version

    def begin(self, request_id: str, *, continues: str | None = None) -> None:
        """Record a request; what was recorded under the id that it ``continues`` stays its own."""
        earlier = [] if continues is None else self._spans.pop(continues, [])
        self._spans[request_id] = earlier

    def forget(self, request_id: str) -> None:
        """Drop what was recorded of a request."""
        self._spans.pop(request_id, None)

    def rows(self, request_id: str, *, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The routes of a request's tokens from ``start`` to before ``end``, and their versions.

        Where a token was processed several times, the first one counts: it is the one whose
        logprob was sampled from. Forgets the request.

        Raises:
            RuntimeError: a token was not processed.
        """
        spans = self._spans.pop(request_id)
        shape = spans[0].rows.shape[1:] if spans else (0, 0)
        rows = np.full((end - start, *shape), -1, np.int16)
        versions = np.full(end - start, -1, np.int32)
        for span in spans:
            tokens = np.arange(span.start, span.start + len(span.rows))
            new = (tokens >= start) & (tokens < end)
            new[new] = versions[tokens[new] - start] < 0
            rows[tokens[new] - start] = span.rows[new]
            versions[tokens[new] - start] = span.version
        if (versions < 0).any():
            missing = start + int(np.flatnonzero(versions < 0)[0])
            raise RuntimeError(f"no expert routes were recorded for token {missing} of a request")
        return rows, versions

    def close(self) -> None:
        """Take the hooks off the model."""
        self._entered.close()

    def _record(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        """After a forward pass, in the manager's thread."""
        if self._manager is None or self._manager.batch_processor is None:
            return
        rows = self._captured.rows.numpy(force=True)
        version = self._version()
        row = 0
        for scheduled in self._manager.batch_processor.inputs_and_outputs.requests_in_batch:
            count = scheduled.query_length
            spans = self._spans.get(scheduled.state.request_id)
            if spans is not None:
                start = scheduled.state.position_offset - count  # it was advanced when scheduled
                spans.append(_Span(start, rows[row : row + count].copy(), version))
            row += count
