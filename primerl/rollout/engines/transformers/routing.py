"""Expert routes of requests, recorded in each forward pass and kept with the pages of the cache."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import nn

from primerl.rollout.engines.transformers.pages import PAGE_TOKENS, Page
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


class RequestRoutes:
    """The expert routes of a request's tokens, from the first token on.

    A token's routes are those of the forward pass that sampled the next token. If the request is
    computed again, its tokens get other routes, which are ignored.
    """

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._count = 0

    def read(self, pages: Sequence[Page], end: int) -> None:
        """Copy the routes of the tokens up to ``end`` that are not recorded yet from the pages."""
        while self._count < end:
            page = pages[self._count // PAGE_TOKENS]
            assert page.routes is not None
            experts, versions = page.routes
            first = self._count % PAGE_TOKENS
            rows = slice(first, min(PAGE_TOKENS, first + end - self._count))
            self._parts.append(experts[rows].copy())
            self._versions.append(versions[rows].copy())
            self._count += len(self._parts[-1])

    def between(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of tokens ``start`` to ``end - 1``, and their versions.

        Raises:
            RuntimeError: fewer tokens were recorded.
        """
        if self._count < end:
            raise RuntimeError(f"no expert routes were recorded for token {self._count}")
        return np.concatenate(self._parts)[start:end], np.concatenate(self._versions)[start:end]


class BatchRoutes:
    """The expert routes of the latest forward pass.

    Args:
        model: the serving model; hooks stay on it until ``close``.
        capture: ``replay.capture``.
    """

    def __init__(self, model: nn.Module, capture: Capture) -> None:
        self._entered = ExitStack()
        self._captured = self._entered.enter_context(capture(model))

    def rows(self) -> np.ndarray:
        """Return the experts of each token, ``[t, layers, k]``, in ascending order."""
        # The order of a token's experts has no meaning; sort all here rather than per request.
        rows: np.ndarray = np.sort(self._captured.rows.numpy(force=True), axis=-1)
        return rows

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._entered.close()


def write_routes(
    page: Page, rows: np.ndarray, first: int, version: PolicyVersion | np.ndarray
) -> None:
    """Store the experts of some tokens of a page, beginning with its token ``first``."""
    if page.routes is None:
        experts = np.zeros((PAGE_TOKENS, *rows.shape[1:]), rows.dtype)
        page.routes = (experts, np.zeros(PAGE_TOKENS, np.int32))
    experts, versions = page.routes
    experts[first : first + len(rows)] = rows
    versions[first : first + len(rows)] = version
