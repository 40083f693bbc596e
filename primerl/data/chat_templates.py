"""Conversion of conversations to the tokens of an equal rollout, with a mask of the replies."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np

from primerl.types import NOT_SAMPLED, TrainingSample

_NEXT_MESSAGE = "next-message-51d0c2e87a"


def training_sample(
    conversation: Mapping[str, Any],
    tokenizer: Any,
    *,
    max_tokens: int,
    stop_token_ids: Iterable[int] = (),
    replies: Literal["all", "last"] = "all",
    too_long: Literal["raise", "skip", "cut"] = "raise",
) -> TrainingSample | None:
    """Convert a conversation to one sequence whose loss mask is set at the assistant's tokens.

    The tokens are those of a rollout in which the policy had sampled the replies. The chat
    template's text up to a reply is tokenized by itself, then the reply, then the one stop token
    that ends the reply, which is trained too; then follows the text of the next turn. If a template
    does not allow this exactly, it is refused. At trained tokens, logprobs and versions are 0, and
    advantages are 1.

    Args:
        conversation: ``messages`` and, optionally, ``tools`` and ``id`` (with which errors begin),
            as ``Conversations`` returns them.
        tokenizer: a Hugging Face tokenizer with a chat template.
        max_tokens: the maximum length of the sequence: the context length of the model.
        stop_token_ids: tokens that end a reply, besides the tokenizer's ``eos_token_id``, as
            ``models.stop_token_ids`` returns them.
        replies: which replies are trained. Templates of reasoning models drop the reasoning of
            earlier replies, so that only the last reply is rendered as the policy would sample it.
        too_long: what to do with a longer conversation: raise an error (``raise``), return None
            (``skip``), or keep its first ``max_tokens`` tokens (``cut``; None if they hold no part
            of a reply).

    Raises:
        ValueError: ``replies`` or ``too_long`` is unknown; the conversation is longer than
            ``max_tokens`` with ``too_long="raise"``, has no reply, or begins with a reply; the
            tokenizer has no chat template, or the template raises; the template renders earlier
            messages differently once others follow, renders the prompt differently once the reply
            follows, leaves out a part of a reply, or ends it without a stop token; or a reply
            contains a stop token.
    """
    if replies not in ("all", "last") or too_long not in ("raise", "skip", "cut"):
        raise ValueError(
            f"replies={replies!r}, too_long={too_long!r}; expected 'all' or 'last', and 'raise', "
            "'skip' or 'cut'"
        )
    name = str(conversation.get("id", "the conversation"))
    try:
        tokens, mask = _tokens_and_mask(conversation, tokenizer, stop_token_ids, replies)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if len(tokens) > max_tokens:
        if too_long == "raise":
            raise ValueError(
                f"{name}: the conversation has {len(tokens)} tokens, expected at most max_tokens="
                f"{max_tokens}; raise it up to the model's context, or choose too_long='skip' or "
                "'cut'"
            )
        tokens, mask = tokens[:max_tokens], mask[:max_tokens]
        if too_long == "skip" or not any(mask):
            return None
    trained = np.array(mask)
    return TrainingSample(
        token_ids=tokens,
        loss_mask=trained,
        behavior_logprobs=np.zeros(len(tokens)),
        versions=np.where(trained, 0, NOT_SAMPLED),
        advantages=trained.astype(np.float32),
    )


def marked_text(
    sample: TrainingSample, tokenizer: Any, *, marks: tuple[str, str] = ("⟦", "⟧")
) -> str:
    """Decode a sample, with trained text between ``marks``, to inspect it before a run."""
    edges = np.flatnonzero(np.diff(sample.loss_mask)) + 1
    text = ""
    for tokens, mask in zip(
        np.split(sample.token_ids, edges), np.split(sample.loss_mask, edges), strict=True
    ):
        part = tokenizer.decode(tokens.tolist())
        text += f"{marks[0]}{part}{marks[1]}" if mask[0] else part
    return text


def _tokens_and_mask(
    conversation: Mapping[str, Any], tokenizer: Any, stop_token_ids: Iterable[int], replies: str
) -> tuple[list[int], list[bool]]:
    template = _Template(tokenizer, conversation.get("tools"), stop_token_ids)
    messages = conversation["messages"]
    places = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not places:
        raise ValueError("no message has the role 'assistant', so there is nothing to train on")
    tokens: list[int] = []
    mask: list[bool] = []
    done = ""  # the text of those tokens
    for index in places if replies == "all" else places[-1:]:
        prompt = template.prompt(messages[:index])
        if not prompt.startswith(done):
            raise ValueError(
                f"the chat template renders the text before messages[{index}] differently than it "
                f"did for an earlier reply ({_difference(done, prompt)}), so the policy would have "
                "seen another conversation; use a template that only appends, or train on "
                "replies='last'"
            )
        reply = template.reply(messages, index, prompt)
        between = template.encode(prompt[len(done) :])
        sampled = [*template.encode(reply.text), reply.stop_token_id]
        tokens += between + sampled
        mask += [False] * len(between) + [True] * len(sampled)
        done = prompt + reply.text + reply.stop
    return tokens, mask


@attrs.frozen
class _AssistantTurn:
    text: str
    stop: str
    stop_token_id: int


class _Template:
    """A tokenizer's chat template, with the tools and the stop tokens of a conversation."""

    def __init__(self, tokenizer: Any, tools: Any, stop_token_ids: Iterable[int]) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template; set tokenizer.chat_template")
        ids = dict.fromkeys((*stop_token_ids, tokenizer.eos_token_id))
        self._stops = {tokenizer.decode([token]): token for token in ids if token is not None}
        self._tokenizer = tokenizer
        self._tools = tools

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render the text that the policy sees before its reply."""
        if not messages:
            raise ValueError(
                "messages[0] has the role 'assistant'; expected a message before a reply"
            )
        return self._render(messages, add_generation_prompt=True)

    def reply(
        self, messages: Sequence[Mapping[str, Any]], index: int, prompt: str
    ) -> _AssistantTurn:
        """Render the reply ``messages[index]`` to ``prompt``, and find its stop token."""
        whole = self._render(messages[: index + 1])
        if not whole.startswith(prompt):
            raise ValueError(
                f"the chat template renders the prompt of messages[{index}] differently when the "
                f"reply follows ({_difference(prompt, whole)}), so the policy would have seen "
                "another prompt; use a template whose replies begin with its generation prompt"
            )
        text = whole[len(prompt) :]
        end, stop = self._first_stop(text)
        if not stop:
            # Some templates end a reply with the token that starts the next message, as <|user|>.
            next_message = messages[index + 1 : index + 2] or [_next_message(messages[index])]
            longer = self._render([*messages[: index + 1], *next_message])
            end, stop = self._first_stop(longer[len(prompt) :])
            if not stop or end != len(text) or not longer.startswith(whole):
                raise ValueError(
                    f"the chat template ends messages[{index}] with {whole[-20:]!r}, and none of "
                    f"the stop tokens {sorted(self._stops)} follows; pass stop_token_ids, such as "
                    "model.generation_config.eos_token_id"
                )
        for part in _parts(messages[index]):
            if self._first_stop(part)[1]:
                raise ValueError(
                    f"messages[{index}] contains the stop token {self._first_stop(part)[1]!r}, "
                    "where a policy would have stopped; remove it"
                )
            self._require_rendered(part, messages, index, whole[: len(prompt) + end])
        return _AssistantTurn(text[:end], stop, self._stops[stop])

    def _require_rendered(
        self, part: str, messages: Sequence[Mapping[str, Any]], index: int, text: str
    ) -> None:
        """Check that a part of ``messages[index]`` is in the last turn of ``text``."""
        before = self._render(messages[:index])
        turn = text[_common_prefix(before, text) :]
        # Compared without white space, which templates strip and add.
        if "".join(part.split()) not in "".join(turn.split()):
            raise ValueError(
                f"the chat template leaves {part!r:.60} of messages[{index}] out of the reply, "
                f"{turn!r:.120}, so it would not be trained; use a template that renders it, or "
                "remove it"
            )

    def _first_stop(self, text: str) -> tuple[int, str]:
        """Return the index and text of the first stop token in ``text``; (-1, "") if none."""
        found = [(text.index(stop), stop) for stop in self._stops if stop in text]
        return min(found, key=lambda place: (place[0], -len(place[1])), default=(-1, ""))

    def _render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
    ) -> str:
        import jinja2  # installed, because transformers needs it to render chat templates

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=self._tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(
                f"the chat template raised an error for these messages: {error}"
            ) from error
        return str(text)


def _parts(message: Mapping[str, Any]) -> list[str]:
    """Return the texts of a reply that its rendering must contain."""
    parts = [message.get(key) for key in ("content", "reasoning_content", "thinking")]
    if isinstance(message.get("content"), list):
        parts += [part.get("text") for part in message["content"] if isinstance(part, Mapping)]
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    parts += [call["name"] for call in calls]
    return [part for part in parts if isinstance(part, str) and part]


def _next_message(reply: Mapping[str, Any]) -> dict[str, str]:
    role = "tool" if reply.get("tool_calls") else "user"
    return {"role": role, "content": _NEXT_MESSAGE}


def _difference(expected: str, found: str) -> str:
    """Describe where two texts begin to differ."""
    same = _common_prefix(expected, found)
    return f"{expected[same : same + 30]!r} became {found[same : same + 30]!r}"


def _common_prefix(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
