"""OpenAI's Responses API (https://platform.openai.com/docs/api-reference/responses)."""

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
from primerl.rollout.gateways.chat_completions import KINDS


class Responses:
    """The Responses API, which Codex and newer clients use, with ``previous_response_id``."""

    path = "/v1/responses"
    ping = COMMENT

    def parse(self, body: Mapping[str, Any], replies: Mapping[str, Reply]) -> ModelRequest:
        """Parse a request's ``body``.

        Raises:
            BadRequest: the request is invalid, or asks for something unsupported.
        """
        refuse(
            body,
            tool_choice=("auto", "none"),
            top_logprobs=(0,),
            conversation=(),
            prompt=(),
            background=(False,),
        )
        text = body.get("text") or {}
        if not isinstance(text, Mapping) or text.get("format") not in (None, {"type": "text"}):
            raise BadRequest("text.format is not supported; leave it out")
        tools = [_tool(tool) for tool in list_of(body, "tools")]
        messages: list[Message] = []
        if body.get("instructions"):
            messages.append({"role": "system", "content": text_of(body["instructions"])})
        messages += _earlier(body.get("previous_response_id"), replies)
        said = body.get("input")
        if isinstance(said, str):
            messages.append({"role": "user", "content": text_of(said)})
        else:
            messages += _folded(list_of(body, "input"))
        if not messages:
            raise BadRequest("the request has no input")
        return ModelRequest(
            messages=messages,
            tools=tools if body.get("tool_choice") != "none" else None,
            max_tokens=token_limit(body, "max_output_tokens"),
            stream=bool(body.get("stream")),
            model=str(body.get("model", "policy")),
            body=body,
        )

    def answer(self, name: str, request: ModelRequest, reply: Reply) -> dict[str, Any]:
        """Return the response to ``request``, with the id ``name``."""
        cut = reply.finish_reason != "stop"
        sampled = len(reply.call.completion.token_ids)
        return {
            "id": name,
            "object": "response",
            "created_at": int(time.time()),
            "status": "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": request.body.get("instructions"),
            "metadata": {},
            "model": request.model,
            "output": _items(name, reply.message),
            "parallel_tool_calls": True,
            "previous_response_id": request.body.get("previous_response_id"),
            "temperature": None,
            "tool_choice": "auto",
            "tools": request.body.get("tools") or [],
            "top_p": None,
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + sampled,
            },
        }

    def events(self, answer: Mapping[str, Any], request: ModelRequest) -> Iterator[bytes]:  # noqa: ARG002
        """Yield the response ``answer`` as a stream of server-sent events."""
        opened = {**answer, "status": "in_progress", "output": [], "usage": None}
        opened["incomplete_details"] = None
        numbered = [
            ("response.created", {"response": opened}),
            ("response.in_progress", {"response": opened}),
        ]
        for index, item in enumerate(answer["output"]):
            numbered += _item_events(index, item)
        numbered.append((f"response.{answer['status']}", {"response": dict(answer)}))
        for number, (kind, fields) in enumerate(numbered):
            yield event({"type": kind, "sequence_number": number, **fields}, kind)

    def error(self, kind: str, code: str, message: str) -> dict[str, Any]:
        """Return an error in the API's format."""
        return {"error": {"message": message, "type": KINDS[kind], "param": None, "code": code}}

    def error_event(self, kind: str, code: str, message: str) -> bytes:
        """Return an error as the last event of a stream, with "error" for OpenAI's clients."""
        said = self.error(kind, code, message)
        return event(
            {
                "type": "error",
                "sequence_number": 0,
                "code": code,
                "message": message,
                "param": None,
                "error": said["error"],
            },
            "error",
        )


def _items(name: str, said: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert a message to the output items of a response."""
    items: list[dict[str, Any]] = []
    if "reasoning_content" in said:
        summary = [{"type": "summary_text", "text": said["reasoning_content"]}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": summary})
    if said["content"] or not said.get("tool_calls"):
        text = {"type": "output_text", "text": said["content"], "annotations": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{name}",
                "role": "assistant",
                "status": "completed",
                "content": [text],
            }
        )
    for number, call in enumerate(said.get("tool_calls", ())):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{name}_{number}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
        )
    return items


def _item_events(index: int, item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    place = {"output_index": index, "item_id": item["id"]}
    added = {**item}
    if item["type"] == "function_call":
        added |= {"arguments": "", "status": "in_progress"}
    elif item["type"] == "message":
        added |= {"content": [], "status": "in_progress"}
    yield "response.output_item.added", {"output_index": index, "item": added}
    if item["type"] == "message":
        (part,) = item["content"]
        inside = {**place, "content_index": 0}
        yield "response.content_part.added", {**inside, "part": {**part, "text": ""}}
        for piece in pieces(part["text"]):
            yield "response.output_text.delta", {**inside, "delta": piece, "logprobs": []}
        yield "response.output_text.done", {**inside, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**inside, "part": part}
    elif item["type"] == "function_call":
        for piece in pieces(item["arguments"]):
            yield "response.function_call_arguments.delta", {**place, "delta": piece}
        done = {**place, "name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", done
    yield "response.output_item.done", {"output_index": index, "item": dict(item)}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise BadRequest(f"a tool has the type {tool.get('type')!r}; only functions are supported")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _earlier(name: Any, replies: Mapping[str, Reply]) -> list[Message]:
    """Return the conversation up to the response ``name``, without its instructions."""
    if name is None:
        return []
    if name not in replies:
        raise BadRequest(f"previous_response_id={name!r} is not a response of this rollout")
    messages = replies[name].conversation
    return messages[1:] if messages[0]["role"] == "system" else messages


def _folded(items: list[Mapping[str, Any]]) -> Iterator[Message]:
    """Convert input items to messages, and merge consecutive items of the assistant into one."""
    said: list[Mapping[str, Any]] = []
    for item in items:
        kind, role = item.get("type", "message"), item.get("role")
        if kind in ("reasoning", "function_call") or (kind == "message" and role == "assistant"):
            said.append(item)
            continue
        if said:
            yield _assistant(said)
            said = []
        if kind == "function_call_output":
            result = text_of(item.get("output"))
            yield {"role": "tool", "content": result, "tool_call_id": item.get("call_id")}
        elif kind == "message" and role in ("user", "system", "developer"):
            text = text_of(item.get("content"))
            yield {"role": "user" if role == "user" else "system", "content": text}
        else:
            raise BadRequest(f"an input item with type {kind!r} and role {role!r} is not supported")
    if said:
        yield _assistant(said)


def _assistant(items: list[Mapping[str, Any]]) -> Message:
    texts, thoughts, calls = [], [], []
    for item in items:
        if item.get("type") == "function_call":
            calls.append(
                function_call(item.get("call_id"), item.get("name"), item.get("arguments"))
            )
        elif item.get("type") == "reasoning":
            thoughts.append(text_of(item.get("summary")))
        else:
            texts.append(text_of(item.get("content")))
    return assistant("".join(texts), "".join(thoughts), calls)
