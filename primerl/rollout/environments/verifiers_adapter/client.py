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
from primerl.rollout.environments.verifiers_adapter.apis import native_reply, refuse_unsupported
from primerl.rollout.environments.verifiers_adapter.messages import (
    own_message,
    wire_messages,
    wire_tool,
)
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

    @property
    def context_length(self) -> int | None:
        """The engine's context length; None for an engine that takes messages."""
        return None if hasattr(self._engine, "chat") else self._engine.context_length

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
            message=own_message(reply.message),
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
            message=own_message(reply.message),
            finish_reason=reply.finish_reason,
            usage=vf.Usage(
                prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens
            ),
        )

    async def respond(self, turn: Any) -> Any:
        """Return the reply to verifiers' ``PendingTurn`` as verifiers' ``Response``."""
        messages = wire_messages(turn.prompt)
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
        dialect: Any,
        body: Mapping[str, Any],
        sampling: Any,  # noqa: ARG002 - params decide
        session_id: str | None = None,  # noqa: ARG002 - the trace has an id
        turn: Any = None,
        headers: Mapping[str, str] | None = None,  # noqa: ARG002
    ) -> Any:
        """Return the reply for a harness that uses HTTP, through verifiers' own server.

        Its ``raw`` is the response in the API that the harness uses, which is ``dialect``.
        """
        refuse_unsupported(body, turn.tools)
        try:
            response = await self.respond(turn)
        except ContextFull as error:
            turn.trace.stop("context")
            raise vf.ProviderError(str(error), status_code=400) from error
        return native_reply(dialect, response, body)

    async def relay_aux(
        self,
        dialect: Any,
        route: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the number of tokens of a request, which Anthropic's clients ask for.

        Raises:
            NotImplementedError: the engine takes messages, so their tokens are unknown.
        """
        if self._renderer is None:
            counted: dict[str, Any] = await super().relay_aux(dialect, route, body, headers)
            return counted
        request = dialect.parse_request(body)
        rendered = self._renderer.render(
            wire_messages(request.messages),
            tools=[wire_tool(tool) for tool in request.tools or ()] or None,
            add_generation_prompt=True,
        )
        return {"input_tokens": len(rendered.token_ids)}


def _turn_tokens(call: EngineCall) -> Any:
    """Convert a call to verifiers' ``TurnTokens``."""
    return vf.TurnTokens.model_construct(
        prompt_ids=shared_tokens(call.prompt_ids),
        completion_ids=shared_tokens(call.completion.token_ids),
        completion_logprobs=SampledLogprobs(call.completion, filled_context=call.filled_context),
    )
