"""A verifiers harness whose agent calls functions of this process: no program is installed."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp

from primerl._common.optional import require
from primerl.rollout.agents.loop import take_turns
from primerl.rollout.agents.tools import Tool, Toolbox
from primerl.rollout.environments.verifiers_adapter.client import wire_message

vf: Any = require("verifiers.v1", extra="verifiers")


class ToolHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]  # a class known at run time only
    """``tool_timeout`` bounds one call in seconds, ``max_output`` its result in characters."""

    tool_timeout: float = 60.0
    max_output: int = 16_384


class ToolHarness(vf.Harness[ToolHarnessConfig]):  # type: ignore[misc]
    """An agent that calls tools until it answers without a call.

    A subclass defines ``tools``; what acts does so in the ``runtime`` that it is given. The model
    is asked through verifiers' own server, so the harness works with any of verifiers' clients;
    played by ``rollout.verifiers``, it is token-exact as all harnesses are. Mistakes of the policy
    are returned to it as the call's result.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = True
    NEEDS_CONTAINER = False

    def tools(self, runtime: Any, data: Any) -> Sequence[Tool]:
        """What the agent may call in one rollout of the task ``data``."""
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
        # The rollout's own deadline cancels it.
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
