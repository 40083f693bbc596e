"""Expert routes of requests that are batched together."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, runtime_checkable

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


class _Recording:
    """The routes of a request's tokens, from the first one on."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._versions: list[PolicyVersion] = []

    def add(self, rows: np.ndarray, *, start: int, version: PolicyVersion) -> None:
        """Record the rows of tokens from ``start`` on, but of none for a second time.

        The first row of a token is the one whose logprob was sampled from; a request that is
        recomputed has others.
        """
        recorded = len(self._versions) - start
        if not 0 <= recorded < len(rows):
            return
        fresh = rows[recorded:].copy()
        self._parts.append(fresh)
        self._versions += [version] * len(fresh)

    def between(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows of tokens ``start`` to ``end - 1``, and their versions.

        Raises:
            RuntimeError: they end earlier.
        """
        if len(self._versions) < end:
            raise RuntimeError(
                f"no expert routes were recorded for token {len(self._versions)} of a request"
            )
        versions = np.array(self._versions[start:end], np.int32)
        return np.concatenate(self._parts)[start:end], versions


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
        self._recordings: dict[str, _Recording] = {}

    def follow(self, manager: Any, version: Callable[[], PolicyVersion]) -> None:
        """Record the batches of ``manager``, whose forward passes are of the current version."""
        self._manager = manager
        self._version = version

    def begin(self, request_id: str, *, continues: str | None = None) -> None:
        """Record a request; what was recorded under the id that it ``continues`` stays its own."""
        earlier = None if continues is None else self._recordings.pop(continues, None)
        self._recordings[request_id] = earlier or _Recording()

    def forget(self, request_id: str) -> None:
        """Drop what was recorded of a request."""
        self._recordings.pop(request_id, None)

    def rows(self, request_id: str, *, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The routes of a request's tokens from ``start`` to before ``end``, and their versions.

        Forgets the request.

        Raises:
            RuntimeError: a token was not processed.
        """
        return self._recordings.pop(request_id).between(start, end)

    def close(self) -> None:
        """Take the hooks off the model."""
        self._entered.close()

    def _record(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        """After a forward pass, in the manager's thread."""
        if self._manager is None or self._manager.batch_processor is None:
            return
        # Sets have no order. Sorting all at once here saves each request from it later.
        rows = np.sort(self._captured.rows.numpy(force=True), axis=-1)
        version = self._version()
        row = 0
        for scheduled in self._manager.batch_processor.inputs_and_outputs.requests_in_batch:
            count = scheduled.query_length
            recording = self._recordings.get(scheduled.state.request_id)
            if recording is not None:
                start = scheduled.state.position_offset - count  # it was advanced when scheduled
                recording.add(rows[row : row + count], start=start, version=version)
            row += count
