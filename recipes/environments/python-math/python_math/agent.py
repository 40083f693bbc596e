"""The agent's tool, its sandbox, and a scripted expert."""

import json
import types
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from primerl import rollout
from primerl.sandbox import SandboxEnv


def python(runtime: Any) -> rollout.Tool:
    """A tool that runs Python code in ``runtime`` and returns what it prints."""

    async def run(arguments: Mapping[str, Any], state: Any) -> str:  # noqa: ARG001 - a tool's
        code = arguments["code"]
        if not isinstance(code, str):
            raise ValueError("'code' is not text")
        done = await runtime.run(["python3", "-c", code], {})
        # Of a traceback, the end says what went wrong.
        return str(done.stdout) if done.exit_code == 0 else f"{done.stdout}{done.stderr[-500:]}"

    return rollout.Tool(
        name="python",
        description="Run Python code and read what it prints.",
        parameters={
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
        },
        call=run,
    )


class PythonMathHarness(rollout.ToolHarness):
    """Python, until the agent answers without a call."""

    def tools(self, runtime: Any, data: Any) -> list[rollout.Tool]:  # noqa: ARG002 - as it has to be
        """Acts in the rollout's sandbox."""
        return [python(runtime)]


class PythonMathEnv(SandboxEnv):
    """Each rollout in a sandbox of its own."""


class Expert:
    """An engine that runs the code of a task's solution, and answers what it printed."""

    context_length = 1 << 20

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._code = task["data"]["solution"]

    @property
    def version(self) -> int:
        """It does not learn."""
        return 0

    async def generate(self, *_: Any, **__: Any) -> NoReturn:
        """Not there: replies are messages.

        Raises:
            ValueError: always.
        """
        raise ValueError("a scripted expert takes messages, not tokens: pass tokenizer=None")

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: Any,  # noqa: ARG002 - nothing is sampled
        *,
        tools: Any = None,  # noqa: ARG002
    ) -> Any:
        """The next reply, as an endpoint gives it."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        if messages[-1]["role"] == "tool":
            message["content"] = f"Answer: {messages[-1]['content'].strip()}"
        else:
            arguments = json.dumps({"code": self._code})
            function = {"name": "python", "arguments": arguments}
            message["tool_calls"] = [{"id": "call_0", "type": "function", "function": function}]
        return types.SimpleNamespace(
            message=message, finish_reason="stop", prompt_tokens=1, completion_tokens=1
        )
