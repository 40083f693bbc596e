"""A scripted expert that knows the seeded bugs and writes conversations to learn from.

    python -m bugfix.expert traces.jsonl --tier easiest

The expert acts through the same tools, harness and sandboxes as a policy. ``recipes/sft.py --data``
and the environment ``pivot`` read its conversations, all of which solve their tasks.
"""

import argparse
import asyncio
import json
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from bugfix.corpus import programs
from bugfix.mutation import Mutation
from bugfix.tasks import TIERS
from primerl import rollout
from primerl.types import SamplingParams

DONE = "The bug is fixed."


def calls(tier: str, seeded: Sequence[Mutation]) -> list[tuple[str, dict[str, str]]]:
    """Return the expert's tool calls: list and read the files it has not seen, and edit them."""
    edits = [
        ("edit", {"path": one.path, "old": one.after.strip(), "new": one.before.strip()})
        for one in seeded
    ]
    if tier == "easiest":
        return edits
    looks = [("bash", {"command": f"cat {one.path}"}) for one in seeded]
    steps = [step for pair in zip(looks, edits, strict=True) for step in pair]
    if tier == "easy":
        return steps
    folder = seeded[0].path.split("/")[0]
    return [("bash", {"command": f"ls {folder}"}), *steps]


def rewrites(seeded: Sequence[Mutation], right: Mapping[str, str]) -> list[tuple[str, Any]]:
    """Return tool calls that replace each buggy file with its text in ``right``."""
    return [
        ("bash", {"command": f"cat > {path} <<'END'\n{right[path]}END"})
        for path in dict.fromkeys(one.path for one in seeded)
    ]


def written(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a tool call as ``<tool_call>`` text, for models whose template has no tools."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Expert:
    """An engine that plays back tool calls: each turn of one task gets the next call."""

    context_length = 1 << 20

    def __init__(self, steps: Sequence[tuple[str, Mapping[str, Any]]], *, last: str = DONE) -> None:
        self._steps = list(steps)
        self._last = last

    @property
    def version(self) -> int:
        """Weight version: always 0, since the expert does not learn."""
        return 0

    async def generate(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to generate tokens, since the expert replies with messages.

        Raises:
            ValueError: always.
        """
        raise ValueError("a scripted expert takes messages, not tokens: pass tokenizer=None")

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,  # noqa: ARG002 - nothing is sampled
        *,
        tools: Any = None,  # noqa: ARG002
    ) -> Any:
        """Return the next reply in the form of a chat endpoint's."""
        turn = sum(message["role"] == "assistant" for message in messages)
        message: dict[str, Any] = {"role": "assistant", "content": self._last}
        if turn < len(self._steps):
            name, arguments = self._steps[turn]
            function = {"name": name, "arguments": json.dumps(arguments)}
            call = {"id": f"call_{turn}", "type": "function", "function": function}
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        return types.SimpleNamespace(
            message=message, finish_reason="stop", prompt_tokens=1, completion_tokens=1
        )


def expert(task: Mapping[str, Any], *, rewrite: bool = False) -> Expert:
    """Return the expert for a task of ``rollout.verifiers("bugfix", ...).tasks``.

    With ``rewrite``, the expert rewrites whole files instead of editing lines.
    """
    data = task["data"]
    seeded = [Mutation(*one) for one in data["mutations"]]
    if rewrite:
        return Expert(rewrites(seeded, programs()[data["program"]].files))
    return Expert(calls(data["tier"], seeded))


async def conversations(
    tiers: Sequence[str],
    *,
    split: str,
    program: str = "all",
    rewrite: bool = False,
    concurrency: int = 4,
) -> list[Any]:
    """Return the expert's conversations on all tasks of the tiers, in the order of the tasks.

    Raises:
        RuntimeError: the expert did not solve a task.
    """
    found: list[Any] = []
    gate = asyncio.Semaphore(concurrency)
    for tier in tiers:
        environment = rollout.verifiers(
            "bugfix",
            tokenizer=None,
            config={"taskset": {"tier": tier, "split": split, "program": program}},
            keep_conversation=True,
        )

        async def play(task: Any, environment: Any = environment) -> Any:
            async with gate:
                played = await environment(
                    task, expert(task, rewrite=rewrite), SamplingParams(max_tokens=1)
                )
            if played.reward != 1:
                raise RuntimeError(f"the expert did not solve {task['id']}")
            return {"id": task["id"], **played.conversation}

        try:
            found += await asyncio.gather(*(play(task) for task in environment.tasks))
        finally:
            await environment.aclose()
    return found


def without_calls(conversation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conversation of an agent that only gives the expert's last reply."""
    system, statement, *_, last = conversation["messages"]
    return {**conversation, "messages": [system, statement, last]}


def as_text(conversation: dict[str, Any]) -> dict[str, Any]:
    """Return a conversation with its tool calls as text and without its tool definitions."""
    messages = []
    for message in conversation["messages"]:
        content = message["content"] or ""
        for call in message.get("tool_calls") or ():
            function = call["function"]
            content += written(function["name"], json.loads(function["arguments"]))
        messages.append({"role": message["role"], "content": content})
    return {"id": conversation["id"], "messages": messages}


def main(arguments: list[str] | None = None) -> None:
    """Write the expert's conversations to a file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", type=Path, help="the JSON lines file to write")
    parser.add_argument("--tier", choices=["all", *TIERS], default="all")
    parser.add_argument("--split", choices=["train", "eval", "all"], default="train")
    parser.add_argument(
        "--calls",
        choices=["fields", "text"],
        default="fields",
        help="text: write calls as <tool_call> text, for models whose chat template has no tools",
    )
    parser.add_argument(
        "--rewrite",
        action="store_true",
        help="rewrite repaired files as a whole instead of editing lines",
    )
    chosen = parser.parse_args(arguments)
    tiers = TIERS if chosen.tier == "all" else (chosen.tier,)
    rows = asyncio.run(conversations(tiers, split=chosen.split, rewrite=chosen.rewrite))
    if chosen.calls == "text":
        rows = [as_text(row) for row in rows]
    chosen.file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} conversations")


if __name__ == "__main__":
    main()
