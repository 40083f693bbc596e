"""The chat APIs of harnesses that use HTTP: Chat Completions, Messages and Responses.

verifiers' server parses the requests of all three. Its model client returns the responses.
"""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aiohttp import web

from primerl._common.optional import require
from primerl.rollout.environments.verifiers_adapter.messages import wire_message
from primerl.rollout.gateways.anthropic_messages import AnthropicMessages
from primerl.rollout.gateways.apis import ModelRequest
from primerl.rollout.gateways.offers import Offers
from primerl.rollout.gateways.responses import Responses, output_items

vf: Any = require("verifiers.v1", extra="verifiers")
_dialects: Any = require("verifiers.v1.dialects", extra="verifiers")
_interception: Any = require("verifiers.v1.interception", extra="verifiers")

STORED = ("previous_response_id", "conversation", "prompt")
"""Fields of a Responses request that refer to what only OpenAI's server stores."""

READ = {
    *("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal"),
    *("thinking", "redacted_thinking", "tool_use", "tool_result"),
}
"""The types of a message's parts that reach the policy; verifiers would drop others."""


class MessagesDialect(_dialects.AnthropicDialect):  # type: ignore[misc]
    """The Messages API. verifiers itself streams only replies that are one block of text."""

    def stream_events(self, raw: dict[str, Any]) -> list[bytes]:
        """Return a response as server-sent events."""
        return list(AnthropicMessages().events(raw, _streamed(raw)))


class ResponsesDialect(_dialects.ResponsesDialect):  # type: ignore[misc]
    """The Responses API. verifiers itself streams only replies that are one message."""

    def parse_request(self, body: dict[str, Any]) -> Any:
        """Parse a request.

        Raises:
            ValueError: the request refers to stored responses or items instead of repeating them,
                or asks for a response in the background.
        """
        stored = [field for field in STORED if body.get(field)]
        items = body.get("input")
        kinds = [one.get("type") for one in items or () if isinstance(one, Mapping)]
        if "item_reference" in kinds:
            stored.append("item_reference")
        if stored:
            raise ValueError(f"{stored[0]} is not supported; send the whole conversation as input")
        if body.get("background"):
            raise ValueError("background is not supported; leave it out")
        return super().parse_request(body)

    def stream_events(self, raw: dict[str, Any]) -> list[bytes]:
        """Return a response as server-sent events."""
        return list(Responses().events(raw, _streamed(raw)))


class HarnessApis(_interception.InterceptionServer):  # type: ignore[misc]
    """verifiers' server for harnesses that use HTTP, with replies of the engine."""

    def _handler_for(self, dialect: Any) -> Any:
        if isinstance(dialect, _dialects.AnthropicDialect):
            dialect = MessagesDialect()
        elif isinstance(dialect, _dialects.ResponsesDialect):
            dialect = ResponsesDialect()
        return super()._handler_for(dialect)

    async def handle_models(self, request: web.Request) -> web.Response:
        """Return the list of models, which is the policy; verifiers would ask its own provider."""
        for dialect in _dialects.DIALECTS:
            session = self.sessions.get(dialect.secret(request.headers))
            if session is not None:
                return web.json_response(_models(session.ctx.model, session.client.context_length))
        return web.json_response({"error": "unauthorized"}, status=401)


def refuse_unsupported(body: Mapping[str, Any], tools: Sequence[Any]) -> None:
    """Refuse a request with content that is not text, or with tools that are not functions.

    Raises:
        verifiers.v1.ProviderError: no renderer has a form for a part of a message or for a tool.
    """
    for kind in _part_types(body.get("messages") or body.get("input")):
        if kind not in READ:
            raise vf.ProviderError(
                f"a message has a part of type {kind!r}; only text is supported", status_code=400
            )
    for tool in tools:
        if tool.type != "function" or tool.namespace:
            kind = tool.type if tool.type != "function" else f"{tool.namespace} namespace"
            raise vf.ProviderError(
                f"the tool {tool.name!r} is of the type {kind!r}; only functions without a "
                "namespace are supported, so disable it in the harness",
                status_code=400,
            )


def _part_types(messages: Any) -> Iterator[Any]:
    """Yield the type of each part of the messages, including the parts of tool results."""
    for message in messages if isinstance(messages, list) else ():
        for content in (message.get("content"), message.get("output")):
            for part in content if isinstance(content, list) else ():
                if isinstance(part, Mapping):
                    yield part.get("type")
                    if part.get("type") == "tool_result":
                        yield from _part_types([part])


def native_reply(dialect: Any, response: Any, body: Mapping[str, Any]) -> Any:
    """Return verifiers' ``response`` with its ``raw`` body in the API of ``dialect``.

    Its message becomes the message that verifiers parses from the body. The harness sends back an
    equal message, so the next turn continues the branch.
    """
    model = str(body.get("model", response.model))
    if isinstance(dialect, _dialects.AnthropicDialect):
        raw = _message_body(response, model)
    elif isinstance(dialect, _dialects.ResponsesDialect):
        raw = _response_body(response, model, body)
    else:
        response.raw = _completion_body(response, model)
        return response
    response.message = dialect.parse_response(dialect.validate_response(raw)).message
    response.raw = raw
    return response


def _completion_body(response: Any, model: str) -> dict[str, Any]:
    message, usage = wire_message(response.message), response.usage
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": response.finish_reason}],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def _message_body(response: Any, model: str) -> dict[str, Any]:
    message, usage = response.message, response.usage
    blocks: list[dict[str, Any]] = []
    if message.reasoning_content:
        # Clients drop reasoning without a signature.
        thought = {"type": "thinking", "thinking": message.reasoning_content}
        blocks.append({**thought, "signature": uuid.uuid4().hex})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
        for call in message.tool_calls or ()
    ]
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks,
        "stop_reason": reasons.get(response.finish_reason, "end_turn"),
        "stop_sequence": None,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
        },
    }


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object; the Messages API has no form for malformed ones."""
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        values = None
    return values if isinstance(values, dict) else {"arguments": arguments}


def _response_body(response: Any, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    usage, cut = response.usage, response.finish_reason == "length"
    name = uuid.uuid4().hex
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": 0,
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "model": model,
        "output": output_items(name, wire_message(response.message), Offers(), name),
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "temperature": None,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "top_p": None,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def _streamed(raw: Mapping[str, Any]) -> ModelRequest:
    """Return the request that the gateway's formatters take beside a response."""
    return ModelRequest(
        messages=[], tools=None, max_tokens=None, stream=True, model=str(raw["model"]), body={}
    )


def _models(model: str, context_length: int | None) -> dict[str, Any]:
    """Return a list of one model, with the fields of both OpenAI's and Anthropic's format."""
    entry: dict[str, Any] = {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": "primerl",
        "type": "model",
        "display_name": model,
        "created_at": "1970-01-01T00:00:00Z",
    }
    if context_length is not None:
        entry["max_model_len"] = context_length
    return {
        "object": "list",
        "data": [entry],
        "has_more": False,
        "first_id": model,
        "last_id": model,
    }
