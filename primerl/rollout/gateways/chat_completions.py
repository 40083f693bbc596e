"""OpenAI's Chat Completions API (https://platform.openai.com/docs/api-reference/chat)."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from primerl.rollout.conversations.history import Reply
from primerl.rollout.conversations.messages import Message, text_of
from primerl.rollout.gateways.apis import (
    COMMENT,
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
    "engine": "server_error",
}


class ChatCompletions:
    """The Chat Completions API, which most clients and command-line agents use."""

    path = "/v1/chat/completions"
    ping = COMMENT

    def parse(self, body: Mapping[str, Any], replies: Mapping[str, Reply]) -> ModelRequest:  # noqa: ARG002
        """Parse a request's ``body``.

        Raises:
            BadRequest: the request is invalid, or asks for something unsupported.
        """
        refuse(
            body,
            n=(1,),
            stop=([],),
            logprobs=(False,),
            top_logprobs=(0,),
            tool_choice=("auto", "none"),
            functions=([],),  # the predecessor of tools
            function_call=("auto", "none"),
            modalities=(["text"],),
            response_format=({"type": "text"},),
        )
        tools = [_tool(tool) for tool in list_of(body, "tools")]
        messages = [_message(message) for message in list_of(body, "messages")]
        if not messages:
            raise BadRequest("the request has no messages")
        return ModelRequest(
            messages=messages,
            tools=tools if body.get("tool_choice") != "none" else None,
            max_tokens=token_limit(body, "max_completion_tokens", "max_tokens"),
            stream=bool(body.get("stream")),
            model=str(body.get("model", "policy")),
            body=body,
        )

    def answer(self, name: str, request: ModelRequest, reply: Reply) -> dict[str, Any]:
        """Return the response to ``request``, with the id ``name``."""
        said = reply.message
        calls = said.get("tool_calls")
        message = {"role": "assistant", "content": said["content"] or (None if calls else "")}
        if "reasoning_content" in said:
            message["reasoning_content"] = said["reasoning_content"]
        if calls:
            message["tool_calls"] = calls
        sampled = len(reply.call.completion.token_ids)
        cut = reply.finish_reason != "stop"
        reason = "length" if cut else "tool_calls" if calls else "stop"
        return {
            "id": f"chatcmpl-{name}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {
                "prompt_tokens": reply.prompt_tokens,
                "completion_tokens": sampled,
                "total_tokens": reply.prompt_tokens + sampled,
            },
        }

    def events(self, answer: Mapping[str, Any], request: ModelRequest) -> Iterator[bytes]:
        """Yield the response ``answer`` as a stream of server-sent events."""
        head = {
            "id": answer["id"],
            "object": "chat.completion.chunk",
            "created": answer["created"],
            "model": answer["model"],
        }

        def chunk(delta: Mapping[str, Any], reason: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            return event({**head, "choices": [choice]})

        (choice,) = answer["choices"]
        message = choice["message"]
        yield chunk({"role": "assistant", "content": "" if message["content"] == "" else None})
        for key in ("reasoning_content", "content"):
            for piece in pieces(message.get(key) or ""):
                yield chunk({key: piece})
        for index, call in enumerate(message.get("tool_calls", ())):
            function = call["function"]
            opened = {**call, "index": index, "function": {**function, "arguments": ""}}
            yield chunk({"tool_calls": [opened]})
            for piece in pieces(function["arguments"]):
                yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        yield chunk({}, choice["finish_reason"])
        options = request.body.get("stream_options")
        if isinstance(options, Mapping) and options.get("include_usage"):
            yield event({**head, "choices": [], "usage": answer["usage"]})
        yield b"data: [DONE]\n\n"

    def error(self, kind: str, code: str, message: str) -> dict[str, Any]:
        """Return an error in the API's format."""
        return {"error": {"message": message, "type": KINDS[kind], "param": None, "code": code}}

    def error_event(self, kind: str, code: str, message: str) -> bytes:
        """Return an error as the last event of a stream."""
        return event(self.error(kind, code, message))


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise BadRequest(f"a tool has the type {tool.get('type')!r}; only functions are supported")
    return function_tool(
        function.get("name"), function.get("description"), function.get("parameters")
    )


def _message(message: Mapping[str, Any]) -> Message:
    role = message.get("role")
    text = text_of(message.get("content"))
    if role in ("system", "developer"):
        return {"role": "system", "content": text}
    if role == "user":
        return {"role": "user", "content": text}
    if role == "tool":
        return {"role": "tool", "content": text, "tool_call_id": message.get("tool_call_id")}
    if role != "assistant":
        raise BadRequest(f"a message has the unsupported role {role!r}")
    calls = []
    for call in list_of(message, "tool_calls"):
        function = call.get("function")
        if not isinstance(function, Mapping):
            raise BadRequest(f"a tool call has the type {call.get('type')!r}; expected function")
        calls.append(function_call(call.get("id"), function.get("name"), function.get("arguments")))
    thought = message.get("reasoning_content") or message.get("reasoning")
    return assistant(text, text_of(thought), calls)
