"""Anthropic's Messages API (https://docs.anthropic.com/en/api/messages)."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from primerl.rollout.conversations.history import Reply
from primerl.rollout.conversations.messages import Message, text_of
from primerl.rollout.gateways.apis import (
    BadRequest,
    ModelRequest,
    assistant,
    event,
    function_call,
    function_tool,
    list_of,
    pieces,
    refuse,
    token_limit,
)

KINDS = {
    "invalid": "invalid_request_error",
    "authentication": "authentication_error",
    "missing": "not_found_error",
    "engine": "api_error",
}


class AnthropicMessages:
    """The Messages API, which Claude Code and other clients use."""

    path = "/v1/messages"
    ping = event({"type": "ping"}, "ping")

    def parse(self, body: Mapping[str, Any], replies: Mapping[str, Reply]) -> ModelRequest:  # noqa: ARG002
        """Parse a request's ``body``.

        Raises:
            BadRequest: the request is invalid, or asks for something unsupported.
        """
        refuse(body, stop_sequences=([],))
        choice = body.get("tool_choice") or {"type": "auto"}
        if not isinstance(choice, Mapping) or choice.get("type") not in ("auto", "none"):
            raise BadRequest(f"tool_choice={choice!r} is not supported; expected auto or none")
        tools = [_tool(tool) for tool in list_of(body, "tools")]
        messages: list[Message] = []
        if body.get("system"):
            messages.append({"role": "system", "content": text_of(body["system"])})
        for message in list_of(body, "messages"):
            messages += _messages(message)
        if not messages:
            raise BadRequest("the request has no messages")
        return ModelRequest(
            messages=messages,
            tools=tools if choice["type"] == "auto" else None,
            max_tokens=token_limit(body, "max_tokens"),
            stream=bool(body.get("stream")),
            model=str(body.get("model", "policy")),
            body=body,
        )

    def answer(self, name: str, request: ModelRequest, reply: Reply) -> dict[str, Any]:
        """Return the response to ``request``, with the id ``name``."""
        said = reply.message
        blocks: list[dict[str, Any]] = []
        if "reasoning_content" in said:
            thought = said["reasoning_content"]
            blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
        if said["content"]:
            blocks.append({"type": "text", "text": said["content"]})
        for call in said.get("tool_calls", ()):
            function = call["function"]
            blocks.append(
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": function["name"],
                    "input": json.loads(function["arguments"]),
                }
            )
        cut = reply.finish_reason != "stop"
        called = bool(said.get("tool_calls"))
        return {
            "id": f"msg_{name}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": blocks,
            "stop_reason": "max_tokens" if cut else "tool_use" if called else "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "output_tokens": len(reply.call.completion.token_ids),
            },
        }

    def events(self, answer: Mapping[str, Any], request: ModelRequest) -> Iterator[bytes]:  # noqa: ARG002
        """Yield the response ``answer`` as a stream of server-sent events."""

        def named(kind: str, **fields: Any) -> bytes:
            return event({"type": kind, **fields}, kind)

        usage = answer["usage"]
        opened = {**answer, "content": [], "stop_reason": None, "usage": {**usage}}
        opened["usage"]["output_tokens"] = 0
        yield named("message_start", message=opened)
        for index, block in enumerate(answer["content"]):
            empty, key, kind, text = _streamed(block)
            yield named("content_block_start", index=index, content_block=empty)
            for piece in pieces(text):
                delta = {"type": kind, key: piece}
                yield named("content_block_delta", index=index, delta=delta)
            yield named("content_block_stop", index=index)
        ended = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
        tokens = {"output_tokens": usage["output_tokens"]}
        yield named("message_delta", delta=ended, usage=tokens)
        yield named("message_stop")

    def error(self, kind: str, code: str, message: str) -> dict[str, Any]:
        """Return an error in the API's format, with the code in its message."""
        return {"type": "error", "error": {"type": KINDS[kind], "message": f"{code}: {message}"}}

    def error_event(self, kind: str, code: str, message: str) -> bytes:
        """Return an error as the last event of a stream."""
        return event(self.error(kind, code, message), "error")


def _streamed(block: Mapping[str, Any]) -> tuple[dict[str, Any], str, str, str]:
    """Return a block without its text, then the key, delta type and text of its deltas."""
    if block["type"] == "tool_use":
        return (
            {**block, "input": {}},
            "partial_json",
            "input_json_delta",
            json.dumps(block["input"]),
        )
    key = block["type"]
    return {**block, key: ""}, key, f"{key}_delta", block[key]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise BadRequest(f"a tool has the type {tool['type']!r}; only custom tools are supported")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _messages(message: Mapping[str, Any]) -> Iterator[Message]:
    """Convert a message to OpenAI's format, where each tool result is a separate message."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    blocks = list_of({"content": content}, "content")
    if role == "assistant":
        yield _assistant(blocks)
        return
    if role not in ("user", "system"):
        raise BadRequest(f"a message has the unsupported role {role!r}")
    for block in blocks:
        if block.get("type") == "tool_result":
            result = text_of(block.get("content"))
            yield {"role": "tool", "content": result, "tool_call_id": block.get("tool_use_id")}
    texts = [block for block in blocks if block.get("type") != "tool_result"]
    if texts or not blocks:
        yield {"role": str(role), "content": text_of(texts)}


def _assistant(blocks: list[Mapping[str, Any]]) -> Message:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(block)
        elif kind == "thinking":
            thoughts.append(text_of(block.get("thinking")))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            calls.append(function_call(block.get("id"), block.get("name"), arguments))
        else:
            raise BadRequest(f"an assistant message has a block of the unsupported type {kind!r}")
    return assistant(text_of(texts), "".join(thoughts), calls)
