"""``Transport``, what all transports have in common, and publications that are still under way."""

import operator
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, TypeVar

import attrs
import torch.distributed as dist

from primerl._common.ranks import gloo_group, on_every_rank
from primerl.weights.transports.receipts import Receipt

T = TypeVar("T", bound="Transport")

_ABANDONED_S = 10.0  # after an error, because other ranks may have died
_AGREEMENT_S = 600.0  # ranks wait for each other outside of collectives first


class PendingPublication:
    """A publication that ``start`` began and ``wait`` ends.

        pending = transport.start(version)
        ...  # the weights are sent meanwhile
        receipt = pending.wait()

    Args:
        version: the version that is published.
        finish: returns the receipt, once the engines serve the version. All ranks call it.
        held_s: the seconds that ``start`` took.
        work: what a thread does for the publication; None if ``start`` did everything.
    """

    def __init__(
        self,
        version: int,
        finish: Callable[[], Receipt],
        *,
        held_s: float = 0.0,
        work: "Future[Any] | None" = None,
    ) -> None:
        self.version = version
        self.work = work
        self._finish = finish
        self._held_s = held_s
        self._outcome: Receipt | Exception | None = None

    @property
    def ended(self) -> bool:
        """Whether ``wait`` has returned or raised, and nothing of the publication still runs."""
        return self._outcome is not None and (self.work is None or self.work.done())

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

    def abandon(self, seconds: float) -> None:
        """Wait at most so many seconds for what still runs, and ignore its errors."""
        if self.work is not None:
            wait([self.work], seconds)

    def __str__(self) -> str:
        if self._outcome is None:
            return (
                f"version {self.version} is still being published: call wait() on what start() "
                "returned before the next version is published"
            )
        return (
            f"version {self.version} was given up, but a thread is still sending it: publish the "
            "next version later, or with a new transport"
        )


class Transport:
    """Base class of transports, which publish the trainer's weights to engines.

    Versions are published one after the other. As a context manager, a transport waits for a
    publication that is under way when it is left.

    A subclass defines ``_publish``, and ``_start`` if it can send weights while training goes on.
    """

    _pending: PendingPublication | None = None
    _ranks: dist.ProcessGroup | None = None
    _knows_ranks = False

    def publish(self, version: int) -> Receipt:
        """Load the weights of ``version`` into every engine; return when all serve them.

        All ranks of a sharded trainer call it, as they do ``start``.

        Raises:
            RuntimeError: the weights did not arrive, and the message says which check failed, and
                where; or another version is still being published.
            ValueError: the version is not an integer of at least 0, or not the same on all ranks.
        """
        return self._publish(self._begin(version))

    def start(self, version: int) -> PendingPublication:
        """Begin to publish ``version``; the weights may change once this returns.

        A transport that can't send weights while training goes on publishes them at once.

        Raises:
            RuntimeError: another version is still being published. By ``wait``: see ``publish``.
            ValueError: see ``publish``.
        """
        version = self._begin(version)
        began = time.perf_counter()
        finish, work = self._start(version)
        held_s = time.perf_counter() - began
        self._pending = PendingPublication(version, finish, held_s=held_s, work=work)
        return self._pending

    def _publish(self, version: int) -> Receipt:
        """Load the weights of ``version`` into every engine; return when all serve them."""
        raise NotImplementedError

    def _start(self, version: int) -> "tuple[Callable[[], Receipt], Future[Any] | None]":
        """Copy the weights; return what ``wait`` calls, and what a thread does until then."""
        receipt = self._publish(version)
        return lambda: receipt, None

    def _prepare(self) -> None:
        """Check that this rank can publish, before anything is gathered."""

    def _close(self) -> None:
        """Give up what other transports may need, when the context is left."""

    def _begin(self, version: int) -> int:
        """Check on all ranks that ``version`` can be published now, and return it."""

        def checked() -> int:
            if self._pending is not None and not self._pending.ended:
                raise RuntimeError(str(self._pending))
            self._prepare()
            return _checked_version(version)

        what = f"the publication of version {version} on all ranks"
        versions: list[int] = on_every_rank(checked, self._agreeing(), what=what)
        if len(set(versions)) > 1:
            raise ValueError(f"the ranks publish different versions: {versions[:8]}, in rank order")
        return versions[0]

    def _agreeing(self) -> dist.ProcessGroup | None:
        """Return a gloo group of all ranks that only the main thread uses."""
        if not self._knows_ranks:
            self._ranks = gloo_group(timeout_s=_AGREEMENT_S)
            self._knows_ranks = True
        return self._ranks

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._pending is not None and not self._pending.ended:
                if error is None:
                    self._pending.wait()
                else:
                    self._pending.abandon(_ABANDONED_S)
        finally:
            self._close()


def _checked_version(version: Any) -> int:
    """Return a version as an ``int``, because a numpy integer is not JSON."""
    try:
        number = operator.index(version)
    except TypeError:
        number = -1
    if isinstance(version, bool) or number < 0:
        raise ValueError(f"version={version!r}; expected an integer of at least 0")
    return number
