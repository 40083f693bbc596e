"""The protocol of a gateway's APIs, and helpers that their implementations share."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs

from primerl.rollout.conversations.history import Reply
from primerl.rollout.conversations.messages import Message, Tools, text_of, valid_unicode

CHUNK = 24  # characters per streamed piece
COMMENT = b": ping\n\n"  # a server-sent comment, which clients skip


class BadRequest(ValueError):
    """A request that can't be served as it is; the message says what to change."""


@attrs.frozen(kw_only=True, eq=False)
class ModelRequest:
    """One model call of an agent; its messages are in OpenAI's format, with text as content."""

    messages: list[Message]
    tools: Tools | None
    max_tokens: int | None
    stream: bool
    model: str
    body: Mapping[str, Any]


@runtime_checkable
class Api(Protocol):
    """One API: parses requests, and formats responses, streams and errors."""

    path: str
    ping: bytes
    """Bytes that keep a stream alive before its first event; clients skip them."""

    def parse(self, body: Mapping[str, Any], replies: Mapping[str, Reply]) -> ModelRequest:
        """Parse a request's ``body``; ``replies`` has earlier replies by their response id.

        Raises:
            BadRequest: the request is invalid, or asks for something unsupported.
        """
        ...

    def answer(self, name: str, request: ModelRequest, reply: Reply) -> dict[str, Any]:
        """Return the response to ``request``, with the id ``name``."""
        ...

    def events(self, answer: Mapping[str, Any], request: ModelRequest) -> Iterator[bytes]:
        """Yield the response ``answer`` as a stream of server-sent events."""
        ...

    def error(self, kind: str, code: str, message: str) -> dict[str, Any]:
        """Return an error; ``kind`` is invalid, authentication, missing or engine."""
        ...

    def error_event(self, kind: str, code: str, message: str) -> bytes:
        """Return an error as the last event of a stream that has begun."""
        ...


def event(payload: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return one server-sent event as bytes."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(payload)}\n\n".encode()


def pieces(text: str) -> Iterator[str]:
    """Split a text into the pieces in which it is streamed."""
    return (text[start : start + CHUNK] for start in range(0, len(text), CHUNK))


def list_of(body: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return a list of objects from a request's body; empty if the key is missing.

    Raises:
        BadRequest: the value is not a list of objects.
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
                f"{name}={json.dumps(value)[:80]} is not supported, because the rollout fixes "
                "how replies are sampled; leave it out"
            )


def token_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of the fields ``names`` that is set, or None.

    Raises:
        BadRequest: its value is not a positive whole number.
    """
    for name in names:
        value = body.get(name)
        if value is not None:
            if type(value) is not int or value < 1:  # no bool
                raise BadRequest(f"{name} is {value!r}, expected a positive whole number")
            return value
    return None


def function_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Return a function's definition in OpenAI's format.

    Raises:
        BadRequest: the function has no name.
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
    """Return an assistant message in OpenAI's format."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def function_call(name: Any, function: Any, arguments: Any) -> dict[str, Any]:
    """Return a function call in OpenAI's format.

    Raises:
        BadRequest: the id, the name or the arguments are not text.
    """
    if not all(isinstance(one, str) for one in (name, function, arguments)):
        raise BadRequest("a function call needs an id, a name and arguments, each as text")
    said = {"name": valid_unicode(function), "arguments": valid_unicode(arguments)}
    return {"id": name, "type": "function", "function": said}
