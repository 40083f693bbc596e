"""Conversion of messages and tools between verifiers' types and OpenAI's format."""

from collections.abc import Sequence
from typing import Any

from primerl._common.optional import require
from primerl.rollout.conversations.messages import Message

vf: Any = require("verifiers.v1", extra="verifiers")


def wire_tool(tool: Any) -> dict[str, Any]:
    """Return a tool's schema in OpenAI's format."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def wire_message(message: Any) -> dict[str, Any]:
    """Convert verifiers' message to OpenAI's format."""
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


def wire_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert a conversation to OpenAI's format, with the name of the tool in each result.

    Results in the Messages and Responses APIs have only the call's id, but some renderers need the
    name.
    """
    names: dict[str, str] = {}
    wire = []
    for message in messages:
        wire.append(wire_message(message))
        if message.role == "assistant":
            names |= {call.id: call.name for call in message.tool_calls or ()}
        elif message.role == "tool" and message.tool_call_id in names:
            wire[-1].setdefault("name", names[message.tool_call_id])
    return wire


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.type != "text" for part in content):
        raise ValueError("a message has a part that is not text; this adapter supports text only")
    return "\n".join(part.text for part in content)


def _wire_call(call: Any) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def own_message(message: Message) -> Any:
    """Convert a reply in OpenAI's format to verifiers' message."""
    calls = [
        vf.ToolCall(
            id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"]
        )
        for call in message.get("tool_calls") or ()
    ]
    return vf.AssistantMessage(
        content=message.get("content") or None,
        reasoning_content=message.get("reasoning_content") or message.get("reasoning"),
        tool_calls=calls or None,
    )
