"""verifiers' model client, implemented by an engine."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from primerl._common.optional import require
from primerl.rollout.conversations.calls import ContextFull, EngineCall, shared_tokens
from primerl.rollout.conversations.history import History
from primerl.rollout.conversations.messages import Message
from primerl.rollout.engines.chat_endpoint import PromptTooLong
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.environments.verifiers_adapter.trace_calls import SampledLogprobs
from primerl.types import SamplingParams

vf: Any = require("verifiers.v1", extra="verifiers")


@attrs.frozen(kw_only=True, eq=False)
class ModelReply:
    """The policy's reply as verifiers' message, and the call that sampled it.

    ``call`` is None for an engine that takes messages, because it does not report tokens.
    """

    message: Any
    finish_reason: str
    usage: Any
    call: EngineCall | None = None


class EngineClient(vf.Client):  # type: ignore[misc]
    """verifiers' model client for one episode, implemented by one engine.

    Each trace has a ``History``, so sampled tokens are fed back to the engine unchanged. Replies
    end at the stop tokens of the renderer and of ``params``. An engine that takes messages (one
    with a ``chat`` method) needs no renderer.
    """

    def __init__(self, engine: Engine, params: SamplingParams, renderer: Any) -> None:
        self.sessions: dict[str, Any] = {}
        self.error: Exception | None = None
        self._engine = engine
        self._params = params
        self._renderer = renderer
        self._histories: dict[str, History] = {}

    async def complete(
        self, messages: Sequence[Message], *, tools: Sequence[Any], trace: str
    ) -> ModelReply:
        """Return the policy's reply to a conversation.

        ``messages`` is the whole conversation in OpenAI's format. ``trace`` identifies the trace of
        verifiers to which it belongs.

        Raises:
            ContextFull: the prompt leaves no room for a reply.
        """
        wire_tools = [wire_tool(tool) for tool in tools] or None
        try:
            if hasattr(self._engine, "chat"):
                return await self._chat(messages, wire_tools)
            return await self._sample(messages, wire_tools, trace)
        except ContextFull:
            raise
        except Exception as error:
            self.error = error  # stored here, because verifiers keeps only its text
            raise

    async def _sample(self, messages: Sequence[Message], tools: Any, trace: str) -> ModelReply:
        if trace not in self._histories:
            self._histories[trace] = History(
                self._engine, self._renderer, self._params, session=trace
            )
        reply = await self._histories[trace].reply(messages, tools=tools)
        sampled = len(reply.call.completion.token_ids)
        ended = "tool_calls" if "tool_calls" in reply.message else "stop"
        return ModelReply(
            message=_own_message(reply.message),
            finish_reason="length" if reply.call.completion.finish_reason == "length" else ended,
            usage=vf.Usage(prompt_tokens=reply.prompt_tokens, completion_tokens=sampled),
            call=reply.call,
        )

    async def _chat(self, messages: Sequence[Message], tools: Any) -> ModelReply:
        """Return the reply of an engine that takes messages."""
        engine: Any = self._engine
        try:
            reply = await engine.chat(list(messages), self._params, tools=tools)
        except PromptTooLong as error:
            raise ContextFull(str(error)) from error
        return ModelReply(
            message=_own_message(reply.message),
            finish_reason=reply.finish_reason,
            usage=vf.Usage(
                prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens
            ),
        )

    async def respond(self, turn: Any) -> Any:
        """Return the reply to verifiers' ``PendingTurn`` as verifiers' ``Response``."""
        messages = [wire_message(message) for message in turn.prompt]
        reply = await self.complete(messages, tools=turn.tools, trace=turn.trace.id)
        return vf.Response.model_construct(
            id="",
            created=0,
            model="policy",
            message=reply.message,
            finish_reason=reply.finish_reason,
            usage=reply.usage,
            tokens=None if reply.call is None else _turn_tokens(reply.call),
        )

    async def get_response(
        self,
        dialect: Any,  # noqa: ARG002 - the messages are parsed already
        body: Mapping[str, Any],  # noqa: ARG002
        sampling: Any,  # noqa: ARG002 - params decide
        session_id: str | None = None,  # noqa: ARG002 - the trace has an id
        turn: Any = None,
        headers: Mapping[str, str] | None = None,  # noqa: ARG002
    ) -> Any:
        """Return the reply for a harness that uses HTTP, through verifiers' own server."""
        try:
            response = await self.respond(turn)
        except ContextFull as error:
            turn.trace.stop("context")
            raise vf.ProviderError(str(error), status_code=400) from error
        response.raw = _wire_response(response)
        return response


def _turn_tokens(call: EngineCall) -> Any:
    """Convert a call to verifiers' ``TurnTokens``."""
    return vf.TurnTokens.model_construct(
        prompt_ids=shared_tokens(call.prompt_ids),
        completion_ids=shared_tokens(call.completion.token_ids),
        completion_logprobs=SampledLogprobs(call.completion, filled_context=call.filled_context),
    )


def wire_tool(tool: Any) -> dict[str, Any]:
    """Return a tool's schema in OpenAI's format."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def wire_message(message: Any) -> dict[str, Any]:
    """Convert verifiers' message to OpenAI's format."""
    wire = {"role": message.role, "content": _text(message.content)}
    if message.role == "assistant":
        if message.reasoning_content is not None:
            wire["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            wire["tool_calls"] = [_wire_call(call) for call in message.tool_calls]
    elif message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            wire["name"] = message.name
    return wire


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.type != "text" for part in content):
        raise ValueError("a message has a part that is not text; this adapter supports text only")
    return "\n".join(part.text for part in content)


def _wire_call(call: Any) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _own_message(message: Message) -> Any:
    """Convert a reply in OpenAI's format to verifiers' message."""
    calls = [
        vf.ToolCall(
            id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"]
        )
        for call in message.get("tool_calls") or ()
    ]
    return vf.AssistantMessage(
        content=message.get("content") or None,
        reasoning_content=message.get("reasoning_content") or message.get("reasoning"),
        tool_calls=calls or None,
    )


def _wire_response(response: Any) -> dict[str, Any]:
    message, usage = wire_message(response.message), response.usage
    return {
        "id": "primerl",
        "object": "chat.completion",
        "created": 0,
        "model": response.model,
        "choices": [{"index": 0, "message": message, "finish_reason": response.finish_reason}],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }
