"""OpenAI's Responses API (https://platform.openai.com/docs/api-reference/responses)."""

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from primerl.rollout.conversations.history import Reply
from primerl.rollout.conversations.messages import Message
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
from primerl.rollout.gateways.chat_completions import KINDS
from primerl.rollout.gateways.fields import (
    RESPONSES,
    RESPONSES_ITEM,
    RESPONSES_TOOL,
    check_fields,
)
from primerl.rollout.gateways.offers import Offers
from primerl.rollout.gateways.recorded import RecordedReplies, RecordedReply
from primerl.rollout.gateways.texts import plain_text, text_and_reasoning

# Tools that the client runs, but whose calls have items of their own.
_PREDEFINED_TOOLS = ("local_shell", "shell", "apply_patch", "computer", "computer_use_preview")
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
# Items that change settings which the gateway ignores.
_SETTINGS = ("configuration_update",)


class Responses:
    """The Responses API, which Codex and newer clients use."""

    path = "/responses"

    def parse(
        self, body: Mapping[str, Any], recorded: RecordedReplies, ignored: Collection[str] = ()
    ) -> ModelRequest:
        """Parse a request's ``body``.

        Raises:
            BadRequest: the request is invalid, or asks for something unsupported.
        """
        check_fields(body, RESPONSES, ignored=ignored)
        choice = body.get("tool_choice")
        if choice not in (None, "auto", "none"):
            raise BadRequest(f"tool_choice={choice!r} is not supported; expected auto or none")
        _refuse_formats_and_logprobs(body)
        said = body.get("input")
        if isinstance(said, str):
            said = [{"role": "user", "content": said}]
        items = list_of({"input": said}, "input")
        offers = Offers()
        for tool in list_of(body, "tools"):
            _offer(tool, offers, ignored)
        for item in items:
            if item.get("type") == "additional_tools":
                for tool in list_of(item, "tools"):
                    _offer(tool, offers, ignored)
        messages: list[Message] = []
        if body.get("instructions"):
            text = plain_text(body["instructions"], "instructions", ignored)
            messages.append({"role": "system", "content": text})
        earlier = _earlier(body.get("previous_response_id"), recorded)
        template = template_arguments(body)
        if earlier is not None:
            skipped = 1 if earlier.request.instructed else 0
            messages += earlier.reply.conversation[skipped:]
            if body.get("chat_template_kwargs") is None:
                template = earlier.request.template
        messages += _folded(items, offers, recorded, ignored)
        if not messages:
            raise BadRequest("the request has no input", field="input")
        return ModelRequest(
            messages=messages,
            tools=offers.wire if choice != "none" else None,
            max_tokens=token_limit(body, "max_output_tokens"),
            stream=flag(body, "stream", default=False),
            model=str(body.get("model", "policy")),
            body=body,
            offers=offers,
            instructed=bool(body.get("instructions")),
            one_call=not flag(body, "parallel_tool_calls", default=True),
            template=template,
        )

    def answer(
        self, name: str, request: ModelRequest, reply: Reply, thought: str
    ) -> dict[str, Any]:
        """Return the response to ``request``, with the id ``name``."""
        cut = reply.finish_reason != "stop"
        sampled = len(reply.call.completion.token_ids)
        return _response(name, request) | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output_items(name, reply.message, request.offers, thought),
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + sampled,
            },
        }

    def waiting(self, name: str, request: ModelRequest, number: int) -> bytes:
        """Return the events that open a stream, then one after another that it is in progress."""
        kind = "response.created" if number == 0 else "response.in_progress"
        return _numbered(kind, number, response=_response(name, request))

    def events(self, answer: Mapping[str, Any], request: ModelRequest) -> Iterator[bytes]:
        """Yield the response ``answer`` as a stream of server-sent events."""
        name = answer["id"].removeprefix("resp_")
        for number in range(request.waited, 2):
            yield self.waiting(name, request, number)
        number = max(request.waited, 2)
        for index, item in enumerate(answer["output"]):
            for kind, fields in _item_events(index, item):
                yield _numbered(kind, number, **fields)
                number += 1
        yield _numbered(f"response.{answer['status']}", number, response=dict(answer))

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

    def error_event(self, failure: Failure, number: int) -> bytes:
        """Return an error as the last event of a stream, with "error" for OpenAI's clients."""
        return _numbered(
            "error",
            number,
            code=failure.code,
            message=failure.message,
            param=failure.field,
            error=self.error(failure)["error"],
        )


def _numbered(kind: str, number: int, **fields: Any) -> bytes:
    return event({"type": kind, "sequence_number": number, **fields}, kind)


