"""Messages to tokens and back, for one renderer; large ones beside the event loop.

Other rollouts wait while the event loop computes, so what has to do with many characters is
computed in a thread. The tokenizer lets other threads run meanwhile.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from primerl.rollout.conversations.calls import ContextFull
from primerl.rollout.conversations.cuts import Cut, cut_after_call, cut_at_strings
from primerl.rollout.conversations.messages import Message, Tools, valid_unicode
from primerl.rollout.engines.token_sequence import TokenSequence
from primerl.rollout.renderers.merging import MessageMerger
from primerl.rollout.renderers.tool_calls import parse_arguments

# More characters than this are worked on in a thread.
COMPUTED_AT_ONCE = 8192
# Texts with this many characters for each token of the context are looked at before they are used.
_SURE_SIZE = 8
_SPLIT_TOKENS = 64  # by which the beginning of a text may have more tokens than in the whole text
_LAST_TOKENS = 16  # of a prompt, among which the beginning of reasoning is sought

_Result = TypeVar("_Result")


class Unrenderable(ValueError):
    """Raised when a conversation can't be rendered, for example if its roles do not alternate."""


class Prompts:
    """The prompts of one renderer, and the parsed replies to them.

    Args:
        renderer: as ``load_renderer`` returns it.
        tokenizer: for replies that are cut at strings, and for those whose beginning is given.
        template: further arguments of the chat template.

    Raises:
        Unrenderable: the renderer has no chat template, or it has no such arguments.
    """

    def __init__(
        self, renderer: Any, tokenizer: Any, template: Mapping[str, Any] | None = None
    ) -> None:
        if template and not hasattr(renderer, "with_arguments"):
            raise Unrenderable(
                "this model's renderer has no chat template, which chat_template_kwargs are for"
            )
        try:
            self._renderer = renderer.with_arguments(template) if template else renderer
        except ValueError as error:
            raise Unrenderable(str(error)) from error
        self._tokenizer = tokenizer
        self._tools: tuple[Tools | None, int] = (None, 0)  # the last ones, and their size
        self._merger: MessageMerger | None = None
        self._adds_turns = hasattr(renderer, "tokens_after")
        if tokenizer is not None and not self._adds_turns:
            # The package's renderers refuse or drop some messages. Ours merge them themselves.
            self._merger = MessageMerger(self._rendered_text)

    async def check_size(self, messages: Sequence[Message], size: int, context: int) -> None:
        """Refuse messages that can't fit into the context before work is done for them.

        Raises:
            ContextFull: the beginning of one of them has too many tokens.
        """
        if size <= _SURE_SIZE * context or self._tokenizer is None:
            return
        texts = [m.get("content") or "" for m in messages if m["role"] != "assistant"]
        beginning = max(texts, key=len, default="")[: _SURE_SIZE * context]
        least = await asyncio.to_thread(_token_count, self._tokenizer, beginning)
        if least - _SPLIT_TOKENS >= context:
            raise ContextFull(
                f"a message begins with {least:,} tokens, which fill the engine's context of "
                f"{context:,}; end the conversation earlier, or shorten the message"
            )

    async def rendered(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        """Return the tokens of a whole conversation, up to where the reply begins.

        Raises:
            Unrenderable: the chat template or the tokenizer rejects the messages.
        """
        size = size_of(messages) + self._size_of_tools(tools)
        return await computed(lambda: self._render(messages, tools), size=size)

    async def after(
        self,
        reply_ids: list[int],
        messages: Sequence[Message],
        tools: Tools | None,
        prompt_ids: Callable[[], list[int]],
    ) -> list[int] | None:
        """Return the tokens of ``messages`` after a reply; None if the renderer can't add them."""
        before = [] if self._adds_turns else prompt_ids()

        def compute() -> list[int] | None:
            if self._adds_turns:
                added: list[int] | None = self._renderer.tokens_after(
                    reply_ids, messages, tools=tools
                )
                return added
            new = messages if self._merger is None else self._merger.merged(messages, opening=False)
            rendered = self._renderer.bridge_to_next_turn(before, reply_ids, list(new), tools=tools)
            if rendered is None:
                return None
            tokens = list(rendered.token_ids)
            whole = before + reply_ids
            return tokens[len(whole) :] if tokens[: len(whole)] == whole else None

        size = size_of(messages) + self._size_of_tools(tools) + len(before)
        return await computed(compute, size=size)

    async def beginning(self, text: str, *, prompt_ids: list[int]) -> list[int]:
        """Return the tokens with which a reply begins, after a prompt.

        Raises:
            Unrenderable: the prompt ends in reasoning, or there is no tokenizer.
        """
        if self._tokenizer is None:
            raise Unrenderable("the beginning of a reply can't be given without a tokenizer")
        if self._tokenizer.decode(prompt_ids[-_LAST_TOKENS:]).rstrip().endswith("<think>"):
            raise Unrenderable(
                "the chat template begins replies with reasoning, so their text can't be given"
            )

        def compute() -> list[int]:
            # A batch, since it lets other threads run meanwhile.
            batch: list[list[int]] = self._tokenizer([text], add_special_tokens=False)["input_ids"]
            return batch[0]

        return await computed(compute, size=len(text))

    def parsed(self, reply_ids: list[int], tools: Tools | None, prompt_ids: TokenSequence) -> Any:
        """Return a reply's text, reasoning and calls."""
        # Our renderers look at the prompt's end only. The renderers package needs a list.
        prompt = prompt_ids if self._adds_turns else prompt_ids[:]
        return self._renderer.parse_response(reply_ids, tools=tools, prompt_ids=prompt)

    def cut(
        self,
        reply_ids: list[int],
        tools: Tools | None,
        prompt_ids: TokenSequence,
        *,
        stop: Sequence[str],
        one_call: bool,
    ) -> Cut | None:
        """Return where ``stop`` or ``one_call`` ends a reply, or None."""
        cuts = []
        if stop:
            cuts.append(cut_at_strings(reply_ids, stop, self._tokenizer.decode))
        if one_call and tools:
            cuts.append(
                cut_after_call(
                    reply_ids, lambda ids: self.parsed(ids, tools, prompt_ids), is_usable
                )
            )
        found = [cut for cut in cuts if cut is not None]
        return min(found, key=lambda cut: cut.count, default=None)

    def _size_of_tools(self, tools: Tools | None) -> int:
        if tools is not self._tools[0]:
            self._tools = (tools, sum(len(str(tool)) for tool in tools or ()))
        return self._tools[1]

    def _render(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        if self._merger is not None:
            messages = self._merger.merged(messages)
        try:
            rendered = self._renderer.render(messages, tools=tools, add_generation_prompt=True)
        except Exception as error:  # templates and renderers raise anything
            raise Unrenderable(
                f"the conversation can't be rendered: {type(error).__name__}: {error}"
            ) from error
        return list(rendered.token_ids)

    def _rendered_text(self, messages: Sequence[Message]) -> str:
        rendered = self._renderer.render(list(messages), add_generation_prompt=True)
        return str(self._tokenizer.decode(list(rendered.token_ids)))


async def computed(compute: Callable[[], _Result], *, size: int) -> _Result:
    """Compute what has to do with ``size`` characters; in a thread if they are many."""
    if size <= COMPUTED_AT_ONCE:
        return compute()
    return await asyncio.to_thread(compute)


def size_of(messages: Sequence[Message]) -> int:
    """Return about how many characters messages have."""
    size = 0
    for message in messages:
        size += len(message.get("content") or "") + len(message.get("reasoning_content") or "")
        for call in message.get("tool_calls") or ():
            size += len(str(call["function"]["arguments"]))
    return size


def message_of(parsed: Any, name_of: Callable[[int], str]) -> tuple[dict[str, Any], list[str]]:
    """Return a parsed reply in OpenAI's format, and a description of each malformed call.

    ``name_of`` returns the id of a call that has none.
    """
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content or ""}
    if parsed.reasoning_content:
        message["reasoning_content"] = parsed.reasoning_content
    calls, malformed = [], []
    for number, call in enumerate(parsed.tool_calls):
        try:
            arguments = _arguments_of(call)
        except (ValueError, RecursionError) as fault:
            malformed.append(str(fault))
            continue
        function = {"name": valid_unicode(call.name), "arguments": arguments}
        name = valid_unicode(call.id or name_of(number))
        calls.append({"id": name, "type": "function", "function": function})
    if calls:
        message["tool_calls"] = calls
    return message, malformed


def is_usable(call: Any) -> bool:
    """Return whether a parsed call reaches the agent."""
    try:
        _arguments_of(call)
    except (ValueError, RecursionError):
        return False
    return True


def _arguments_of(call: Any) -> str:
    """Return a call's arguments as JSON text.

    Raises:
        ValueError: the call is malformed, or its arguments are not an object, or hold NaN or
            infinity; the message describes the fault.
    """
    if str(call.status) != "ok" or not call.name:
        raise ValueError(str(call.status))
    try:
        return valid_unicode(json.dumps(parse_arguments(call.arguments), allow_nan=False))
    except ValueError as error:
        raise ValueError(f"the call's arguments are {error}") from error


def _token_count(tokenizer: Any, text: str) -> int:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return len(tokenizer.encode(text, add_special_tokens=False))
    (encoded,) = backend.encode_batch_fast([text], add_special_tokens=False)
    return len(encoded)
