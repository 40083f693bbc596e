"""Texts that a chat template makes of a conversation, and checks of what they leave out."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from primerl.data.accounting import Marks, SaidText, ids_of, missing_text, said, shown
from primerl.data.errors import ConversationError
from primerl.data.json_text import leaves
from primerl.data.tokenization import common_prefix, difference, tokens_of

_NEXT_MESSAGE = "next-message-51d0c2e87a"
_PLACEHOLDER = "reply-51d0c2e87a"
_TAG = re.compile(r"<[^<>\s]{1,60}>|\[[A-Z_/]{1,30}\]")
_BARS = "|\uff5c"  # as in <|im_start|> and in DeepSeek's tokens
_OF_REPLIES = re.compile("think|tool|reason|arg", re.IGNORECASE)


@attrs.frozen
class AssistantTurn:
    """A reply as a template renders it, without and with the stop token that ends it."""

    text: str
    stop: str
    stop_token_id: int


class ChatTemplate:
    """A tokenizer's chat template, with the tools and the stop tokens of a conversation."""

    def __init__(self, tokenizer: Any, tools: Any, stop_token_ids: Iterable[int]) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template; set tokenizer.chat_template")
        ids = dict.fromkeys((*stop_token_ids, tokenizer.eos_token_id))
        self._stops = {tokenizer.decode([token]): token for token in ids if token is not None}
        self._tokenizer = tokenizer
        self._tools = tools

    def encode(self, text: str) -> list[int]:
        """Tokenize a text of the template, and check that the tokens say the same."""
        return tokens_of(text, self._tokenizer)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render the text that the policy sees before its reply."""
        if not messages:
            raise ConversationError(
                "messages[0] has the role 'assistant'; expected a message before a reply"
            )
        return self._render(messages, add_generation_prompt=True)

    def reply(
        self, messages: Sequence[Mapping[str, Any]], index: int, prompt: str
    ) -> AssistantTurn:
        """Render the reply ``messages[index]`` to ``prompt``, and find its stop token."""
        # The template may drop earlier reasoning now that a reply follows (gpt-oss). The policy saw
        # it, and the reply is rendered as it would be without.
        for history in (messages[:index], [_without_reasoning(one) for one in messages[:index]]):
            whole = self._render([*history, messages[index]])
            start = prompt if history == messages[:index] else self.prompt(history)
            if whole.startswith(start):
                break
        else:
            whole = self._render(messages[: index + 1])
            raise ConversationError(
                f"the chat template renders the prompt of messages[{index}] differently when the "
                f"reply follows ({difference(prompt, whole)}), so the policy would have seen "
                "another prompt; use a template whose replies begin with its generation prompt"
            )
        text = whole[len(start) :]
        end, stop = self._first_stop(text)
        if not stop:
            end, stop = len(text), self._stop_of_next([*history, messages[index]], text)
        texts = list(said(messages[index]))
        for one in (*texts, *ids_of(messages[index])):
            if found := self._first_stop(one.text)[1]:
                raise ConversationError(
                    f"messages[{index}] contains the stop token {found!r}, where a policy would "
                    f"have stopped ({one.part}); remove it"
                )
        self._require_texts(texts, history, index, whole[: len(start) + end], start=len(start))
        content = messages[index]["content"]
        if content and not content.strip():
            empty = {**messages[index], "content": ""}
            if self._render([*history, empty]) == whole:
                raise ConversationError(
                    f"the chat template leaves nothing of messages[{index}], {content!r:.40}; "
                    "remove the reply"
                )
        return AssistantTurn(text[:end], stop, self._stops[stop])

    def _stop_of_next(self, messages: Sequence[Mapping[str, Any]], text: str) -> str:
        """Return the stop token that begins the message after the reply ``messages[-1]``.

        Some templates end a reply with it, as GLM with ``<|user|>``.
        """
        # A template may drop the reasoning once a message follows: then a plain reply shows it.
        plain = [_without_reasoning(message) for message in messages[:-1]]
        plain.append({"role": "assistant", "content": _PLACEHOLDER})
        for turns in (messages, *([] if "tool_calls" in messages[-1] else [plain])):
            whole = self._render(turns)
            longer = self._render([*turns, _next_message(turns[-1])])
            at, stop = self._first_stop(longer[len(whole) :])
            if longer.startswith(whole) and at == 0:
                return stop
        raise ConversationError(
            f"the chat template ends messages[{len(messages) - 1}] with {text[-20:]!r}, and none "
            f"of the stop tokens {sorted(self._stops)} follows; pass stop_token_ids, such as "
            "model.generation_config.eos_token_id"
        )

    def _require_texts(
        self,
        texts: Sequence[SaidText],
        history: Sequence[Mapping[str, Any]],
        index: int,
        text: str,
        *,
        start: int,
    ) -> None:
        """Check that the reply, which begins at ``start`` of ``text``, has the texts."""
        if missing_text(texts, text[start:]) is None:
            return
        # Prompts may end with the beginning of the reply, such as <think>.
        turn = text[common_prefix(self._render(history), text) :]
        missing = missing_text(texts, turn)
        if missing is not None:
            raise ConversationError(
                f"the chat template leaves {missing.text!r:.60} of messages[{index}] out of the "
                f"reply, {turn!r:.120} ({missing.part}), so it would not be trained; use a "
                "template that renders it, or remove it"
            )

    def require_all_rendered(
        self, messages: Sequence[Mapping[str, Any]], text: str, *, trained: Sequence[int]
    ) -> None:
        """Check that ``text`` has everything that the messages and the tools say, once each.

        Replies that are not ``trained`` may lack their reasoning.
        """
        marks = Marks(messages, self._tools)
        rendered = self._render(marks.messages, tools=marks.tools)
        problem = marks.problem(rendered)
        if problem is not None:
            raise ConversationError(f"the chat template {problem}")
        context = [
            (index, one)
            for index, message in enumerate(messages)
            if index not in trained
            for one in said(message)
            if not one.reasoning
        ]
        missing = missing_text([one for _, one in context], text)
        if missing is not None:
            index = next(index for index, one in context if one is missing)
            raise ConversationError(
                f"the chat template leaves {missing.text!r:.60} of messages[{index}] out "
                f"({missing.part}), so the policy would not see it; use a template that renders "
                "it, or remove it"
            )
        self._require_no_controls(messages, rendered)

    def _require_no_controls(self, messages: Sequence[Mapping[str, Any]], scaffold: str) -> None:
        """Check that no text has a special token of ``scaffold``, the template's own text.

        Such a text would forge the end or the beginning of a message. Tags of reasoning and of
        calls are no such tokens, since replies may have them as text.
        """
        written = set(_TAG.findall(scaffold))
        controls = [tag for tag in written if self._is_control(tag)]
        if not controls:
            return
        search = re.compile("|".join(map(re.escape, sorted(controls)))).search
        texts = [
            (f"messages[{index}] ({one.part})", one.text)
            for index, message in enumerate(messages)
            for one in (*said(message), *ids_of(message))
        ]
        for path, value in leaves(self._tools or [], "tools", keys=True):
            texts.append((path, value if isinstance(value, str) else ""))
        for place, text in texts:
            if found := search(text):
                raise ConversationError(
                    f"{place} contains {found[0]!r}, which the chat template writes around "
                    "messages, so the text would end or begin one; remove it"
                )

    def _is_control(self, tag: str) -> bool:
        """Return whether a tag is a special token that is not of reasoning or of calls."""
        if tag in self._stops:
            return True
        if _OF_REPLIES.search(tag):
            return False
        if tag[1] in _BARS or tag[-2] in _BARS:
            return True
        token = self._tokenizer.convert_tokens_to_ids(tag)
        if token is None or token == self._tokenizer.unk_token_id:
            return False
        return not self._tokenizer.decode([token], skip_special_tokens=True)

    def _first_stop(self, text: str) -> tuple[int, str]:
        """Return the index and text of the first stop token in ``text``; (-1, "") if none."""
        found = [(text.index(stop), stop) for stop in self._stops if stop in text]
        return min(found, key=lambda place: (place[0], -len(place[1])), default=(-1, ""))

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        add_generation_prompt: bool = False,
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [shown(message) for message in messages],
                tools=self._tools if tools is None else tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except ImportError:
            raise
        except Exception as error:  # of whatever kind the template raises for these messages
            raise ConversationError(
                f"the chat template raised an error for these messages: {error}"
            ) from error
        return str(text)


def _without_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def _next_message(reply: Mapping[str, Any]) -> dict[str, str]:
    role = "tool" if reply.get("tool_calls") else "user"
    return {"role": role, "content": _NEXT_MESSAGE}
