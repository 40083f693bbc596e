"""An engine as verifiers' model client."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from primerl._common.optional import require
from primerl.rollout.engines.chat_endpoint import PromptTooLong
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.environments.conversation import known_routes
from primerl.rollout.environments.verifiers_adapter.trace_samples import (
    SampledLogprobs,
    reply_completion,
)
from primerl.types import Completion, SamplingParams

vf: Any = require("verifiers.v1", extra="verifiers")


class ContextFull(Exception):
    """The prompt leaves no room for a reply."""


@attrs.frozen(eq=False)
class Reply:
    """The engine's reply: its tokens, and the message that they decode to.

    An engine that takes messages has no tokens to give.
    """

    message: Any
    finish_reason: str
    usage: Any
    prompt_ids: list[int] = attrs.Factory(list)
    token_ids: list[int] = attrs.Factory(list)
    logprobs: SampledLogprobs | list[float] = attrs.Factory(list)


class EngineClient(vf.Client):  # type: ignore[misc]
    """verifiers' model client over one engine, for one episode.

    The renderer's stop tokens stop a reply as well as those of ``params``. An engine that takes
    messages (it has ``chat``) needs no renderer.
    """

    def __init__(self, engine: Engine, params: SamplingParams, renderer: Any) -> None:
        self.params = params
        if renderer is not None:
            stops = dict.fromkeys((*params.stop_token_ids, *renderer.get_stop_token_ids()))
            self.params = attrs.evolve(params, stop_token_ids=tuple(stops))
        self.sessions: dict[str, Any] = {}
        self.error: Exception | None = None
        self._engine = engine
        self._renderer = renderer

    async def complete(
        self,
        messages: Sequence[Any],
        *,
        tail: Sequence[Any],
        previous: tuple[list[int], list[int]] | None,
        completion: Completion | None,
        tools: Sequence[Any],
        session: str | None,
    ) -> Reply:
        """The engine's reply to ``messages``, the whole conversation.

        ``tail`` is new since ``previous``, the tokens of the last prompt and of the reply to it;
        with None, all is rendered. ``completion`` is that reply, as the engine returned it.

        Raises:
            ContextFull: the prompt leaves no room for a reply.
        """
        wire_tools = [wire_tool(tool) for tool in tools] or None
        if hasattr(self._engine, "chat"):
            return await self._chat(messages, wire_tools)
        prompt_ids = self._prompt(messages, tail, previous, wire_tools)
        room = self._engine.context_length - len(prompt_ids)
        if room < 1:
            raise ContextFull(
                f"the prompt's {len(prompt_ids)} tokens fill the engine's context of "
                f"{self._engine.context_length}"
            )
        params = attrs.evolve(
            self.params,
            max_tokens=min(self.params.max_tokens, room),
            routes_start=_routes_start(prompt_ids, previous, completion),
        )
        try:
            completion = await self._engine.generate(prompt_ids, params, session=session)
        except Exception as error:
            self.error = error  # verifiers keeps only its text
            raise
        token_ids = _shared(completion.token_ids)
        parsed = self._renderer.parse_response(token_ids, tools=wire_tools, prompt_ids=prompt_ids)
        calls = _tool_calls(parsed.tool_calls) if tools else None
        cut = completion.finish_reason == "length"
        filled = cut and room < self.params.max_tokens
        return Reply(
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            logprobs=SampledLogprobs(completion, filled_context=filled),
            usage=vf.Usage(prompt_tokens=len(prompt_ids), completion_tokens=len(token_ids)),
            message=vf.AssistantMessage(
                content=parsed.content or None,
                reasoning_content=parsed.reasoning_content,
                tool_calls=calls,
            ),
            finish_reason="length" if cut else "tool_calls" if calls else "stop",
        )

    async def _chat(self, messages: Sequence[Any], tools: Any) -> Reply:
        """The reply of an engine that takes messages."""
        engine: Any = self._engine
        try:
            reply = await engine.chat(
                [wire_message(message) for message in messages], self.params, tools=tools
            )
        except PromptTooLong as error:
            raise ContextFull(str(error)) from error
        except Exception as error:
            self.error = error  # verifiers keeps only its text
            raise
        said = reply.message
        calls = [
            vf.ToolCall(
                id=call["id"],
                name=call["function"]["name"],
                arguments=call["function"]["arguments"],
            )
            for call in said.get("tool_calls") or ()
        ]
        return Reply(
            message=vf.AssistantMessage(
                content=said.get("content"),
                reasoning_content=said.get("reasoning_content") or said.get("reasoning"),
                tool_calls=calls or None,
            ),
            finish_reason=reply.finish_reason,
            usage=vf.Usage(
                prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens
            ),
        )

    async def respond(self, turn: Any, session: str | None) -> Any:
        """The reply to verifiers' ``PendingTurn``, as its ``Response``."""
        reply = await self.complete(
            turn.prompt,
            tail=turn.tail,
            previous=turn.previous_renderer_token_ids(),
            completion=_last_completion(turn),
            tools=turn.tools,
            session=session,
        )
        return vf.Response.model_construct(
            id="",
            created=0,
            model="policy",
            message=reply.message,
            finish_reason=reply.finish_reason,
            usage=reply.usage,
            tokens=_turn_tokens(reply),
        )

    async def get_response(
        self,
        dialect: Any,  # noqa: ARG002 - the messages are parsed already
        body: Mapping[str, Any],  # noqa: ARG002
        sampling: Any,  # noqa: ARG002 - params decide
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,  # noqa: ARG002
    ) -> Any:
        """Serve a harness that uses HTTP, through verifiers' own server."""
        try:
            response = await self.respond(turn, session_id)
        except ContextFull as error:
            turn.trace.stop("context")
            raise vf.ProviderError(str(error), status_code=400) from error
        response.raw = _wire_response(response)
        return response

    def _prompt(
        self,
        messages: Sequence[Any],
        tail: Sequence[Any],
        previous: tuple[list[int], list[int]] | None,
        tools: Any,
    ) -> list[int]:
        rendered = None
        if previous is not None and tail:
            new = [wire_message(message) for message in tail]
            rendered = self._renderer.bridge_to_next_turn(*previous, new, tools=tools)
        if rendered is None:
            everything = [wire_message(message) for message in messages]
            rendered = self._renderer.render(everything, tools=tools, add_generation_prompt=True)
        token_ids: list[int] = rendered.token_ids
        return token_ids


