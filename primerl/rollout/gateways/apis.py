"""The protocol of a gateway's APIs, and helpers that their implementations share."""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

from primerl.rollout.conversations.history import Reply
from primerl.rollout.conversations.messages import Message, Tools, text_of, valid_unicode
from primerl.rollout.gateways.offers import Offers
from primerl.rollout.renderers.tool_calls import parse_arguments

if TYPE_CHECKING:
    from primerl.rollout.gateways.recorded import RecordedReplies

CHUNK = 24  # characters per streamed piece
MOST_PIECES = 200
MOST_STRINGS = 64


class BadRequest(ValueError):
    """A request that can't be served as it is; the message says what to change.

    ``field`` is the field that is wrong, if it is one; ``code`` is the API's code of the error.
    """

    def __init__(
        self, message: str, *, field: str | None = None, code: str = "invalid_request"
    ) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


@attrs.frozen(kw_only=True, eq=False)
class ModelRequest:
    """One model call of an agent; its messages are in OpenAI's format, with text as content.

    ``offers`` has the tools as the client knows them, ``instructed`` says whether the first message
    is not one of the conversation, and ``waited`` is how many events of its stream were sent while
    it waited. The last fields are arguments of ``History.reply``.
    """

    messages: list[Message]
    tools: Tools | None
    max_tokens: int | None
    stream: bool
    model: str
    body: Mapping[str, Any]
    offers: Offers = attrs.field(factory=Offers)
    instructed: bool = False
    waited: int = 0
    stop: tuple[str, ...] = ()
    one_call: bool = False
    begins: str = ""
    template: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class Failure:
    """An error as a client gets it.

    ``kind`` is invalid, authentication, missing or engine.
    """

    status: int
    kind: str
    code: str
    message: str
    field: str | None = None


@runtime_checkable
class Api(Protocol):
    """One API: parses requests, and formats responses, streams and errors."""

    path: str

    def parse(
        self, body: Mapping[str, Any], recorded: "RecordedReplies", ignored: Collection[str] = ()
    ) -> ModelRequest:
        """Parse a request's ``body``, which may refer to earlier replies.

        Raises:
            BadRequest: the request is invalid, or asks for something unsupported.
        """
        ...

    def answer(
        self, name: str, request: ModelRequest, reply: Reply, thought: str
    ) -> dict[str, Any]:
        """Return the response to ``request``, with the id ``name``.

        ``thought`` is a key by which the gateway finds the reply's reasoning again.
        """
        ...

    def waiting(self, name: str, request: ModelRequest, number: int) -> bytes:
        """Return the ``number``-th event of a stream that waits for its reply."""
        ...

    def events(self, answer: Mapping[str, Any], request: ModelRequest) -> Iterator[bytes]:
        """Yield a response as server-sent events, after those of ``waiting``."""
        ...

    def error(self, failure: Failure) -> dict[str, Any]:
        """Return an error in the API's format."""
        ...

    def error_event(self, failure: Failure, number: int) -> bytes:
        """Return an error as the last event, the ``number``-th, of a stream that has begun."""
        ...


def event(payload: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return one server-sent event as bytes."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(payload)}\n\n".encode()


def pieces(text: str) -> Iterator[str]:
    """Split a text into the pieces in which it is streamed, at most ``MOST_PIECES``."""
    size = max(CHUNK, -(-len(text) // MOST_PIECES))
    return (text[start : start + size] for start in range(0, len(text), size))


def list_of(body: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return a list of objects from a request's body; empty if the key is missing.

    Raises:
        BadRequest: the value is not a list of objects.
    """
    value = body.get(key) or []
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise BadRequest(f"{key!r} is not a list of objects")
    return value


def token_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the smallest of the fields ``names`` that are set, or None.

    Raises:
        BadRequest: a value is not a positive whole number.
    """
    limits: list[int] = []
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:  # no bool
            raise BadRequest(f"{name} is {value!r}, expected a positive whole number", field=name)
        limits.append(value)
    return min(limits, default=None)


def assistant(content: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an assistant message in OpenAI's format."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def function_call(name: Any, function: str, arguments: Any) -> dict[str, Any]:
    """Return a function call in OpenAI's format; ``arguments`` are JSON text, or empty.

    Raises:
        BadRequest: the id or the arguments are not text.
    """
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise BadRequest("a function call needs an id and arguments, each as text")
    if not arguments.strip():
        arguments = "{}"
    said = {"name": function, "arguments": valid_unicode(arguments)}
    return {"id": name, "type": "function", "function": said}


def as_arguments(text: Any, known: str | None) -> str:
    """Return the text for a custom tool as the arguments of the function that the policy knows.

    ``known`` are the arguments that the policy gave, if it made the call.
    """
    given = text_of(text)
    if known is not None and custom_input(known) == given:
        return known
    return json.dumps({"input": given})


def flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Return a field that is true or false.

    Raises:
        BadRequest: it is something else.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequest(f"{name} is {value!r}, expected true or false", field=name)
    return value


def identity(body: Mapping[str, Any], name: str) -> str | None:
    """Return an id of a request, or None.

    Raises:
        BadRequest: it is not text.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{name} is {value!r}, expected text", field=name)
    return value


def custom_input(arguments: str) -> str:
    """Return the text that the policy passes to a custom tool, which it knows as a function."""
    try:
        given = parse_arguments(arguments).get("input", "")
    except (ValueError, RecursionError):
        return arguments
    return given if isinstance(given, str) else json.dumps(given)


def strings_of(body: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return a string, or a list of strings, as a tuple; empty ones are left out.

    Raises:
        BadRequest: the value is neither.
    """
    value = body.get(key)
    given = [value] if isinstance(value, str) else value or []
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise BadRequest(f"{key!r} is neither a string nor a list of strings", field=key)
    if len(given) > MOST_STRINGS:
        raise BadRequest(f"{key!r} has more than {MOST_STRINGS} strings", field=key)
    return tuple(one for one in given if one)


def template_arguments(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments for the chat template.

    Raises:
        BadRequest: they are not an object, or have a name of the renderer's own arguments.
    """
    value = body.get("chat_template_kwargs") or {}
    if not isinstance(value, Mapping):
        raise BadRequest("chat_template_kwargs is not an object", field="chat_template_kwargs")
    for name in value:
        if not name.isidentifier() or name in _RENDERER_ARGUMENTS:
            raise BadRequest(
                f"chat_template_kwargs has {name!r}, which the gateway sets itself",
                field="chat_template_kwargs",
            )
    return value


_RENDERER_ARGUMENTS = frozenset(
    {
        "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
        "continue_final_message", "tokenize", "padding", "truncation", "max_length",
        "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
        "processor_kwargs", "self",
    }
)  # fmt: skip
