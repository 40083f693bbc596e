"""Harness that asks the model for one reply and does not execute its tool calls."""

from collections.abc import Mapping
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire


class OneReply(vf.Harness[vf.HarnessConfig]):
    """Harness that sends the recorded messages and tools once, and executes nothing."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: vf.Trace,  # noqa: ARG002 - required by verifiers
        runtime: vf.Runtime,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],  # noqa: ARG002
        data: Any,
        tool_interception_url: str | None = None,  # noqa: ARG002
    ) -> vf.ProgramResult:
        """Request the reply."""
        body = {
            "model": ctx.model,
            "messages": [message_to_wire(message) for message in data.prompt],
        }
        if data.tools:
            body["tools"] = data.tools
        headers = {"Authorization": f"Bearer {secret}"}
        # The rollout's own deadline cancels the request.
        unlimited = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=unlimited) as http,
            http.post(f"{endpoint}/chat/completions", json=body) as response,
        ):
            said = await response.text()
        return vf.ProgramResult(exit_code=int(response.status != 200), stdout="", stderr=said)
