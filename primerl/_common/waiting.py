"""Waits of ranks for each other outside of collectives, and the signs of life of all ranks.

In a collective, ranks wait for at most its time limit, and a rank that gives up cannot say which
rank was late, and with what. So where ranks may be late, they first wait here, through the store of
the process group. Each rank counts the points that it reaches, and says what it is doing.
"""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

import attrs
import torch
import torch.distributed as dist

from primerl._common import progress

FAILURE = "primerl/failure"
DOING = "primerl/doing/{}"
POINTS = "primerl/points/{}"
BEAT_S = 2.0
_POLL_S = (0.002, 0.25)  # at least and at most; in between, a fiftieth of the time waited so far
_NAMED = 3  # at most so many ranks are quoted in an error
_TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = (str(Path(json.__file__).parents[1]), str(Path(torch.__file__).parents[1]), "<")

_waits: list["Waits"] = []
"""The waits of the world that this process has entered."""


class LateRankError(RuntimeError):
    """Raised by a wait that was in vain; names the rank that is late, and what it did last."""


class OtherRankFailedError(RuntimeError):
    """Raised by a wait because another rank has failed."""


def wait_for_first(what: str, group: dist.ProcessGroup | None = None) -> None:
    """Wait, on ranks other than 0, until rank 0 gets to the same call; on rank 0, return at once.

    ``scatter``, ``should_stop`` and entering a world call it before their collectives. Call it
    where only rank 0 works for long before another collective. Without a world, it does nothing.

    Args:
        what: what is waited for, for the error.
        group: the group of the next collective; waits for different groups are independent.

    Raises:
        RuntimeError: rank 0 has given no sign of life for ``timeout_s``, or did not get here within
            ``wait_timeout_s`` (``process_group``); or a rank has failed.
    """
    if _waits:
        _waits[-1].wait_for_first(what, "" if group is None else group.group_name)


def wait_for_all(what: str, group: dist.ProcessGroup | None = None) -> None:
    """Wait until every rank gets to the same call.

    Loading and saving call it before their collectives. Call it where each rank works for long on
    its own, and one may need longer than the others. Without a world, it does nothing.

    Args:
        what: what is waited for, for the error.
        group: the group of the next collective; waits for different groups are independent.

    Raises:
        RuntimeError: a rank has given no sign of life for ``timeout_s``, or did not get here within
            ``wait_timeout_s`` (``process_group``); or a rank has failed.
    """
    if _waits:
        _waits[-1].wait_for_all(what, "" if group is None else group.group_name)


def describe_late(group: dist.ProcessGroup | None) -> str:
    """Describe the ranks that others wait for in ``wait_for_all``; "" if there are none."""
    return _waits[-1].describe_late("" if group is None else group.group_name) if _waits else ""


@attrs.frozen
class SignOfLife:
    """The last sign of life of a rank."""

    number: int = 0
    """The number of signs that the rank has given; 0 if it has not connected yet."""
    report: str = "nothing yet"
    """Its last progress report."""
    place: str = ""
    """The line of the program that its main thread has got to."""
    in_torch: bool = False
    """Whether its main thread is inside torch, as in a collective."""

    def __str__(self) -> str:
        return f"its last report: {self.report}" + (f", at {self.place}" if self.place else "")


