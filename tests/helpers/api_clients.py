"""Conversations through the OpenAI and Anthropic clients, with a common interface."""

import contextlib
import json

import pytest

openai = pytest.importorskip("openai", reason="openai is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")
httpx2 = pytest.importorskip("httpx2", reason="httpx2 is not installed")
anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")

PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
HTTP = []  # HTTP clients shared by all conversations, since creating one takes 50 ms


class Chat:
    """One conversation of a client: its messages, and its way to send back results of tools."""

    name = "chat"

    def __init__(self, session, *, stream=False, key=None):
        self.client = openai.AsyncOpenAI(
            base_url=session.base_url,
            api_key=key or session.key,
            max_retries=0,
            http_client=HTTP[0],
        )
        self.messages = []
        self.stream = stream
        function = {"name": "look", "description": "", "parameters": PARAMETERS}
        self.tools = [{"type": "function", "function": function}]

    def say(self, text):
        self.messages.append({"role": "user", "content": text})

    def result(self, call, text):
        self.messages.append({"role": "tool", "tool_call_id": call[0], "content": text})

    async def reply(self, **options):
        """Return the text, the calls as (id, name, arguments), and the finish reason."""
        fields = {"model": "policy", "messages": self.messages, "tools": self.tools, **options}
        if self.stream:
            text, calls, reason = "", {}, None
            stream = await self.client.chat.completions.create(**fields, stream=True)
            async for chunk in stream:
                (choice,) = chunk.choices
                text += choice.delta.content or ""
                for part in choice.delta.tool_calls or ():
                    call = calls.setdefault(part.index, [part.id, part.function.name, ""])
                    call[2] += part.function.arguments
                reason = choice.finish_reason
            said = {"role": "assistant", "content": text}
            if calls:
                said["tool_calls"] = [
                    {"id": i, "type": "function", "function": {"name": n, "arguments": a}}
                    for i, n, a in calls.values()
                ]
            self.messages.append(said)
            return text, [(i, n, json.loads(a)) for i, n, a in calls.values()], reason
        made = await self.client.chat.completions.create(**fields)
        message = made.choices[0].message
        self.messages.append(message.model_dump(exclude_none=True))
        calls = [
            (one.id, one.function.name, json.loads(one.function.arguments))
            for one in message.tool_calls or ()
        ]
        return message.content or "", calls, made.choices[0].finish_reason


class Messages(Chat):
    name = "messages"

    def __init__(self, session, *, stream=False, key=None):
        self.client = anthropic.AsyncAnthropic(
            base_url=session.anthropic_url,
            api_key=key or session.key,
            max_retries=0,
            http_client=HTTP[1],
        )
        self.messages = []
        self.stream = stream
        self.tools = [{"name": "look", "description": "", "input_schema": PARAMETERS}]

    def result(self, call, text):
        block = {"type": "tool_result", "tool_use_id": call[0], "content": text}
        self.messages.append({"role": "user", "content": [block]})

    async def reply(self, **options):
        fields = {"model": "policy", "max_tokens": 256, "messages": self.messages}
        fields |= {"tools": self.tools, **options}
        if self.stream:
            async with self.client.messages.stream(**fields) as stream:
                made = await stream.get_final_message()
        else:
            made = await self.client.messages.create(**fields)
        content = [block.model_dump(exclude_none=True) for block in made.content]
        self.messages.append({"role": "assistant", "content": content})
        text = "".join(block.text for block in made.content if block.type == "text")
        calls = [(b.id, b.name, b.input) for b in made.content if b.type == "tool_use"]
        reasons = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
        return text, calls, reasons[made.stop_reason]


class Responses(Chat):
    name = "responses"

    def __init__(self, session, **options):
        super().__init__(session, **options)
        self.tools = [{"type": "function", "name": "look", "parameters": PARAMETERS}]

    def result(self, call, text):
        self.messages.append({"type": "function_call_output", "call_id": call[0], "output": text})

    async def reply(self, **options):
        fields = {"model": "policy", "input": self.messages, "tools": self.tools, **options}
        if self.stream:
            text, made = "", None
            async for event in await self.client.responses.create(**fields, stream=True):
                if event.type == "response.output_text.delta":
                    text += event.delta
                if event.type in ("response.completed", "response.incomplete"):
                    made = event.response
            assert text == made.output_text
        else:
            made = await self.client.responses.create(**fields)
        self.messages += [item.model_dump(exclude_none=True) for item in made.output]
        calls = [
            (one.call_id, one.name, json.loads(one.arguments))
            for one in made.output
            if one.type == "function_call"
        ]
        reason = "length" if made.status == "incomplete" else "tool_calls" if calls else "stop"
        return made.output_text, calls, reason


class Continued(Responses):
    """A conversation that sends only new items, with the id of the last response."""

    name = "continued"
    last = None

    async def reply(self, **options):
        made = await self.client.responses.create(
            model="policy",
            input=self.messages,
            tools=self.tools,
            previous_response_id=self.last,
            instructions="Be brief.",
            **options,
        )
        self.last, self.messages = made.id, []
        calls = [
            (one.call_id, one.name, json.loads(one.arguments))
            for one in made.output
            if one.type == "function_call"
        ]
        return made.output_text, calls, "tool_calls" if calls else "stop"


CLIENTS = [Chat, Messages, Responses]


@contextlib.asynccontextmanager
async def connections():
    """Open the HTTP clients that all conversations of one event loop share."""
    async with httpx.AsyncClient() as http, httpx2.AsyncClient() as http2:
        HTTP[:] = [http, http2]
        yield
