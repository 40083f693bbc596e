"""Renderer for ChatML models (SmolLM2, Qwen), which adds turns without the chat template."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from primerl.rollout.renderers.template import Message, TemplateRenderer, Tools

START, END = "<|im_start|>", "<|im_end|>"
_TOOL_ROLE = ("tool", "{}", "")
_TOOL_RESPONSES = ("user", "<tool_response>\n{}\n</tool_response>", "\n")
TOOL_FORMS = (_TOOL_ROLE, _TOOL_RESPONSES)
"""The ways to write tool results: the role, the format of a result, and the separator of results
(empty if each result is a separate message)."""

_NEW: list[list[Message]] = [
    [{"role": "user", "content": " Three?\n"}],
    [{"role": "tool", "content": "4"}, {"role": "tool", "content": "five\n"}],
    [{"role": "tool", "content": ""}, {"role": "user", "content": "six"}],
    [{"role": "tool", "content": "7", "name": "count-4f", "tool_call_id": "call-9c"}],
    [{"role": "user", "content": "eight", "name": "someone-2e"}],
]


def chatml_renderer(tokenizer: Any) -> "ChatMLRenderer | None":
    """Return a ChatML renderer, or None if the tokenizer's chat template is not exactly ChatML.

    The renderer and the template must agree on the turns that follow a reply, also on tool results.
    """
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if START not in template or tokenizer.eos_token != END:
        return None
    for form in TOOL_FORMS:
        renderer = ChatMLRenderer(tokenizer, tool_form=form)
        if all(renderer.agrees(new) for new in _NEW):
            return renderer
    return None


class ChatMLRenderer(TemplateRenderer):
    """A ChatML renderer that needs the chat template only for whole conversations.

    Args:
        tokenizer: a tokenizer whose template writes ChatML; see ``chatml_renderer``.
        tool_form: one of ``TOOL_FORMS``.
    """

    def __init__(self, tokenizer: Any, *, tool_form: tuple[str, str, str] = _TOOL_ROLE) -> None:
        super().__init__(tokenizer)
        self._tool_form = tool_form
        self._end = tokenizer.convert_tokens_to_ids(END)
        self._thinks = "</think>" in str(tokenizer.chat_template)

    def tokens_after(
        self, reply_ids: list[int], new_messages: Sequence[Message], *, tools: Tools | None = None
    ) -> list[int] | None:
        """Return the tokens between a reply and the reply to ``new_messages``.

        Return None if one of the messages is the assistant's, or if the template leaves out the
        reply's reasoning once these messages follow.
        """
        if self._thinks and "</think>" in self._decode(reply_ids):
            return super().tokens_after(reply_ids, new_messages, tools=tools)
        if not new_messages or any(one["role"] == "assistant" for one in new_messages):
            return None
        closing = [] if reply_ids[-1] == self._end else [self._end]
        merged = self._merger.merged(new_messages, opening=False)
        return [*closing, *self._encode("\n" + self._turn(merged))]

    def agrees(self, new_messages: Sequence[Message]) -> bool:
        """Check that the template renders ``new_messages`` after a reply as this renderer does."""
        between = self._shown_between(new_messages, None, begins="")
        return between is not None and (
            between.extends and between.text == f"{END}\n{self._turn(new_messages)}"
        )

    def _turn(self, messages: Sequence[Message]) -> str:
        blocks = [f"{START}{role}\n{text}{END}\n" for role, text in self._blocks(messages)]
        return "".join(blocks) + f"{START}assistant\n"

    def _blocks(self, messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
        role, result, between = self._tool_form
        for is_tool, some in groupby(messages, lambda one: one["role"] == "tool"):
            if not is_tool:
                yield from ((one["role"], one["content"] or "") for one in some)
                continue
            results = [result.format(one["content"] or "") for one in some]
            yield from ((role, text) for text in ([between.join(results)] if between else results))
