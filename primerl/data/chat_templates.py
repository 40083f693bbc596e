"""Conversion of conversations to the tokens of an equal rollout, with a mask of the replies."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from primerl.data.errors import ConversationError
from primerl.data.messages import checked_conversation
from primerl.data.rendering import ChatTemplate
from primerl.data.tokenization import difference
from primerl.types import NOT_SAMPLED, TrainingSample


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
    does not allow this exactly, or leaves out something that the conversation says, the
    conversation is refused. A reply with ``"weight": 0`` is not trained. At trained tokens,
    logprobs and versions are 0, and advantages are 1.

    Args:
        conversation: ``messages`` and, optionally, ``tools``, as a line of a file that
            ``Conversations`` reads; errors begin with its ``read_from`` and ``id``.
        tokenizer: a Hugging Face tokenizer with a chat template.
        max_tokens: the maximum length of the sequence: the context length of the model.
        stop_token_ids: tokens that end a reply, besides the tokenizer's ``eos_token_id``, as
            ``models.stop_token_ids`` returns them.
        replies: which replies are trained. Templates of reasoning models drop the reasoning of
            earlier replies, so that only the last reply is rendered as the policy would sample it;
            the messages after the last trained reply are left out.
        too_long: what to do with a longer conversation: raise an error (``raise``), return None
            (``skip``), or keep its first ``max_tokens`` tokens (``cut``; None if they hold no part
            of a reply).

    Raises:
        ValueError: ``replies``, ``too_long`` or ``max_tokens`` is wrong, or the tokenizer has no
            chat template.
        ConversationError: the conversation is malformed, is longer than ``max_tokens`` with
            ``too_long="raise"``, has no reply to train, or begins with a reply; the template
            raises, renders earlier messages differently once others follow, renders the prompt
            differently once the reply follows, leaves out or repeats a part of a message or the
            tools, or ends a reply without a stop token; a reply contains a stop token, or any text
            a special token of the template; or the tokens say something else than the text.
    """
    if replies not in ("all", "last") or too_long not in ("raise", "skip", "cut"):
        raise ValueError(
            f"replies={replies!r}, too_long={too_long!r}; expected 'all' or 'last', and 'raise', "
            "'skip' or 'cut'"
        )
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; expected at least 1")
    name = _name(conversation)
    checked = checked_conversation(conversation, name)
    template = ChatTemplate(tokenizer, checked.get("tools"), stop_token_ids)
    try:
        tokens, mask = _tokens_and_mask(checked["messages"], template, replies)
    except ConversationError as error:
        raise ConversationError(f"{name}: {error}") from error
    if len(tokens) > max_tokens:
        if too_long == "raise":
            raise ConversationError(
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


def _name(conversation: Any) -> str:
    """Return what errors begin with: file and line, and the conversation's own id."""
    if not isinstance(conversation, Mapping):
        return "the conversation"
    own = str(conversation.get("id", ""))
    place = conversation.get("read_from")
    if place:
        return f"{place} ({own:.80})" if own and not own.endswith(place) else place
    return own or "the conversation"


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
    messages: Sequence[Mapping[str, Any]], template: ChatTemplate, replies: str
) -> tuple[list[int], list[bool]]:
    places = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not places:
        raise ConversationError(
            "no message has the role 'assistant', so there is nothing to train on"
        )
    places = [index for index in places if messages[index].get("weight", 1)]
    if not places:
        raise ConversationError("every reply has the weight 0, so there is nothing to train on")
    if replies == "last":
        places = places[-1:]
    tokens: list[int] = []
    mask: list[bool] = []
    done = ""  # the text of those tokens
    for index in places:
        prompt = template.prompt(messages[:index])
        if not prompt.startswith(done):
            raise ConversationError(
                f"the chat template renders the text before messages[{index}] differently than it "
                f"did for an earlier reply ({difference(done, prompt)}), so the policy would have "
                "seen another conversation; use a template that only appends, or train on "
                "replies='last'"
            )
        reply = template.reply(messages, index, prompt)
        between = template.encode(prompt[len(done) :])
        sampled = [*template.encode(reply.text), reply.stop_token_id]
        tokens += between + sampled
        mask += [False] * len(between) + [True] * len(sampled)
        done = prompt + reply.text + reply.stop
    template.require_all_rendered(messages[: places[-1] + 1], done, trained=places)
    return tokens, mask