class Waits:
    """The waits and the signs of life of one rank, as a context manager.

    Rank 0 watches the ranks that it waits for; the others watch rank 0.

    Args:
        store: the store of the process group.
        rank: this rank.
        ranks: the number of ranks.
        silent_s: how long a rank may give no sign of life, once it has connected.
        timeout_s: how long one wait may take.
    """

    def __init__(
        self, store: dist.Store, *, rank: int, ranks: int, silent_s: float, timeout_s: float
    ) -> None:
        self._store = store.clone()  # a blocked operation of another thread does not hold it up
        self._rank = rank
        self._ranks = ranks
        self._silent_s = silent_s
        self._timeout_s = timeout_s
        self._beat_s = min(BEAT_S, silent_s / 4)
        self._points = Counter[str]()
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="primerl-beat", daemon=True)

    def __enter__(self) -> "Waits":
        self._beats.start()
        _waits.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _waits.remove(self)
        self._ended.set()
        self._beats.join(BEAT_S)

    def wait_for_first(self, what: str, channel: str = "") -> None:
        """See the function of this name."""
        key = POINTS.format(f"first/{channel}")
        self._points[key] += 1
        point = self._points[key]
        if self._rank == 0:
            self._store.add(key, 1)
            return
        self._wait(what, lambda: self._store.add(key, 0) >= point, late=lambda: [0])

    def wait_for_all(self, what: str, channel: str = "") -> None:
        """See the function of this name."""
        key = POINTS.format(f"all/{channel}")
        self._points[key] += 1
        point = self._points[key]
        self._store.add(f"{key}/{self._rank}", 1)
        self._store.add(key, 1)

        def late() -> list[int]:
            ranks = range(self._ranks)
            return [rank for rank in ranks if self._store.add(f"{key}/{rank}", 0) < point]

        self._wait(what, lambda: self._store.add(key, 0) >= point * self._ranks, late=late)

    def describe_late(self, channel: str = "") -> str:
        """See the function of this name."""
        key = POINTS.format(f"all/{channel}")
        counts = [self._store.add(f"{key}/{rank}", 0) for rank in range(self._ranks)]
        signs = {r: self._sign(r) for r, count in enumerate(counts) if count < max(counts)}
        return _quoted(signs, "is late") if signs else ""

    def describe_stuck(self, suspects: Callable[[], Sequence[int]]) -> str:
        """Describe the ranks among ``suspects`` that seem to be stuck; "" if none is left.

        Gives the suspects the time of two signs of life, in which they may also stop being suspect.
        A rank whose main thread is inside torch is named only if there is no other.
        """
        watch = _Watch(self._store)
        began = time.monotonic()
        while (ranks := suspects()) and time.monotonic() - began < 2.5 * self._beat_s:
            watch.look(ranks)
            time.sleep(self._beat_s / 4)
        if not ranks:
            return ""
        signs = {rank: self._sign(rank) for rank in ranks}
        silent = [rank for rank in signs if watch.silent_s(rank) > 1.5 * self._beat_s]
        outside = [rank for rank, sign in signs.items() if not sign.in_torch]
        if silent:
            return _quoted(
                {rank: signs[rank] for rank in silent},
                "gives no sign of life: it is suspended or was killed, or its host is down",
            )
        return _quoted({rank: signs[rank] for rank in outside or signs}, "is alive, but late")

    def _wait(
        self, what: str, arrived: Callable[[], bool], *, late: Callable[[], list[int]]
    ) -> None:
        began = time.monotonic()
        look_at = began
        watch = _Watch(self._store)
        while not arrived():
            if self._store.check([FAILURE]):
                raise OtherRankFailedError("another rank has failed")
            now = time.monotonic()
            if now >= look_at:
                look_at = now + self._beat_s
                watched = late() if self._rank == 0 else [0]
                watch.look(watched)
                self._require_signs(what, watch, watched)
            if now - began > self._timeout_s:
                raise LateRankError(self._late_text(what, late()))
            least_s, most_s = _POLL_S
            time.sleep(min(most_s, max(least_s, (now - began) / 50)))

    def _require_signs(self, what: str, watch: "_Watch", ranks: Iterable[int]) -> None:
        silent = {r: self._sign(r) for r in ranks if watch.silent_s(r) > self._silent_s}
        if silent:
            state = f"has given no sign of life for {self._silent_s:.0f} s, while {what} was"
            raise LateRankError(_quoted(silent, f"{state} waited for"))

    def _late_text(self, what: str, late: Sequence[int]) -> str:
        signs = {rank: self._sign(rank) for rank in late}
        connected = {rank: sign for rank, sign in signs.items() if sign.number}
        state = "is alive" if len(connected) == len(signs) else "has not connected yet"
        named = signs if len(connected) == len(signs) else signs.keys() - connected.keys()
        return (
            _quoted(
                {rank: signs[rank] for rank in sorted(named)},
                f"{state}, but {what} did not come within {self._timeout_s:.0f} s",
            )
            + ". If it needs longer, raise wait_timeout_s of parallel.process_group"
        )

    def _sign(self, rank: int) -> SignOfLife:
        return _read_sign(self._store, rank)

    def _beat(self) -> None:
        """Say what this process is doing, until the context is left."""
        number = 0
        while not self._ended.wait(self._beat_s if number else 0.0):
            number += 1
            try:
                self._store.set(DOING.format(self._rank), json.dumps(attrs.astuple(_own(number))))
            except RuntimeError:  # the process that hosts the store has ended
                return


class _Watch:
    """How long ranks have been silent, without the time in which this rank was suspended."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._heard: dict[int, tuple[int, float]] = {}  # the last sign, and the seconds since then
        self._looked = time.monotonic()

    def look(self, ranks: Iterable[int]) -> None:
        """Look for new signs of life."""
        now = time.monotonic()
        passed_s, self._looked = min(now - self._looked, 2 * BEAT_S), now
        for rank in ranks:
            number = _read_sign(self._store, rank).number
            before, silent_s = self._heard.get(rank, (0, 0.0))
            self._heard[rank] = (number, silent_s + passed_s if number == before else 0.0)

    def silent_s(self, rank: int) -> float:
        """Return for how long a rank has been silent; 0 if it has not connected yet."""
        number, silent_s = self._heard.get(rank, (0, 0.0))
        return silent_s if number else 0.0


def place_of(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the innermost line outside of libraries; frames come from the outermost on."""
    found = ""
    for frame, line in frames:
        code = frame.f_code
        if not code.co_filename.startswith(_LIBRARIES):
            found = f"{Path(code.co_filename).name}:{line} ({code.co_name})"
    return found


def _own(number: int) -> SignOfLife:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    in_torch = frame is not None and frame.f_code.co_filename.startswith(_TORCH)
    frames = []
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return SignOfLife(number, progress.last_report(), place_of(reversed(frames)), in_torch)


def _read_sign(store: dist.Store, rank: int) -> SignOfLife:
    key = DOING.format(rank)
    return SignOfLife(*json.loads(store.get(key))) if store.check([key]) else SignOfLife()


def _quoted(signs: dict[int, SignOfLife], state: str) -> str:
    """Return "rank 2 STATE; its last report: ...", with the reports of a few more ranks."""
    (rank, sign), *others = signs.items()
    more = "".join(f"; rank {other}, too; {theirs}" for other, theirs in others[: _NAMED - 1])
    left = len(others) - _NAMED + 1
    return f"rank {rank} {state}; {sign}{more}" + (f"; {left} more ranks, too" * (left > 0))
