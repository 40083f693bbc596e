"""What the APIs of a gateway have in common."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs

from primerl.rollout.conversations.history import Reply
from primerl.rollout.conversations.messages import Message, Tools, text_of, valid_unicode

CHUNK = 24  # characters of a streamed piece
COMMENT = b": ping\n\n"  # of a stream of server-sent events


class BadRequest(ValueError):
    """A request that can't be served as it is; the message says what to change."""


@attrs.frozen(kw_only=True, eq=False)
class Request:
    """One model call of an agent: the conversation in OpenAI's form, with contents as text."""

    messages: list[Message]
    tools: Tools | None
    max_tokens: int | None
    stream: bool
    model: str
    body: Mapping[str, Any]


@runtime_checkable
class Api(Protocol):
    """One API: how it asks, answers, streams and refuses."""

    path: str
    ping: bytes
    """What a stream may hold before its first event, and clients skip."""

    def parse(self, body: Mapping[str, Any], replies: Mapping[str, Reply]) -> Request:
        """The request in ``body``; ``replies`` are the earlier ones of the rollout, by their id.

        Raises:
            BadRequest: it asks for what can't be done.
        """
        ...

    def answer(self, name: str, request: Request, reply: Reply) -> dict[str, Any]:
        """The response with the id ``name``."""
        ...

    def events(self, answer: Mapping[str, Any], request: Request) -> Iterator[bytes]:
        """The same response as a stream of server-sent events."""
        ...

    def error(self, kind: str, code: str, message: str) -> dict[str, Any]:
        """An error; the kinds are invalid, authentication, missing and engine."""
        ...

    def error_event(self, kind: str, code: str, message: str) -> bytes:
        """The same as the last event of a stream that has begun."""
        ...


def event(payload: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(payload)}\n\n".encode()


def pieces(text: str) -> Iterator[str]:
    """A text as it is streamed."""
    return (text[start : start + CHUNK] for start in range(0, len(text), CHUNK))


def list_of(body: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """A list of objects in a request's body; empty if it is not there.

    Raises:
        BadRequest: it is something else.
    """
    value = body.get(key) or []
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise BadRequest(f"{key!r} is not a list of objects")
    return value


def refuse(body: Mapping[str, Any], **supported: tuple[Any, ...]) -> None:
    """Refuse settings that would change what is sampled, or that are not implemented.

    Raises:
        BadRequest: a setting is neither absent nor one of those that are supported.
    """
    for name, values in supported.items():
        value = body.get(name)
        if value is not None and value not in values:
            raise BadRequest(
                f"{name}={json.dumps(value)[:80]} is not supported: the rollout's own sampling "
                "decides; leave it out"
            )


def token_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """The first of the fields that is set.

    Raises:
        BadRequest: it is not a positive whole number.
    """
    for name in names:
        value = body.get(name)
        if value is not None:
            if type(value) is not int or value < 1:  # no bool
                raise BadRequest(f"{name} is {value!r}, expected a positive whole number")
            return value
    return None


def function_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A function in OpenAI's form.

    Raises:
        BadRequest: it has no name.
    """
    if not isinstance(name, str):
        raise BadRequest("a tool has no name; only functions are supported")
    function = {
        "name": valid_unicode(name),
        "description": text_of(description),
        "parameters": parameters or {},
    }
    return {"type": "function", "function": function}


def assistant(content: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """An assistant's message."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def function_call(name: Any, function: Any, arguments: Any) -> dict[str, Any]:
    """A call of a function in OpenAI's form.

    Raises:
        BadRequest: it has no id, name or arguments.
    """
    if not all(isinstance(one, str) for one in (name, function, arguments)):
        raise BadRequest("a function call has no id, name or arguments that are text")
    said = {"name": valid_unicode(function), "arguments": valid_unicode(arguments)}
    return {"id": name, "type": "function", "function": said}
