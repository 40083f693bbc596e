"""A renderer that converts messages to tokens with a tokenizer's own chat template."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from primerl.rollout.conversations.messages import split_reasoning
from primerl.rollout.renderers.merging import MessageMerger
from primerl.rollout.renderers.tool_calls import Parsed, parse_arguments, parse_tool_calls

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

THINK = "<think>"
_LAST_TOKENS = 16  # of a prompt, among which the beginning of reasoning is sought
_PLACEHOLDER = "reply-7c1e9b04d2"
_CACHED_TEXTS = 512  # rollouts of a task share their prompt
_CACHED_CHARACTERS = 20_000  # longer texts rarely occur twice
_THOUGHTS = ("<think>\nthought\n</think>\n\n", "\n<think>thought</think>\n", "thought</think>\n")
"""How replies begin with reasoning: for Qwen, for GLM, and if the prompt opens the reasoning."""
_TOOLS = """You may call these functions; each line describes one:
{tools}

To call one, reply with its name and arguments as JSON:
<tool_call>
{{"name": "a function's name", "arguments": {{}}}}
</tool_call>"""


@attrs.frozen
class Rendered:
    """A prompt's tokens."""

    token_ids: list[int]


@attrs.frozen
class Between:
    """A template's ``text`` between a reply and the next; ``closing`` is how it ends a reply."""

    text: str
    closing: str
    extends: bool
    """Whether the template still renders everything up to the reply as when it was sampled."""


