"""Anthropic's Messages API (https://docs.anthropic.com/en/api/messages)."""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from primerl.rollout.conversations.history import Reply
from primerl.rollout.conversations.messages import Message
from primerl.rollout.gateways.apis import (
    BadRequest,
    Failure,
    ModelRequest,
    assistant,
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
    BLOCK,
    MESSAGE,
    MESSAGES,
    MESSAGES_TOOL,
    check_fields,
)
from primerl.rollout.gateways.offers import Offers
from primerl.rollout.gateways.recorded import RecordedReplies, RecordedReply
from primerl.rollout.gateways.texts import plain_text

KINDS = {
    "invalid": "invalid_request_error",
    "authentication": "authentication_error",
    "missing": "not_found_error",
    "engine": "api_error",
}
# Tools that Anthropic's servers run; the client runs other predefined tools itself.
_SERVER_TOOLS = (
    "web_search", "web_fetch", "code_execution", "tool_search_tool", "mcp_toolset", "advisor",
)  # fmt: skip
_ERROR = "Error: "
_BLOCKS = ("text", "tool_result", "tool_use", "thinking", "redacted_thinking")


class AnthropicMessages:
    """The Messages API, which Claude Code and other clients use."""

    path = "/messages"

    def parse(
        self, body: Mapping[str, Any], recorded: RecordedReplies, ignored: Collection[str] = ()
    ) -> ModelRequest:
        """Parse a request's ``body``.

        Raises:
            BadRequest: the request is invalid, or asks for something unsupported.
        """
        check_fields(body, MESSAGES, ignored=ignored)
        _refuse_formats_and_edits(body)
        choice = body.get("tool_choice") or {"type": "auto"}
        if not isinstance(choice, Mapping) or choice.get("type") not in ("auto", "none"):
            raise BadRequest(f"tool_choice={choice!r} is not supported; expected auto or none")
        continued = _thread(body.get("thread"), recorded)
        earlier = [] if continued is None else continued.reply.conversation
        instructed = continued is not None and continued.request.instructed
        offers = None if continued is None else continued.request.offers
        template = template_arguments(body)
        if continued is not None and body.get("chat_template_kwargs") is None:
            template = continued.request.template
        if body.get("tools") is not None or offers is None:
            offers = Offers()
            for tool in list_of(body, "tools"):
                _offer(tool, offers, ignored)
        messages: list[Message] = list(earlier)
        if body.get("system"):
            system = {"role": "system", "content": plain_text(body["system"], "system", ignored)}
            messages[: 1 if instructed else 0] = [system]
            instructed = True
        given = list_of(body, "messages")
        for number, message in enumerate(given):
            messages += _messages(message, offers, recorded, f"messages[{number}].", ignored)
        if not messages:
            raise BadRequest("the request has no messages", field="messages")
        begins = ""
        if given and given[-1].get("role") == "assistant":
            begins = _beginning(messages.pop())
        return ModelRequest(
            messages=messages,
            tools=offers.wire if choice["type"] == "auto" else None,
            max_tokens=token_limit(body, "max_tokens"),
            stream=flag(body, "stream", default=False),
            model=str(body.get("model", "policy")),
            body=body,
            offers=offers,
            instructed=instructed,
            stop=strings_of(body, "stop_sequences"),
            one_call=flag(choice, "disable_parallel_tool_use", default=False),
            begins=begins,
            template=template,
        )

    def answer(
        self, name: str, request: ModelRequest, reply: Reply, thought: str
    ) -> dict[str, Any]:
        """Return the response to ``request``, with the id ``name``."""
        said = reply.message
        blocks: list[dict[str, Any]] = []
        if "reasoning_content" in said:
            reasoning = said["reasoning_content"]
            blocks.append({"type": "thinking", "thinking": reasoning, "signature": thought})
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
        return {
            "id": f"msg_{name}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": blocks,
            "stop_reason": _stop_reason(reply),
            "stop_sequence": reply.stop,
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "output_tokens": len(reply.call.completion.token_ids),
            },
        }

    def waiting(self, name: str, request: ModelRequest, number: int) -> bytes:  # noqa: ARG002
        """Return a ping."""
        return _event("ping")

    def events(self, answer: Mapping[str, Any], request: ModelRequest) -> Iterator[bytes]:  # noqa: ARG002
        """Yield the response ``answer`` as a stream of server-sent events."""
        usage = answer["usage"]
        opened = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
        opened["usage"] = {**usage, "output_tokens": 0}
        yield _event("message_start", message=opened)
        for index, block in enumerate(answer["content"]):
            empty, key, kind, text = _streamed(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for piece in pieces(text):
                delta = {"type": kind, key: piece}
                yield _event("content_block_delta", index=index, delta=delta)
            if "signature" in block:
                delta = {"type": "signature_delta", "signature": block["signature"]}
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        ended = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
        yield _event("message_delta", delta=ended, usage=usage)
        yield _event("message_stop")

    def error(self, failure: Failure) -> dict[str, Any]:
        """Return an error in the API's format, with the code in its message."""
        said = {
            "type": KINDS[failure.kind],
            "message": f"{failure.code}: {failure.message}",
            "details": {"error_code": failure.code},
        }
        return {"type": "error", "error": said}

    def error_event(self, failure: Failure, number: int) -> bytes:  # noqa: ARG002
        """Return an error as the last event of a stream."""
        return event(self.error(failure), "error")


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _stop_reason(reply: Reply) -> str:
    if reply.stop is not None:
        return "stop_sequence"
    if reply.finish_reason == "context":
        return "model_context_window_exceeded"
    if reply.finish_reason != "stop":
        return "max_tokens"
    return "tool_use" if reply.message.get("tool_calls") else "end_turn"


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
    empty = {**block, key: ""}
    if "signature" in block:
        empty["signature"] = ""
    return empty, key, f"{key}_delta", block[key]


def _refuse_formats_and_edits(body: Mapping[str, Any]) -> None:
    output = body.get("output_config")
    if isinstance(output, Mapping) and output.get("format") is not None:
        raise BadRequest(
            "output_config.format is not supported: a grammar changes the distribution that tokens "
            "are sampled from, which the trainer would not know; leave it out",
            field="output_config.format",
            code="unsupported_parameter",
        )
    managed = body.get("context_management") or {}
    if not isinstance(managed, Mapping):
        raise BadRequest("context_management is not an object", field="context_management")
    for edit in list_of(managed, "edits"):
        keeps_all = str(edit.get("type")).startswith("clear_thinking") and (
            edit.get("keep") == "all"
        )
        if not keeps_all:
            raise BadRequest(
                "context_management is not supported: the gateway does not shorten conversations; "
                "leave it out",
                field="context_management",
                code="unsupported_parameter",
            )


def _thread(thread: Any, recorded: RecordedReplies) -> RecordedReply | None:
    """Return the reply whose conversation a request continues without repeating it, or None."""
    if thread is None:
        return None
    kind = thread.get("type") if isinstance(thread, Mapping) else None
    if kind == "create":
        return None
    if kind != "continue":
        raise BadRequest(
            f"thread={thread!r} is not supported; expected create or continue",
            field="thread",
            code="thread_unsupported_request",
        )
    name = str(thread.get("previous_message_id"))
    found = recorded.find(name.removeprefix("msg_"))
    if found is None:
        raise BadRequest(
            f"previous_message_id={name!r} is not a message of this rollout",
            field="thread.previous_message_id",
            code="thread_not_found",
        )
    return found


def _offer(tool: Mapping[str, Any], offers: Offers, ignored: Collection[str]) -> None:
    kind = tool.get("type", "custom")
    if kind == "custom":
        check_fields(tool, MESSAGES_TOOL, where="tools[].", ignored=ignored)
        offers.add_function(tool.get("name"), tool.get("description"), tool.get("input_schema"))
    elif isinstance(kind, str) and kind.startswith(_SERVER_TOOLS):
        offers.leave_out(kind, tool)
    else:
        raise BadRequest(
            f"a tool has the type {kind!r}, whose schema only Anthropic's models know; pass it "
            "as a tool of the type custom, with a schema",
            field="tools",
        )


def _messages(
    message: Mapping[str, Any],
    offers: Offers,
    recorded: RecordedReplies,
    where: str,
    ignored: Collection[str],
) -> Iterator[Message]:
    """Convert a message to OpenAI's format, where each tool result is a separate message."""
    check_fields(message, MESSAGE, where=where, ignored=ignored)
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    blocks = list_of({"content": content}, "content")
    for number, block in enumerate(blocks):
        if block.get("type") not in _BLOCKS:
            raise BadRequest(
                f"a message has a part of type {block.get('type')!r}; only text is supported, and "
                "calls, their results and reasoning",
                field=f"{where}content[{number}]",
            )
        check_fields(block, BLOCK, where=f"{where}content[{number}].", ignored=ignored)
    if role == "assistant":
        yield _assistant(blocks, offers, recorded, where, ignored)
        return
    if role not in ("user", "system"):
        raise BadRequest(f"a message has the unsupported role {role!r}", field=f"{where}role")
    for block in blocks:
        if block.get("type") == "tool_result":
            result = plain_text(block.get("content"), where, ignored)
            if block.get("is_error"):
                result = _ERROR + result
            yield {
                "role": "tool",
                "content": result,
                "tool_call_id": identity(block, "tool_use_id"),
            }
    texts = [block for block in blocks if block.get("type") != "tool_result"]
    if texts or not blocks:
        yield {"role": str(role), "content": plain_text(texts, where, ignored)}


def _assistant(
    blocks: list[Mapping[str, Any]],
    offers: Offers,
    recorded: RecordedReplies,
    where: str,
    ignored: Collection[str],
) -> Message:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(block)
        elif kind in ("thinking", "redacted_thinking"):
            thoughts.append(_thought(block, recorded, where))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            name = offers.policy_name(block.get("name"))
            calls.append(function_call(block.get("id"), name, arguments))
        else:
            raise BadRequest(
                f"an assistant message has a block of the unsupported type {kind!r}",
                field=f"{where}content",
            )
    return assistant(plain_text(texts, where, ignored), "".join(thoughts), calls)


def _thought(block: Mapping[str, Any], recorded: RecordedReplies, where: str) -> str:
    """Return a block's reasoning: that of the reply to which its signature belongs, or its text."""
    known = recorded.thought(block.get("signature") or block.get("data"))
    if known is not None:
        return known
    if block.get("type") == "redacted_thinking":
        raise BadRequest(
            "a redacted_thinking block is not from this rollout, so nobody can read it",
            field=f"{where}content",
        )
    return plain_text(block.get("thinking"), where, ())


def _beginning(message: Message) -> str:
    if message.get("tool_calls") or message.get("reasoning_content"):
        raise BadRequest(
            "the last message is the assistant's; it may give the beginning of the reply as text, "
            "without reasoning or calls",
            field="messages",
        )
    return str(message["content"])