SHARED_TOKENS = 1 << 20  # above the size of any vocabulary; a larger id must not fill the memory
_TOKENS: list[int] = []


def _shared(token_ids: np.ndarray) -> list[int]:
    """A list whose ``int`` objects, of 32 bytes each, are shared by all such lists."""
    above = int(token_ids.max(initial=-1)) + 1
    if above > SHARED_TOKENS:
        return [int(token) for token in token_ids]
    if above > len(_TOKENS):
        _TOKENS.extend(range(len(_TOKENS), above))
    return [_TOKENS[token] for token in token_ids.tolist()]


def _last_completion(turn: Any) -> Completion | None:
    """The reply that a turn continues."""
    if not turn.prefix_node_ids:
        return None
    return reply_completion(turn.trace.nodes[turn.prefix_node_ids[-1]])


def _routes_start(
    prompt_ids: list[int],
    previous: tuple[list[int], list[int]] | None,
    completion: Completion | None,
) -> int:
    """Where the expert routes of a prompt that goes on token-exactly begin to be unknown, or 0."""
    if previous is None:
        return 0
    spoken = [*previous[0], *previous[1]]
    if prompt_ids[: len(spoken)] != spoken:
        return 0
    return known_routes(completion, len(spoken))


def _turn_tokens(reply: Reply) -> Any:
    """Verifiers' tokens of a turn; None where the engine gives none."""
    if not reply.token_ids:
        return None
    return vf.TurnTokens.model_construct(
        prompt_ids=reply.prompt_ids,
        completion_ids=reply.token_ids,
        completion_logprobs=reply.logprobs,
    )


def wire_tool(tool: Any) -> dict[str, Any]:
    """A tool's schema in OpenAI's form."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def wire_message(message: Any) -> dict[str, Any]:
    """A message in OpenAI's form."""
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
        raise ValueError("a message holds an image; this adapter renders text only")
    return "\n".join(part.text for part in content)


def _wire_call(call: Any) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _sent_call(call: Mapping[str, Any]) -> Any:
    """A call in OpenAI's form as verifiers'."""
    function = call["function"]
    return vf.ToolCall(id=call["id"], name=function["name"], arguments=function["arguments"])


def _tool_calls(parsed: Sequence[Any]) -> list[Any] | None:
    calls = []
    for index, call in enumerate(parsed):
        if call.name and str(call.status) == "ok":
            arguments = call.arguments
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments or {})
            name = call.id or f"call_{index}"
            calls.append(vf.ToolCall(id=name, name=call.name, arguments=arguments))
    return calls or None


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
