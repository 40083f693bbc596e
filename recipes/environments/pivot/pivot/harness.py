"""One reply of the model, whose calls are not carried out."""

from collections.abc import Mapping
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire


class OneReply(vf.Harness[vf.HarnessConfig]):
    """Sends the recorded messages with the recorded tools, once. Nothing is executed."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: vf.Trace,  # noqa: ARG002 - as verifiers has it
        runtime: vf.Runtime,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],  # noqa: ARG002
        data: Any,
        tool_interception_url: str | None = None,  # noqa: ARG002
    ) -> vf.ProgramResult:
        """Ask for the reply."""
        body = {
            "model": ctx.model,
            "messages": [message_to_wire(message) for message in data.prompt],
        }
        if data.tools:
            body["tools"] = data.tools
        headers = {"Authorization": f"Bearer {secret}"}
        # The rollout's own deadline cancels it.
        unlimited = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=unlimited) as http,
            http.post(f"{endpoint}/chat/completions", json=body) as response,
        ):
            said = await response.text()
        return vf.ProgramResult(exit_code=int(response.status != 200), stdout="", stderr=said)
