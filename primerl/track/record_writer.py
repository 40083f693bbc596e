"""The thread that writes a run's records beside training."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from primerl.track.rollout_records import RecordedGroup, RolloutRecords
from primerl.track.run_folder import RunFolder

logger = logging.getLogger(__name__)

PENDING_TOKENS = 1 << 24
"""Most tokens of rollouts that wait to be written, unless one step alone has more."""

PATIENCE_S = 1.0  # how long a step waits for those before it
DRAIN_S = 60.0  # how long a state or the run's end waits for all of them

HELD_LINES = 10_000
"""Most lines of metrics that are kept in memory while the disk is full."""


class RecordWriter:
    """Writes metrics and rollouts in a thread, so that neither a slow nor a full disk ends a run.

    If a write fails, or the thread is too far behind, rollouts are dropped and counted, and
    ``alarm`` says so. Lines of metrics are kept, and written when there is space again.
    """

    def __init__(self, files: RunFolder, rollouts: RolloutRecords) -> None:
        self._files = files
        self._folder = files.path
        self._rollouts = rollouts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="records")
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._lines: deque[bytes] = deque(maxlen=HELD_LINES)
        self._evaluations: deque[bytes] = deque(maxlen=HELD_LINES)
        self._ends: dict[str, int] = {}
        self._closed = False
        self._late: str | None = None
        self._failed: str | None = None
        self._first: Callable[[], None] | None = None
        # Rollouts that were dropped: each counter has one thread that changes it.
        self._overrun = 0
        self._unwritten = 0

    @property
    def _slow(self) -> str:
        return f"{self._folder} is written too slowly"

    @property
    def lost(self) -> int:
        """The number of rollouts that were chosen to be recorded, but dropped."""
        return self._overrun + self._unwritten

    @property
    def alarm(self) -> str | None:
        """The reason why records are not written now; None if they are."""
        return self._failed or self._late

    def begin_with(self, prepare: Callable[[], None]) -> None:
        """Call a function before the first record is written, again if it raises an ``OSError``."""
        self._first = prepare

    def write(self, line: bytes, groups: Sequence[RecordedGroup]) -> None:
        """Write a step's line of metrics and its recorded groups, soon.

        Raises:
            Exception: an error other than an ``OSError`` while an earlier step was recorded, such
                as one of ``decode``.
        """
        tokens = sum(group.tokens for group in groups)
        self._late = None
        if not self._wait(PATIENCE_S, until=lambda: self._has_room(tokens)):
            self._overrun += sum(group.rollouts for group in groups)
            groups, tokens = (), 0
            self._late = f"{self._slow}: rollouts are not recorded"
            logger.warning("%s", self._late)
        self._waiting.append((self._thread.submit(self._record, line, tuple(groups)), tokens))

    def write_evaluation(self, line: bytes) -> None:
        """Write the line of an evaluation, soon."""
        self._waiting.append((self._thread.submit(self._record_evaluation, line), 0))

    def drain(self) -> dict[str, int]:
        """Wait until all records are synced to disk; return how many bytes of each file are whole.

        After ``DRAIN_S``, it returns those of the steps that are written by then.
        """
        if not self._closed:
            self._waiting.append((self._thread.submit(self._flush, sync=True), 0))
            if not self._wait(DRAIN_S, until=lambda: not self._waiting):
                logger.warning("%s: the state lacks its last records", self._slow)
        return dict(self._ends or self._files.ends())

    def close(self) -> BaseException | None:
        """Write what is waiting, for at most ``DRAIN_S``, and end the thread.

        Returns:
            An error other than an ``OSError`` while records were written, such as one of
            ``decode``.
        """
        self._closed = True
        self._waiting.append((self._thread.submit(self._flush), 0))
        done, late = wait([future for future, _ in self._waiting], timeout=DRAIN_S)
        if late:
            logger.warning("%s: its last records are missing", self._slow)
        self._thread.shutdown(wait=False, cancel_futures=True)
        return next((error for one in done if (error := one.exception()) is not None), None)

    def _has_room(self, tokens: int) -> bool:
        waiting = sum(waiting for _, waiting in self._waiting)
        return 0 in (tokens, waiting) or waiting + tokens <= PENDING_TOKENS

    def _wait(self, seconds: float, *, until: Callable[[], bool]) -> bool:
        """Wait for the thread until a condition holds; return whether it does."""
        deadline = time.monotonic() + seconds
        while True:
            while self._waiting and self._waiting[0][0].done():
                self._waiting.popleft()[0].result()
            if until():
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            wait([self._waiting[0][0]], timeout=left)

    def _record(self, line: bytes, groups: Sequence[RecordedGroup]) -> None:
        left = deque(groups)
        self._lines.append(line)
        try:
            self._write_lines()
            while left:
                self._rollouts.write(left[0])
                left.popleft()
        except OSError as error:
            self._unwritten += sum(group.rollouts for group in left)
            self._report(error)
        else:
            self._report(None)
        self._ends = self._files.ends()

    def _record_evaluation(self, line: bytes) -> None:
        self._evaluations.append(line)
        self._flush()

    def _write_lines(self) -> None:
        if self._first is not None:
            self._first()
            self._first = None
        self._files.metrics.append(b"".join(self._lines))
        self._lines.clear()
        if self._evaluations:
            self._files.evaluations.append(b"".join(self._evaluations))
            self._evaluations.clear()

    def _flush(self, *, sync: bool = False) -> None:
        """Write what was kept or is missing, and perhaps sync all files."""
        try:
            self._write_lines()
            self._files.restore_missing()
            if sync:
                self._files.sync()
        except OSError as error:
            self._report(error)
        self._ends = self._files.ends()

    def _report(self, error: OSError | None) -> None:
        """Log the first failure of a row, and the first success after it."""
        failed = None if error is None else f"records cannot be written to {self._folder}: {error}"
        if failed is not None and self._failed is None:
            logger.warning("%s; training continues without them", failed)
        if failed is None and self._failed is not None:
            logger.warning("records are written to %s again", self._folder)
        self._failed = failed