def _response(name: str, request: ModelRequest) -> dict[str, Any]:
    """Return a response that is in progress."""
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": request.body.get("instructions"),
        "metadata": request.body.get("metadata") or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": not request.one_call,
        "previous_response_id": request.body.get("previous_response_id"),
        "temperature": None,
        "tool_choice": request.body.get("tool_choice") or "auto",
        "tools": request.body.get("tools") or [],
        "top_p": None,
        "usage": None,
    }


def _refuse_formats_and_logprobs(body: Mapping[str, Any]) -> None:
    text = body.get("text") or {}
    if not isinstance(text, Mapping) or text.get("format") not in (None, {"type": "text"}):
        raise BadRequest(
            "text.format is not supported: a grammar changes the distribution that tokens are "
            "sampled from, which the trainer would not know; leave it out",
            field="text.format",
            code="unsupported_parameter",
        )
    if "message.output_text.logprobs" in strings_of(body, "include"):
        raise BadRequest(
            "include has message.output_text.logprobs, which is not supported: the trainer gets "
            "logprobs, the client does not",
            field="include",
            code="unsupported_parameter",
        )


def _offer(
    tool: Mapping[str, Any],
    offers: Offers,
    ignored: Collection[str],
    *,
    namespace: str | None = None,
) -> None:
    kind = tool.get("type")
    if kind not in ("function", "custom", "namespace"):
        if kind in _PREDEFINED_TOOLS:
            raise BadRequest(
                f"a tool has the type {kind!r}, whose schema only OpenAI's models know; pass it as "
                "a function",
                field="tools",
            )
        offers.leave_out(str(kind), tool)
        return
    check_fields(tool, RESPONSES_TOOL, where="tools[].", ignored=ignored)
    if kind == "namespace":
        for inside in list_of(tool, "tools"):
            _offer(inside, offers, ignored, namespace=str(tool.get("name")))
    elif kind == "custom":
        offers.add_custom(
            tool.get("name"), tool.get("description"), tool.get("format"), namespace=namespace
        )
    else:
        offers.add_function(
            tool.get("name"), tool.get("description"), tool.get("parameters"), namespace=namespace
        )


def output_items(
    name: str, said: Mapping[str, Any], offers: Offers, thought: str
) -> list[dict[str, Any]]:
    """Convert a message to the output items of a response."""
    items: list[dict[str, Any]] = []
    if "reasoning_content" in said:
        summary = [{"type": "summary_text", "text": said["reasoning_content"]}]
        items.append(
            {
                "type": "reasoning",
                "id": f"rs_{name}",
                "summary": summary,
                "encrypted_content": thought,
            }
        )
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
        items.append(_call_item(f"{name}_{number}", call, offers))
    return items


def _call_item(name: str, call: Mapping[str, Any], offers: Offers) -> dict[str, Any]:
    function = call["function"]
    tool = offers.by_name.get(function["name"])
    item = {
        "type": "function_call",
        "id": f"fc_{name}",
        "call_id": call["id"],
        "name": function["name"] if tool is None else tool.name,
        "status": "completed",
    }
    if tool is not None and tool.namespace is not None:
        item["namespace"] = tool.namespace
    if tool is not None and tool.kind == "custom":
        given = custom_input(function["arguments"])
        return item | {"type": "custom_tool_call", "id": f"ctc_{name}", "input": given}
    return item | {"arguments": function["arguments"]}


