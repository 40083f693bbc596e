"""An engine as verifiers' model client."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from primerl._optional import require
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.environments.verifiers_adapter.trace_samples import SampledLogprobs
from primerl.types import SamplingParams

vf: Any = require("verifiers.v1", extra="verifiers")


class ContextFull(Exception):
    """The prompt leaves no room for a reply."""


@attrs.frozen(eq=False)
class Reply:
    """The engine's reply: its tokens, and the message that they decode to."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: SampledLogprobs
    message: Any
    finish_reason: str

    @property
    def usage(self) -> Any:
        """Verifiers' token count."""
        return vf.Usage(prompt_tokens=len(self.prompt_ids), completion_tokens=len(self.token_ids))


class EngineClient(vf.Client):  # type: ignore[misc]
    """verifiers' model client over one engine, for one episode.

    The renderer's stop tokens stop a reply as well as those of ``params``.
    """

    def __init__(self, engine: Engine, params: SamplingParams, renderer: Any) -> None:
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
        tools: Sequence[Any],
        session: str | None,
    ) -> Reply:
        """The engine's reply to ``messages``, the whole conversation.

        ``tail`` is new since ``previous``, the tokens of the last prompt and of the reply to it;
        with None, all is rendered.

        Raises:
            ContextFull: the prompt leaves no room for a reply.
        """
        wire_tools = [_wire_tool(tool) for tool in tools] or None
        prompt_ids = self._prompt(messages, tail, previous, wire_tools)
        room = self._engine.context_length - len(prompt_ids)
        if room < 1:
            raise ContextFull(
                f"the prompt's {len(prompt_ids)} tokens fill the engine's context of "
                f"{self._engine.context_length}"
            )
        params = self.params
        if room < params.max_tokens:
            params = attrs.evolve(params, max_tokens=room)
        try:
            completion = await self._engine.generate(prompt_ids, params, session=session)
        except Exception as error:
            self.error = error  # verifiers keeps only its text
            raise
        token_ids = _shared(completion.token_ids)
        parsed = self._renderer.parse_response(token_ids, tools=wire_tools, prompt_ids=prompt_ids)
        calls = _tool_calls(parsed.tool_calls) if tools else None
        cut = completion.finish_reason == "length"
        return Reply(
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            logprobs=SampledLogprobs(completion, filled_context=cut and params is not self.params),
            message=vf.AssistantMessage(
                content=parsed.content or None,
                reasoning_content=parsed.reasoning_content,
                tool_calls=calls,
            ),
            finish_reason="length" if cut else "tool_calls" if calls else "stop",
        )

    async def respond(self, turn: Any, session: str | None) -> Any:
        """The reply to verifiers' ``PendingTurn``, as its ``Response``."""
        reply = await self.complete(
            turn.prompt,
            tail=turn.tail,
            previous=turn.previous_renderer_token_ids(),
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
            tokens=vf.TurnTokens.model_construct(
                prompt_ids=reply.prompt_ids,
                completion_ids=reply.token_ids,
                completion_logprobs=reply.logprobs,
            ),
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
            new = [_wire_message(message) for message in tail]
            rendered = self._renderer.bridge_to_next_turn(*previous, new, tools=tools)
        if rendered is None:
            everything = [_wire_message(message) for message in messages]
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


def _wire_tool(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _wire_message(message: Any) -> dict[str, Any]:
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
    message, usage = _wire_message(response.message), response.usage
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
