"""A harness whose agent is a program that uses the OpenAI or the Anthropic client."""

from types import SimpleNamespace
from typing import Any, Literal

import verifiers.v1 as vf
from api_clients import HTTP, Chat, Messages, Responses, anthropic, connections, openai
from pydantic import Field

__all__ = ["SdkChat"]
CLIENTS = {"chat": Chat, "messages": Messages, "responses": Responses}
SEEN = []  # what the clients got, one entry per request
BODIES = []  # the answers of the server as text, one per request
COUNTED = []  # the numbers of tokens that Anthropic's client was told
LISTED = []  # the models that the client was told


async def keep(answer):
    await answer.aread()
    BODIES.append(answer.text)


class SdkChatConfig(vf.HarnessConfig):
    api: Literal["chat", "messages", "responses"] = "chat"
    stream: bool = False
    turns: int = 2
    options: dict[str, Any] = Field(default_factory=dict)
    count: bool = False


class SdkChat(vf.Harness[SdkChatConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        place = SimpleNamespace(
            base_url=endpoint, anthropic_url=endpoint.removesuffix("/v1"), key=secret
        )
        async with connections():
            for http in HTTP:
                http.event_hooks["response"].append(keep)
            client = CLIENTS[self.config.api](place, stream=self.config.stream)
            if self.config.count:
                messages = [{"role": "user", "content": data.prompt}]
                counted = await client.client.messages.count_tokens(
                    model="policy", messages=messages, tools=client.tools
                )
                COUNTED.append(counted.input_tokens)
                LISTED.extend([model async for model in client.client.models.list()])
            client.say(data.prompt)
            try:
                for turn in range(self.config.turns):
                    reply = await client.reply(**self.config.options)
                    SEEN.append(reply)
                    for call in reply[1]:
                        client.result(call, f"looked at {call[2]}")
                    if not reply[1]:
                        client.say(f"Go on, {turn}.")
            except (openai.APIStatusError, anthropic.APIStatusError) as error:
                SEEN.append(error)
                return vf.ProgramResult(exit_code=1, stdout="", stderr=str(error))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
