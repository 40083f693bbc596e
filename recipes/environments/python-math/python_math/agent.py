"""Harness of the python-math environment: the agent's tool and sandbox, and a scripted expert."""

import json
import types
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from primerl import rollout
from primerl.sandbox import SandboxEnv


def python(runtime: Any) -> rollout.Tool:
    """Return a tool that runs Python code in ``runtime`` and returns its output."""

    async def run(arguments: Mapping[str, Any], state: Any) -> str:  # noqa: ARG001 - required of tools
        code = arguments["code"]
        if not isinstance(code, str):
            raise ValueError("'code' is not text")
        done = await runtime.run(["python3", "-c", code], {})
        # The end of a traceback names the error.
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
    """Agent loop with a Python tool; it ends when a reply has no tool call."""

    def tools(self, runtime: Any, data: Any) -> list[rollout.Tool]:  # noqa: ARG002 - required by the base class
        """Return the Python tool, which runs in the rollout's sandbox."""
        return [python(runtime)]


class PythonMathEnv(SandboxEnv):
    """Environment that runs each rollout in its own sandbox."""


class Expert:
    """An engine that runs the code of a task's solution and answers with its output."""

    context_length = 1 << 20

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._code = task["data"]["solution"]

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
        params: Any,  # noqa: ARG002 - nothing is sampled
        *,
        tools: Any = None,  # noqa: ARG002
    ) -> Any:
        """Return the next reply in the form of a chat endpoint's."""
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
