"""Task streams: the order in which tasks are drawn, with a position that can be restored."""

import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from primerl.rollout.environments.environment import Task
from primerl.rollout.tasks.digests import (
    Digests,
    digests_of,
    fingerprint,
    require_same_digests,
)
from primerl.types import Group

_END = object()


@runtime_checkable
class TaskStream(Protocol):
    """A stream that decides which task is played next; called from one thread at a time."""

    def draw(self) -> Task | None:
        """Return the next task, as a new dict with a string ``"id"``; None when none is left."""
        ...

    def report(self, task: Task, group: Group | None) -> None:
        """Learn from the group that played a drawn task; ``group`` is None if it failed."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state that ``restore`` needs, in JSON types."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``, exactly at the position at which it was saved."""
        ...


def as_task_stream(tasks: Iterable[Task] | TaskStream) -> TaskStream:
    """Return ``tasks`` if it is a stream, otherwise a stream of its items in order."""
    return tasks if isinstance(tasks, TaskStream) else InOrder(tasks)


def as_task(row: Any, index: int) -> dict[str, Any]:
    """Return a copy of a row with a string ``"id"``: the row's own id, or its index.

    Raises:
        ValueError: the row is not a mapping.
    """
    if not isinstance(row, Mapping):
        raise ValueError(
            f"task {index} is {row!r:.80} ({type(row).__name__}); expected a mapping such as "
            "{'prompt': 'What is 2 + 2?'}"
        )
    own = row.get("id")
    return {**row, "id": str(index if own is None else own)}


def require_state_of(
    stream: TaskStream, state: Any, *, keys: Iterable[str], optional: Iterable[str] = ()
) -> None:
    """Check that a state has the keys that the stream saves.

    Raises:
        ValueError: it has others, such as those of another kind of stream.
    """
    found = set(state) if isinstance(state, Mapping) else set()
    if found - set(optional) != set(keys):
        raise ValueError(
            f"the state does not fit a stream of the kind {type(stream).__name__}: it has "
            f"{sorted(found)}, expected {sorted(keys)}; restore with the kind of stream that saved "
            "it, or begin a new one"
        )


def require_same_task(saved: Mapping[str, Any], row: Any, place: int) -> None:
    """Check that the last task drawn before ``saved`` was ``row``, which is at index ``place``.

    Raises:
        ValueError: the last drawn task was a different one.
    """
    now = fingerprint(row)
    last = saved.get("last")
    if None not in (last, now) and last != now:
        raise ValueError(
            f"the state was taken after a different task than the one now at index {place} "
            f"({row!r:.80}; digest {now}, expected {last}): restore with the same tasks, "
            "or begin a new stream"
        )


class InOrder:
    """A task stream in the given order, pass after pass; it ends when a pass yields nothing.

    ``tasks`` is any iterable: a list, a Hugging Face dataset, or a generator (which has one pass).
    A task's default id is its index in the pass. Restoring skips to the saved position, by indexing
    if the tasks have a length and indices.

    Raises:
        ValueError: ``tasks`` is not iterable; or, on ``draw``, a task is not a mapping.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks: Any = _require_rows(tasks)
        self._indexed = _is_indexed(tasks)
        self._rows: Iterator[Any] | None = None  # created on first use: iterators can't be pickled
        self._last: Any = None
        self._pass = 0
        self._index = 0

    def draw(self) -> dict[str, Any] | None:
        """Return the next task; None when none is left."""
        row = self._next_row()
        if row is _END and self._index > 0:
            self._pass, self._index, self._rows = self._pass + 1, 0, None
            row = self._next_row()
        if row is _END:
            return None
        self._index += 1
        self._last = row
        return as_task(row, self._index - 1)

    def report(self, task: Task, group: Group | None) -> None:
        """Do nothing: the order is fixed."""

    def state(self) -> dict[str, Any]:
        """Return ``{"pass", "index", "last"}``.

        These are the number of completed passes, the number of tasks drawn in the current pass, and
        the digest of the last task drawn.
        """
        last = fingerprint(self._last) if self._index else None
        return {"pass": self._pass, "index": self._index, "last": last}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from the position in ``state``; the tasks before it are skipped.

        Raises:
            ValueError: there are too few tasks, the last drawn task is now a different one, or the
                state is that of another kind of stream.
        """
        require_state_of(self, state, keys=("pass", "index"), optional=["last"])
        passes, place = state["pass"], state["index"]
        if self._indexed:
            count = len(self._tasks)
            known = 0 < place <= count and state.get("last") is not None
            last = self._tasks[place - 1] if known else None
        else:
            self._rows = iter(self._tasks)
            # An iterator has only one pass: after the first pass, all of its items are skipped.
            skip = None if passes and self._rows is self._tasks else place
            count, last = 0, None
            for row in islice(self._rows, skip):
                count, last = count + 1, row
        if place > count:
            raise ValueError(
                f"the state is after task {place} of a pass, but there are only {count}; restore "
                "with the same tasks, or begin a new stream"
            )
        if last is not None and (self._indexed or place == count):
            require_same_task(state, last, place - 1)
        self._pass, self._index, self._last = passes, place, last

    def _next_row(self) -> Any:
        if self._indexed:
            return self._tasks[self._index] if self._index < len(self._tasks) else _END
        if self._rows is None:
            self._rows = iter(self._tasks)
        return next(self._rows, _END)


