"""A verifiers harness whose agent calls functions of this process, without any program."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp

from primerl._common.optional import require
from primerl.rollout.agents.loop import take_turns
from primerl.rollout.agents.tools import Tool, Toolbox
from primerl.rollout.environments.verifiers_adapter.messages import wire_message

vf: Any = require("verifiers.v1", extra="verifiers")


class ToolHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]  # a class known at run time only
    """Limits of each tool call: its timeout in seconds, and the characters of its result."""

    tool_timeout: float = 60.0
    max_output: int = 16_384


class ToolHarness(vf.Harness[ToolHarnessConfig]):  # type: ignore[misc]
    """A harness whose agent calls tools until it replies without a tool call.

    A subclass defines ``tools``, which run commands and change files in the given ``runtime``. The
    harness sends its requests to verifiers' own server, so it works with any of verifiers' clients.
    In ``rollout.verifiers`` it is token-exact, like every harness. Mistakes of the policy in a tool
    call are returned to it as the call's result.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = True
    NEEDS_CONTAINER = False

    def tools(self, runtime: Any, data: Any) -> Sequence[Tool]:
        """Return the tools that the agent may call in one rollout of the task ``data``."""
        raise NotImplementedError

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],  # noqa: ARG002 - tools are this process's
        data: Any,
        tool_interception_url: str | None = None,  # noqa: ARG002
    ) -> Any:
        """Play one rollout."""
        toolbox = Toolbox(
            self.tools(runtime, data),
            {"task": data},
            timeout_s=self.config.tool_timeout,
            max_output=self.config.max_output,
        )
        failure = ""
        headers = {"Authorization": f"Bearer {secret}"}
        # No timeout: the rollout's own deadline cancels the request.
        unlimited = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
        async with aiohttp.ClientSession(headers=headers, timeout=unlimited) as http:
            messages = self._opening(data)

            async def reply() -> Any:
                nonlocal failure
                body = {"model": ctx.model, "messages": messages, "tools": toolbox.wire}
                async with http.post(f"{endpoint}/chat/completions", json=body) as response:
                    if response.status != 200:
                        failure = await response.text() or f"status {response.status}"
                        return None
                    return (await response.json())["choices"][0]["message"]

            async def answers(message: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
                for call in message.get("tool_calls") or ():
                    yield await toolbox.answer(call)

            await take_turns(messages, reply=reply, answers=answers)
        trace.record_metrics({"tool_errors": float(toolbox.failed)})
        return vf.ProgramResult(exit_code=1 if failure else 0, stdout="", stderr=failure)

    def _opening(self, data: Any) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *(wire_message(message) for message in prompt or [])]
