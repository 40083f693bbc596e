"""Recording of expert routes for requests that are batched together."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import nn

from primerl.types import PolicyVersion


@runtime_checkable
class CapturedRows(Protocol):
    """The captured experts of a forward pass, as ``replay.capture`` yields them."""

    @property
    def rows(self) -> Any:
        """The experts of each token of the latest forward pass, a tensor ``[t, layers, k]``."""
        ...


Capture = Callable[[nn.Module], AbstractContextManager[CapturedRows]]
"""A function that records the experts of a model's tokens, such as ``replay.capture``."""


class _RequestRoutes:
    """The expert routes of a request's tokens, from the first token on."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._versions: list[PolicyVersion] = []

    def add(self, rows: np.ndarray, *, start: int, version: PolicyVersion) -> None:
        """Record the rows of tokens from ``start`` on, except those recorded before.

        A token's first row is the one whose forward pass sampled the next token. If the request is
        recomputed, its tokens get other rows, which are ignored.
        """
        recorded = len(self._versions) - start
        if not 0 <= recorded < len(rows):
            return
        fresh = rows[recorded:].copy()
        self._parts.append(fresh)
        self._versions += [version] * len(fresh)

    def between(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of tokens ``start`` to ``end - 1``, and their versions.

        Raises:
            RuntimeError: fewer tokens were recorded.
        """
        if len(self._versions) < end:
            raise RuntimeError(
                f"no expert routes were recorded for token {len(self._versions)} of a request"
            )
        versions = np.array(self._versions[start:end], np.int32)
        return np.concatenate(self._parts)[start:end], versions


class BatchRoutes:
    """Splits the expert routes of each forward pass among the requests of its batch.

    Args:
        model: the serving model; hooks stay on it until ``close``.
        capture: ``replay.capture``.
    """

    def __init__(self, model: nn.Module, capture: Capture) -> None:
        self._entered = ExitStack()
        self._captured = self._entered.enter_context(capture(model))
        handle = model.register_forward_hook(self._record)
        self._entered.callback(handle.remove)
        self._manager: Any = None
        self._version: Callable[[], PolicyVersion] = int
        self._recordings: dict[str, _RequestRoutes] = {}

    def follow(self, manager: Any, version: Callable[[], PolicyVersion]) -> None:
        """Record the batches of ``manager``; each forward pass has the current version."""
        self._manager = manager
        self._version = version

    def begin(self, request_id: str, *, continues: str | None = None) -> None:
        """Begin to record a request; keep what was recorded under the id that it ``continues``."""
        earlier = None if continues is None else self._recordings.pop(continues, None)
        self._recordings[request_id] = earlier or _RequestRoutes()

    def forget(self, request_id: str) -> None:
        """Drop the recorded routes of a request."""
        self._recordings.pop(request_id, None)

    def rows(self, request_id: str, *, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of tokens ``start`` to ``end - 1`` of a request, and their versions.

        The request is then forgotten.

        Raises:
            RuntimeError: a token was not processed.
        """
        return self._recordings.pop(request_id).between(start, end)

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._entered.close()

    def _record(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        """Record a forward pass; a forward hook, called in the manager's thread."""
        if self._manager is None or self._manager.batch_processor is None:
            return
        # The order of a token's experts has no meaning; sort all here rather than per request.
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