class Shuffled:
    """A task stream in a new random order each pass, determined by ``seed`` and the pass's number.

    Every task is drawn once per pass. Tasks without a length and indices are read into a list. If
    the tasks are a list, or have a method ``digests()`` like that of ``data.Conversations``, the
    state has their digests, and a stream of changed tasks is not restored. Otherwise, only another
    number of tasks and another last task are recognized.
    """

    def __init__(self, tasks: Iterable[Task], *, seed: int) -> None:
        rows: Any = _require_rows(tasks)
        self._tasks: Any = rows if _is_indexed(tasks) else list(rows)
        self._seed = seed
        self._digests: Digests | None = None
        self._pass = 0
        self._index = 0
        self._order = self._shuffled_order(0)

    def draw(self) -> dict[str, Any] | None:
        """Return the next task; None if there are no tasks."""
        if self._index == len(self._order):
            if not self._order:
                return None
            self._pass, self._index = self._pass + 1, 0
            self._order = self._shuffled_order(self._pass)
        index = self._order[self._index]
        self._index += 1
        return as_task(self._tasks[index], index)

    def report(self, task: Task, group: Group | None) -> None:
        """Do nothing: the order is determined by the seed."""

    def state(self) -> dict[str, Any]:
        """Return the completed passes, position, last task, task count, seed and digests."""
        return {
            "pass": self._pass,
            "index": self._index,
            "last": fingerprint(self._last()),
            "tasks": len(self._order),
            "seed": self._seed,
            "digests": self._digests_of_tasks(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from the position in ``state``.

        Raises:
            ValueError: the tasks or the seed have changed, which would change the order, or the
                state is that of another kind of stream.
        """
        keys = ("pass", "index", "tasks", "seed")
        require_state_of(self, state, keys=keys, optional=["last", "digests"])
        if state["seed"] != self._seed:
            raise ValueError(
                f"the state was taken with seed={state['seed']}, not {self._seed}: the order "
                "would differ; restore with the same seed, or begin a new stream"
            )
        saved = state.get("digests") or []
        digests = self._digests_of_tasks() if saved else None
        if digests:
            require_same_digests(saved, digests)
        if state["tasks"] != len(self._order):
            raise ValueError(
                f"the state is of {state['tasks']} tasks, but there are {len(self._order)}: "
                "the order would differ; restore with the same tasks, or begin a new stream"
            )
        self._pass, self._index = state["pass"], state["index"]
        self._order = self._shuffled_order(self._pass)
        if self._index and not digests:
            require_same_task(state, self._last(), self._order[self._index - 1])

    def _digests_of_tasks(self) -> Digests | None:
        if self._digests is None:
            self._digests = digests_of(self._tasks)
        return self._digests

    def _last(self) -> Any:
        return self._tasks[self._order[self._index - 1]] if self._index else None

    def _shuffled_order(self, number: int) -> list[int]:
        # Only random.random() is guaranteed to give the same numbers in every version of Python.
        rng = random.Random(f"{self._seed} {number}")
        return sorted(range(len(self._tasks)), key=lambda _: rng.random())


def _require_rows(tasks: Any) -> Any:
    if isinstance(tasks, Mapping) or not hasattr(tasks, "__iter__"):
        raise ValueError(
            f"tasks is {type(tasks).__name__}; expected an iterable of mappings, such as a list"
        )
    return tasks


def _is_indexed(tasks: Any) -> bool:
    return hasattr(tasks, "__getitem__") and hasattr(tasks, "__len__")
