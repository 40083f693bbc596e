"""A task stream that mixes several streams in fixed proportions."""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from primerl.rollout.environments.environment import Task
from primerl.rollout.tasks.streams import TaskStream, as_task_stream, require_state_of
from primerl.types import Group


class Mixture:
    """A task stream that draws from several streams in fixed proportions.

        tasks = rollout.Mixture({"math": math, "code": code}, weights={"math": 3, "code": 1})
        environment = rollout.combine_environments({"math": play_math, "code": play_code})

    Each task gets the name of its stream as ``"environment"`` and as a prefix of its id:
    ``"math/17"``.
    After n draws, a stream of share p has been drawn n·p times, give or take one; nothing is
    random. When a stream ends, the shares of the others are scaled up.

    Args:
        streams: the streams by name; an iterable of tasks is drawn in order.
        weights: the weights by name; equal by default. A share is a weight divided by their sum.

    Raises:
        ValueError: there are no streams, a name contains ``/``, or the weights are not one
            positive number for each stream.
    """

    def __init__(
        self,
        streams: Mapping[str, Iterable[Task] | TaskStream],
        *,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        if not streams:
            raise ValueError("the mixture has no streams; pass at least one")
        for name in streams:
            if "/" in name:
                raise ValueError(
                    f"the stream name {name!r} contains '/', which ends the name in ids"
                )
        weights = dict.fromkeys(streams, 1.0) if weights is None else weights
        if set(weights) != set(streams):
            raise ValueError(
                f"the weights are for {sorted(weights)}, the streams are {sorted(streams)}"
            )
        for name, weight in weights.items():
            if not 0 < weight < float("inf"):
                raise ValueError(f"the weight of {name!r} is {weight}, expected a positive number")
        self._streams = {name: as_task_stream(tasks) for name, tasks in streams.items()}
        # Exact arithmetic: through its decimal digits, 0.1 becomes 1/10.
        self._weights = {name: Fraction(str(weights[name])) for name in streams}
        self._drawn = dict.fromkeys(streams, 0)

    def draw(self) -> dict[str, Any] | None:
        """Return the next task, from the stream whose turn it is; None when all have ended."""
        while self._drawn:
            name = self._next_name()
            task = self._streams[name].draw()
            if task is not None:
                self._drawn[name] += 1
                return {**task, "id": f"{name}/{task['id']}", "environment": name}
            self._drawn = dict.fromkeys((n for n in self._drawn if n != name), 0)
        return None

    def report(self, task: Task, group: Group | None) -> None:
        """Report the group to the stream that the task came from, with the task's id there.

        Raises:
            ValueError: the task came from none of the streams.
        """
        name, slash, own_id = str(task["id"]).partition("/")
        if not slash or name not in self._streams:
            raise ValueError(
                f"the task {task['id']!r} came from none of the streams {sorted(self._streams)}"
            )
        self._streams[name].report({**task, "id": own_id}, group)

    def state(self) -> dict[str, Any]:
        """Return ``{"drawn", "weights", "streams"}``, each by the name of the stream.

        ``drawn`` counts draws since a stream last ended; ``streams`` has the streams' states.
        """
        return {
            "drawn": dict(self._drawn),
            "weights": {name: str(weight) for name, weight in self._weights.items()},
            "streams": {name: stream.state() for name, stream in self._streams.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``; if the weights have changed, draws are counted anew.

        Raises:
            ValueError: the streams have other names, a stream can't be restored, or the state is
                that of another kind of stream.
        """
        require_state_of(self, state, keys=("drawn", "streams"), optional=["weights"])
        if set(state["streams"]) != set(self._streams):
            raise ValueError(
                f"the state has the streams {sorted(state['streams'])}, but the mixture has "
                f"{sorted(self._streams)}; restore with the same streams, or begin a new mixture"
            )
        for name, stream in self._streams.items():
            try:
                stream.restore(state["streams"][name])
            except ValueError as error:
                raise ValueError(f"the stream {name!r} of the mixture: {error}") from error
        drawn = state["drawn"]
        weights = {name: str(weight) for name, weight in self._weights.items()}
        # Otherwise a stream whose share has grown would be drawn alone until it had caught up.
        same = state.get("weights", weights) == weights
        self._drawn = {name: drawn[name] if same else 0 for name in self._streams if name in drawn}

    def _next_name(self) -> str:
        """Return the next stream: the one with the earliest deadline, of those below their share.

        After n draws, stream i should have n·p_i; its next draw is due at draw (drawn_i + 1) / p_i.
        """
        total = sum(self._weights[name] for name in self._drawn)
        shares = {name: self._weights[name] / total for name in self._drawn}
        n = sum(self._drawn.values()) + 1
        below = [name for name, drawn in self._drawn.items() if drawn < n * shares[name]]
        return min(below, key=lambda name: (self._drawn[name] + 1) / shares[name])
