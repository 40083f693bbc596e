"""``Transport``, what all transports have in common, and publications that are still under way."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import attrs

from primerl.weights.transports.receipts import Receipt

T = TypeVar("T", bound="Transport")

_ABANDONED_S = 10.0  # after an error, because other ranks may have died


class PendingPublication:
    """A publication that ``start`` began and ``wait`` ends.

        pending = transport.start(version)
        ...  # the weights are sent meanwhile
        receipt = pending.wait()

    Args:
        version: the version that is published.
        finish: returns the receipt, once the engines serve the version. All ranks call it.
        held_s: the seconds that ``start`` took.
        abandon: waits for what still runs, at most so many seconds, and ignores its errors.
    """

    def __init__(
        self,
        version: int,
        finish: Callable[[], Receipt],
        *,
        held_s: float = 0.0,
        abandon: Callable[[float], object] = lambda _: None,
    ) -> None:
        self.version = version
        self.abandon = abandon
        self._finish = finish
        self._held_s = held_s
        self._outcome: Receipt | Exception | None = None

    @property
    def ended(self) -> bool:
        """Whether ``wait`` has returned or raised."""
        return self._outcome is not None

    def wait(self) -> Receipt:
        """Wait until every engine serves the version, and return the receipt; all ranks call it.

        Called again, it returns the same receipt, or raises the same error.

        Raises:
            RuntimeError: the weights did not arrive, or not in time.
        """
        if self._outcome is None:
            began = time.perf_counter()
            try:
                receipt = self._finish()
            except Exception as error:  # raised again by each further call
                self._outcome = error
                raise
            waited_s = self._held_s + time.perf_counter() - began
            self._outcome = attrs.evolve(receipt, waited_s=waited_s)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class Transport:
    """Base class of transports, which publish the trainer's weights to engines.

    As a context manager, it waits for a publication that is under way when it is left.
    """

    _pending: PendingPublication | None = None

    def publish(self, version: int) -> Receipt:
        """Load the weights of ``version`` into every engine; return when all serve them."""
        raise NotImplementedError

    def start(self, version: int) -> PendingPublication:
        """Begin to publish ``version``; the weights may change once this returns.

        A transport that can't send weights while training goes on publishes them at once.
        """
        began = time.perf_counter()
        receipt = self.publish(version)
        return PendingPublication(version, lambda: receipt, held_s=time.perf_counter() - began)

    def require_idle(self) -> None:
        """Check that no publication is under way.

        Raises:
            RuntimeError: one is.
        """
        if self._pending is not None and not self._pending.ended:
            raise RuntimeError(
                f"version {self._pending.version} is still being published: call wait() on what "
                "start() returned before the next version is published"
            )

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pending is None or self._pending.ended:
            return
        if error is None:
            self._pending.wait()
        else:
            self._pending.abandon(_ABANDONED_S)
