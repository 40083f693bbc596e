"""OpenAI's Chat Completions API (https://platform.openai.com/docs/api-reference/chat)."""

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from primerl.rollout.conversations.history import Reply
from primerl.rollout.conversations.messages import Message, text_of
from primerl.rollout.gateways.apis import (
    BadRequest,
    Failure,
    ModelRequest,
    as_arguments,
    assistant,
    custom_input,
    event,
    flag,
    function_call,
    identity,
    list_of,
    pieces,
    strings_of,
    template_arguments,
    token_limit,
)
from primerl.rollout.gateways.fields import (
    CHAT,
    CHAT_CALL,
    CHAT_MESSAGE,
    CHAT_TOOL,
    FUNCTION,
    check_fields,
)
from primerl.rollout.gateways.offers import Offers
from primerl.rollout.gateways.recorded import RecordedReplies
from primerl.rollout.gateways.texts import plain_text, text_and_reasoning

KINDS = {
    "invalid": "invalid_request_error",
    "authentication": "authentication_error",
    "missing": "not_found_error",
    "engine": "server_error",
}


class ChatCompletions:
    """The Chat Completions API, which most clients and command-line agents use."""

    path = "/chat/completions"

    def parse(
        self,
        body: Mapping[str, Any],
        recorded: RecordedReplies,
        ignored: Collection[str] = (),
    ) -> ModelRequest:
        """Parse a request's ``body``.

        Raises:
            BadRequest: the request is invalid, or asks for something unsupported.
        """
        check_fields(body, CHAT, ignored=ignored)
        choice = body.get("tool_choice")
        if choice not in (None, "auto", "none"):
            raise BadRequest(f"tool_choice={choice!r} is not supported; expected auto or none")
        offers = Offers()
        for tool in list_of(body, "tools"):
            _offer(tool, offers, ignored)
        if body.get("web_search_options") is not None:
            offers.leave_out("web_search_options", {})
        given = list_of(body, "messages")
        messages = [
            _message(message, offers, recorded, f"messages[{number}].", ignored)
            for number, message in enumerate(given)
        ]
        if not messages:
            raise BadRequest("the request has no messages", field="messages")
        begins = ""
        if _continues(body, given[-1]):
            begins = str(messages.pop()["content"])
        elif body.get("add_generation_prompt") is False:
            raise BadRequest(
                "add_generation_prompt=false needs continue_final_message=true, since the policy "
                "replies",
                field="add_generation_prompt",
            )
        return ModelRequest(
            messages=messages,
            tools=offers.wire if choice != "none" else None,
            max_tokens=token_limit(body, "max_completion_tokens", "max_tokens"),
            stream=flag(body, "stream", default=False),
            model=str(body.get("model", "policy")),
            body=body,
            offers=offers,
            stop=strings_of(body, "stop"),
            one_call=not flag(body, "parallel_tool_calls", default=True),
            begins=begins,
            template=template_arguments(body),
        )

    def answer(
        self,
        name: str,
        request: ModelRequest,
        reply: Reply,
        thought: str,  # noqa: ARG002  reasoning is sent as it is
    ) -> dict[str, Any]:
        """Return the response to ``request``, with the id ``name``."""
        said = reply.message
        calls = [_answered_call(call, request.offers) for call in said.get("tool_calls", ())]
        message = {"role": "assistant", "content": said["content"] or (None if calls else "")}
        if "reasoning_content" in said:
            # Servers and clients disagree about the name.
            message["reasoning_content"] = message["reasoning"] = said["reasoning_content"]
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

    def waiting(self, name: str, request: ModelRequest, number: int) -> bytes:  # noqa: ARG002
        """Return a chunk without content."""
        head = {
            "id": f"chatcmpl-{name}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }
        delta = {"role": "assistant", "content": ""}
        return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

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
        for piece in pieces(message.get("reasoning_content") or ""):
            yield chunk({"reasoning_content": piece, "reasoning": piece})
        for piece in pieces(message.get("content") or ""):
            yield chunk({"content": piece})
        for index, call in enumerate(message.get("tool_calls", ())):
            kind = call["type"]
            key = "arguments" if kind == "function" else "input"
            opened = {**call, "index": index, kind: {**call[kind], key: ""}}
            yield chunk({"tool_calls": [opened]})
            for piece in pieces(call[kind][key]):
                yield chunk({"tool_calls": [{"index": index, kind: {key: piece}}]})
        yield chunk({}, choice["finish_reason"])
        options = request.body.get("stream_options")
        if isinstance(options, Mapping) and options.get("include_usage"):
            yield event({**head, "choices": [], "usage": answer["usage"]})
        yield b"data: [DONE]\n\n"

    def error(self, failure: Failure) -> dict[str, Any]:
        """Return an error in the API's format."""
        return {
            "error": {
                "message": failure.message,
                "type": KINDS[failure.kind],
                "param": failure.field,
                "code": failure.code,
            }
        }

    def error_event(self, failure: Failure, number: int) -> bytes:  # noqa: ARG002
        """Return an error as the last event of a stream."""
        return event(self.error(failure))


def _continues(body: Mapping[str, Any], last: Mapping[str, Any]) -> bool:
    """Return whether the last message is the beginning of the reply."""
    continues = flag(body, "continue_final_message", default=False)
    if not (continues or flag(last, "prefix", default=False)):
        return False
    if last.get("role") != "assistant" or last.get("tool_calls"):
        raise BadRequest(
            "only an assistant's text can be continued; the last message is something else",
            field="messages",
        )
    return True


def _offer(tool: Mapping[str, Any], offers: Offers, ignored: Collection[str]) -> None:
    kind = tool.get("type", "function")
    if not isinstance(kind, str):
        raise BadRequest(f"a tool has the type {kind!r}; only functions are supported")
    if kind not in ("function", "custom"):
        offers.leave_out(kind, tool)
        return
    check_fields(tool, CHAT_TOOL, where="tools[].", ignored=ignored)
    inside = tool.get(kind)
    if not isinstance(inside, Mapping):
        raise BadRequest(f"a tool of the type {kind!r} has no {kind!r}", field="tools")
    if kind == "custom":
        offers.add_custom(inside.get("name"), inside.get("description"), inside.get("format"))
        return
    check_fields(inside, FUNCTION, where="tools[].function.", ignored=ignored)
    offers.add_function(inside.get("name"), inside.get("description"), inside.get("parameters"))


def _message(
    message: Mapping[str, Any],
    offers: Offers,
    recorded: RecordedReplies,
    where: str,
    ignored: Collection[str],
) -> Message:
    check_fields(message, CHAT_MESSAGE, where=where, ignored=ignored)
    role = message.get("role")
    if role in ("system", "developer", "user"):
        said = {"role": "user" if role == "user" else "system", "content": ""}
        said["content"] = plain_text(message.get("content"), where, ignored)
        return _named(said, message)
    if role == "tool":
        result = plain_text(message.get("content"), where, ignored)
        call = identity(message, "tool_call_id")
        return _named({"role": "tool", "content": result, "tool_call_id": call}, message)
    if role != "assistant":
        raise BadRequest(f"a message has the unsupported role {role!r}", field=f"{where}role")
    text, thought = text_and_reasoning(message.get("content"), where, ignored)
    thought = _reasoning(message) or thought
    calls = [
        _call(call, offers, recorded, where, ignored) for call in list_of(message, "tool_calls")
    ]
    return assistant(text + text_of(message.get("refusal")), thought, calls)


def _named(said: dict[str, Any], message: Mapping[str, Any]) -> Message:
    if isinstance(message.get("name"), str):
        said["name"] = message["name"]
    return said


def _reasoning(message: Mapping[str, Any]) -> str:
    """Return the reasoning of a message, under the first of the names that clients use."""
    for key in ("reasoning_content", "reasoning"):
        if message.get(key):
            return text_of(message[key])
    details = [*list_of(message, "reasoning_details"), *list_of(message, "thinking_blocks")]
    texts = [one.get("text") or one.get("summary") or one.get("thinking") for one in details]
    return "".join(text_of(text) for text in texts)


def _call(
    call: Mapping[str, Any],
    offers: Offers,
    recorded: RecordedReplies,
    where: str,
    ignored: Collection[str],
) -> dict[str, Any]:
    check_fields(call, CHAT_CALL, where=f"{where}tool_calls[].", ignored=ignored)
    kind = call.get("type", "function")
    inside = call.get(kind) if isinstance(kind, str) else None
    if kind not in ("function", "custom") or not isinstance(inside, Mapping):
        raise BadRequest(f"a tool call has the type {kind!r}; expected function or custom")
    name = offers.policy_name(inside.get("name"))
    if kind == "custom":
        known = recorded.arguments(call.get("id"))
        return function_call(call.get("id"), name, as_arguments(inside.get("input"), known))
    return function_call(call.get("id"), name, inside.get("arguments"))


def _answered_call(call: Mapping[str, Any], offers: Offers) -> dict[str, Any]:
    function = call["function"]
    tool = offers.by_name.get(function["name"])
    if tool is None or tool.kind == "function":
        return dict(call)
    custom = {"name": tool.name, "input": custom_input(function["arguments"])}
    return {"id": call["id"], "type": "custom", "custom": custom}