def _item_events(index: int, item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = item["type"]
    empty = {"function_call": "arguments", "custom_tool_call": "input", "message": "content"}
    blank: Any = "" if kind in _CALLS else []
    added = {**item, empty.get(kind, "summary"): blank}
    if kind != "reasoning":
        added["status"] = "in_progress"
    yield "response.output_item.added", {"output_index": index, "item": added}
    place = {"output_index": index, "item_id": item["id"]}
    if kind == "message":
        yield from _message_events(place, item)
    elif kind == "reasoning":
        yield from _reasoning_events(place, item)
    elif kind == "function_call":
        for piece in pieces(item["arguments"]):
            yield "response.function_call_arguments.delta", {**place, "delta": piece}
        done = {**place, "name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", done
    else:
        for piece in pieces(item["input"]):
            yield "response.custom_tool_call_input.delta", {**place, "delta": piece}
        yield "response.custom_tool_call_input.done", {**place, "input": item["input"]}
    yield "response.output_item.done", {"output_index": index, "item": dict(item)}


def _message_events(
    place: Mapping[str, Any], item: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    (part,) = item["content"]
    inside = {**place, "content_index": 0}
    yield "response.content_part.added", {**inside, "part": {**part, "text": ""}}
    for piece in pieces(part["text"]):
        yield "response.output_text.delta", {**inside, "delta": piece, "logprobs": []}
    yield "response.output_text.done", {**inside, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**inside, "part": part}


def _reasoning_events(
    place: Mapping[str, Any], item: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    (part,) = item["summary"]
    inside = {**place, "summary_index": 0}
    yield "response.reasoning_summary_part.added", {**inside, "part": {**part, "text": ""}}
    for piece in pieces(part["text"]):
        yield "response.reasoning_summary_text.delta", {**inside, "delta": piece}
    yield "response.reasoning_summary_text.done", {**inside, "text": part["text"]}
    yield "response.reasoning_summary_part.done", {**inside, "part": part}


def _earlier(name: Any, recorded: RecordedReplies) -> RecordedReply | None:
    """Return the earlier response that a request continues, or None."""
    if name is None:
        return None
    found = recorded.find(str(name).removeprefix("resp_"))
    if found is None:
        raise BadRequest(
            f"previous_response_id={name!r} is not a response of this rollout",
            field="previous_response_id",
            code="previous_response_not_found",
        )
    return found


def _folded(
    items: list[Mapping[str, Any]],
    offers: Offers,
    recorded: RecordedReplies,
    ignored: Collection[str],
) -> Iterator[Message]:
    """Convert input items to messages, and merge consecutive items of the assistant into one."""
    said: list[Mapping[str, Any]] = []
    for number, given in enumerate(items):
        where = f"input[{number}]."
        item = _referred(given, recorded, where)
        check_fields(item, RESPONSES_ITEM, where=where, ignored=ignored)
        kind, role = item.get("type", "message"), item.get("role")
        if kind in ("additional_tools", *_SETTINGS):
            continue
        if kind in ("reasoning", *_CALLS) or (kind == "message" and role == "assistant"):
            said.append(item)
            continue
        if said:
            yield _assistant(said, offers, recorded, where, ignored)
            said = []
        if kind in _OUTPUTS:
            result = plain_text(item.get("output"), where, ignored)
            yield {"role": "tool", "content": result, "tool_call_id": identity(item, "call_id")}
        elif kind == "message" and role in ("user", "system", "developer"):
            text = plain_text(item.get("content"), where, ignored)
            yield {"role": "user" if role == "user" else "system", "content": text}
        else:
            raise BadRequest(
                f"an input item with type {kind!r} and role {role!r} is not supported",
                field=where[:-1],
            )
    if said:
        yield _assistant(said, offers, recorded, "input[].", ignored)


def _referred(item: Mapping[str, Any], recorded: RecordedReplies, where: str) -> Mapping[str, Any]:
    """Return the item of an earlier response to which a reference refers, or the item itself."""
    if item.get("type") != "item_reference" and set(item) != {"id"}:
        return item
    name = str(item.get("id"))
    found = recorded.find(name.partition("_")[2].partition("_")[0])
    if found is not None:
        reply = name.partition("_")[2].partition("_")[0]
        items = output_items(reply, found.reply.message, found.request.offers, recorded.key(reply))
        for one in items:
            if one["id"] == name:
                return one
    raise BadRequest(f"{name!r} is not an item of this rollout", field=where[:-1])


def _assistant(
    items: list[Mapping[str, Any]],
    offers: Offers,
    recorded: RecordedReplies,
    where: str,
    ignored: Collection[str],
) -> Message:
    texts, thoughts, calls = [], [], []
    for item in items:
        kind = item.get("type")
        if kind in _CALLS:
            name = offers.policy_name(item.get("name"), item.get("namespace"))
            arguments = item.get("arguments")
            if kind == "custom_tool_call":
                known = recorded.arguments(item.get("call_id"))
                arguments = as_arguments(item.get("input"), known)
            calls.append(function_call(item.get("call_id"), name, arguments))
        elif kind == "reasoning":
            thoughts.append(_thought(item, recorded, where, ignored))
        else:
            text, thought = text_and_reasoning(item.get("content"), where, ignored)
            texts.append(text)
            thoughts.append(thought)
    return assistant("".join(texts), "".join(thoughts), calls)


def _thought(
    item: Mapping[str, Any], recorded: RecordedReplies, where: str, ignored: Collection[str]
) -> str:
    """Return an item's reasoning: that of the reply that its key belongs to, or its own text."""
    known = recorded.thought(item.get("encrypted_content"))
    if known is not None:
        return known
    parts = [*list_of(item, "content"), *list_of(item, "summary")]
    texts = text_and_reasoning(parts, where, ignored)
    return "".join(texts)