class TemplateRenderer:
    """A renderer for any Hugging Face tokenizer, with the methods of ``renderers`` that we use.

    If the tokenizer has a chat template, a turn after a reply adds the template's own text between
    that reply and the next; sampled tokens are never tokenized again. Otherwise, messages are
    concatenated unchanged. Tool calls are written in Hermes' format, as JSON in ``<tool_call>``
    tags. If the template does not support tools, the system message describes them. It gets the
    arguments of calls as objects, as transformers defines. ``MessageMerger`` merges messages that
    the template does not take.

    Args:
        tokenizer: a Hugging Face tokenizer.
        stop_token_ids: the tokens that end a reply; by default the tokenizer's ``eos_token_id``.
        arguments: further arguments of the template, such as ``{"enable_thinking": False}``.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop_token_ids: Sequence[int] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        eos = tokenizer.eos_token_id
        default = [] if eos is None else [eos]
        self._stops = default if stop_token_ids is None else [*stop_token_ids]
        # The Rust tokenizer gives the same tokens without the overhead of its Python wrapper.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        template = getattr(tokenizer, "chat_template", None)
        self._template = None if template is None else str(template)
        self._tokens: dict[tuple[str, bool], list[int]] = {}
        self._merger = MessageMerger(
            self._shown, knows_calls="tool_calls" in (self._template or "")
        )

    def with_arguments(self, arguments: Mapping[str, Any]) -> "TemplateRenderer":
        """Return a renderer that passes further arguments to the template.

        Raises:
            ValueError: the template has no variable of such a name.
        """
        for name in arguments:
            if name not in (self._template or ""):
                raise ValueError(f"the chat template has no variable {name!r}")
        return TemplateRenderer(
            self._tokenizer,
            stop_token_ids=self._stops,
            arguments=self._arguments | dict(arguments),
        )

    def get_stop_token_ids(self) -> list[int]:
        """Return the tokens that end a reply."""
        return [*self._stops]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Return the tokens of a whole conversation."""
        if self._template is None:
            return Rendered(self._encode(_concatenated(messages), special=True))
        return Rendered(self._encode(self._text(messages, tools, add_generation_prompt)))

    def tokens_after(
        self, reply_ids: list[int], new_messages: Sequence[Message], *, tools: Tools | None = None
    ) -> list[int] | None:
        """Return the tokens that ``new_messages`` add between a reply and the next reply.

        Return None if the conversation has to be rendered anew, because one of the messages is the
        assistant's, or because the template changes the prompt or the reply once a turn follows.
        """
        if not new_messages or any(one["role"] == "assistant" for one in new_messages):
            return None
        if self._template is None:
            return self._encode(_concatenated(new_messages))
        thought = "</think>" in self._template and "</think>" in self._decode(reply_ids)
        for begins in _THOUGHTS if thought else ("",):
            between = self._shown_between(new_messages, tools, begins=begins)
            if between is not None and between.extends:
                break
        else:
            return None
        return self._without_closing(between, reply_ids[-1])

    def tokens_appended(
        self, last: int, new_messages: Sequence[Message], *, opening: Sequence[Message]
    ) -> list[int]:
        """Return the tokens that new messages add after a reply whose last token is ``last``.

        This is for conversations that are never rendered anew, even if the template would now
        render their earlier turns differently. ``opening`` holds their first messages.
        """
        if self._template is None:
            return self._encode(_concatenated(new_messages))
        return self._without_closing(self._between(opening, new_messages), last)

    def _shown_between(
        self, new_messages: Sequence[Message], tools: Tools | None, begins: str
    ) -> Between | None:
        """Render an example conversation for the text between turns; None if the template fails."""
        import jinja2  # transformers uses it to render chat templates, so it is installed

        opening = [{"role": "user", "content": "-"}]
        try:
            return self._between(opening, new_messages, tools, begins=begins)
        except (jinja2.TemplateError, TypeError, ValueError):
            return None  # for example, if the template requires a call before a tool result

    def _between(
        self,
        opening: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        begins: str = "",
    ) -> Between:
        """Render the text between the reply to ``opening`` and the reply to ``new_messages``.

        ``begins`` is the beginning of the first reply, such as reasoning, which a template may
        leave out once a turn follows.
        """
        said = begins + _PLACEHOLDER
        replied = [*opening, {"role": "assistant", "content": said}]
        prompt = self._text(opening, tools, reply_next=True)
        longer = self._text([*replied, *new_messages], tools, reply_next=True)
        closed = self._text(replied, tools, reply_next=False)
        return Between(
            text=_after_placeholder(longer),
            closing=_after_placeholder(closed),
            extends=longer.startswith(prompt + said),
        )

    def _without_closing(self, between: Between, last: int) -> list[int]:
        """Return the tokens after a reply that ends with ``last``, without repeating how it ended.

        A template may write tokens before the stop token (Cohere2's ``<|END_RESPONSE|>``). If the
        policy sampled the stop token, those are not added either. Some templates have no token that
        closes a reply: there, the token that opens the next message is the stop token.
        """
        token_ids = self._encode(between.text)
        if last not in self._stops:
            return token_ids
        closing = self._encode(between.closing)
        ending = closing if last in closing else token_ids[:1]
        return token_ids[ending.index(last) + 1 :] if last in ending else token_ids

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: Tools | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> Parsed:
        """Return the reply's text, its reasoning and, if there are ``tools``, its tool calls.

        Reasoning is what the text begins with up to ``</think>``, after ``<think>`` in the text or
        at the end of the prompt.
        """
        text = self._decode(token_ids)
        if "</think>" not in text:
            return parse_tool_calls(text) if tools else Parsed(text)
        prompt_end = self._tokenizer.decode((prompt_ids or [])[-_LAST_TOKENS:]).rstrip()
        opening = THINK if prompt_end.endswith(THINK) else ""
        thought, rest = split_reasoning(opening + text)
        parsed = parse_tool_calls(rest) if tools else Parsed(rest)
        return attrs.evolve(parsed, reasoning_content=thought or None)

    def _text(self, messages: Sequence[Message], tools: Tools | None, reply_next: bool) -> str:
        template = self._template or ""
        calls = _with_call_objects if "tool_calls" in template else _with_calls_as_text
        shown = [calls(message) for message in messages]
        if tools and "tools" not in template:
            shown = _with_tools_as_text(shown, tools)
        return self._apply(self._merger.merged(shown), tools, reply_next)

    def _shown(self, messages: Sequence[Message]) -> str:
        return self._apply(messages, None, reply_next=True)

    def _apply(self, messages: Sequence[Message], tools: Tools | None, reply_next: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=reply_next,
                **self._arguments,
            )
        )

    def _decode(self, token_ids: list[int]) -> str:
        if token_ids and token_ids[-1] in self._stops:
            token_ids = token_ids[:-1]
        if self._backend is None or self._tokenizer.clean_up_tokenization_spaces:
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
        return str(self._backend.decode(token_ids, skip_special_tokens=True))

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        tokens = self._tokens.get((text, special))
        if tokens is None:
            if self._backend is None:
                tokens = list(self._tokenizer.encode(text, add_special_tokens=special))
            elif len(text) > _CACHED_CHARACTERS:  # lets other threads run meanwhile
                (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
                tokens = encoded.ids
            else:
                tokens = self._backend.encode(text, add_special_tokens=special).ids
            if len(text) <= _CACHED_CHARACTERS:
                if len(self._tokens) >= _CACHED_TEXTS:
                    self._tokens.clear()  # in one step, as several threads may be here
                self._tokens[text, special] = tokens
        return tokens


def _after_placeholder(text: str) -> str:
    return text[text.rindex(_PLACEHOLDER) + len(_PLACEHOLDER) :]


def _concatenated(messages: Sequence[Message]) -> str:
    return "".join(str(message.get("content") or "") for message in messages)


def _with_call_objects(message: Message) -> Message:
    """Return a message in which the arguments of calls are objects, where they are JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    shown = []
    for call in calls:
        function = call["function"]
        shown.append({**call, "function": {**function, "arguments": _arguments_of(function)}})
    return {**message, "tool_calls": shown}


def _arguments_of(function: Mapping[str, Any]) -> Any:
    """Return the arguments of a call as an object; text that is none stays as it is."""
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse_arguments(arguments)
    except (ValueError, RecursionError):
        return arguments


def _with_calls_as_text(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    parts = [message.get("content") or ""]
    for call in calls:
        function = call["function"]
        said = {"name": function["name"], "arguments": _arguments_of(function)}
        parts.append(f"<tool_call>\n{json.dumps(said)}\n</tool_call>")
    return {"role": message["role"], "content": "\n".join(filter(None, parts))}


def _with_tools_as_text(messages: list[Message], tools: Tools) -> list[Message]:
    described = _TOOLS.format(tools="\n".join(json.dumps(tool["function"]) for tool in tools))
    if messages and messages[0]["role"] == "system":
        content = f"{messages[0]['content']}\n\n{described}"
        return [{"role": "system", "content": content}, *messages[1:]]
    return [{"role": "system", "content": described}, *messages]
