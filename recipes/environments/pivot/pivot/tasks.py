"""Tasks of the pivot environment: predict the tool calls of each turn of a conversation."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import Field

from pivot.calls import Call, calls_of, likeness


class Step(vf.TaskData):
    """Data of a task: the messages before a turn with tool calls, and the recorded calls."""

    tools: list[dict[str, Any]] = []
    recorded: list[dict[str, Any]]


class PredictConfig(vf.TaskConfig):
    """Options of a task. ``partial`` scales the reward of replies that are not exact."""

    partial: float = Field(default=0.5, ge=0.0, le=1.0)


class Predict(vf.Task[Step, vf.State, PredictConfig]):
    """Task: reply with the recorded tool calls."""

    @vf.reward
    async def predicted(self, trace: vf.Trace) -> float:
        """Return 1 for the recorded calls, else ``partial`` times the similarity of the calls."""
        replies = [node.message for node in trace.nodes if node.sampled]
        calls = None if not replies else calls_of(replies[-1].model_dump(mode="json"))
        recorded = [Call(**call) for call in self.data.recorded]
        alike = likeness(calls, recorded) if calls else 0.0
        names = bool(calls) and [one.name for one in calls] == [one.name for one in recorded]
        trace.record_metric("exact", float(alike == 1.0))
        trace.record_metric("names_right", float(names))
        return 1.0 if alike == 1.0 else self.config.partial * alike

    async def validate(self, runtime: vf.Runtime) -> bool:  # noqa: ARG002 - required by verifiers
        """Check that the recorded calls are equal to themselves when compared."""
        recorded = [Call(**call) for call in self.data.recorded]
        return bool(recorded) and likeness(recorded, recorded) == 1.0


class Options(vf.TasksetConfig):
    """Options: ``traces``, the files of conversations; the first ``held_out`` are for "eval"."""

    traces: list[str] = []
    split: Literal["train", "eval", "all"] = "train"
    held_out: int = 0
    task: PredictConfig = PredictConfig()


class Pivot(vf.Taskset[Predict, Options]):
    """Taskset with one task per turn that has tool calls in recorded conversations."""

    def __init__(self, config: Options) -> None:
        super().__init__(config)
        if not config.traces:
            raise ValueError(
                'pivot needs recordings: pass config={"taskset": {"traces": ["traces.jsonl"]}}; '
                "`python -m bugfix.expert traces.jsonl` writes such a file"
            )

    def load(self) -> Iterator[Predict]:
        """Yield the tasks of the split, in the order of the recordings."""
        for number, (place, conversation) in enumerate(conversations(self.config.traces)):
            held_out = number < self.config.held_out
            if self.config.split != "all" and held_out != (self.config.split == "eval"):
                continue
            yield from self._steps(place, conversation)

    def _steps(self, place: str, conversation: Mapping[str, Any]) -> Iterator[Predict]:
        messages = conversation["messages"]
        for turn, message in enumerate(messages):
            calls = calls_of(message) if message["role"] == "assistant" else []
            if calls is None:
                raise ValueError(f"{place}: messages[{turn}] has a tool call that can't be parsed")
            if not calls:
                continue
            data = Step(
                id=f"{conversation.get('id', place)}-{turn}",
                prompt=[_message(one) for one in messages[:turn]],
                tools=conversation.get("tools") or [],
                recorded=[{"name": one.name, "arguments": one.arguments} for one in calls],
            )
            yield Predict(data, self.config.task)


def conversations(paths: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the conversations of JSON lines files, each with its location ``FILE:LINE``.

    Conversations without a message of the assistant are skipped.

    Raises:
        ValueError: a line is not a conversation.
    """
    for path in paths:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                place = f"{path}:{number}"
                try:
                    row = json.loads(line)
                    roles = [message["role"] for message in row["messages"]]
                except (ValueError, TypeError, KeyError) as error:
                    raise ValueError(
                        f'{place}: expected {{"messages": [{{"role": ...}}]}}: {error!r}'
                    ) from error
                if "assistant" in roles:
                    yield place, row


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message from OpenAI's format to that of verifiers."""
    content = message.get("content")
    if message["role"] == "assistant":
        calls = [
            {
                "id": call.get("id") or f"call_{index}",
                "name": call.get("function", call)["name"],
                "arguments": _json(call.get("function", call).get("arguments")),
            }
            for index, call in enumerate(message.get("tool_calls") or ())
        ]
        return {"role": "assistant", "content": content, "tool_calls": calls or None}
    if message["role"] == "tool":
        return {
            "role": "tool",
            "content": content,
            "tool_call_id": message.get("tool_call_id") or "call_0",
            "name": message.get("name"),
        }
    return {"role": message["role"], "content": content}


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})
