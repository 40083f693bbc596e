"""Check of conversations before a run: which can be trained, and what of them is trained."""

import statistics
import sys
import time
from pathlib import Path
from typing import Any, Literal

from primerl._common.optional import require
from primerl.data.chat_templates import marked_text, training_sample
from primerl.data.conversations import Conversations
from primerl.data.errors import ConversationError

_PROGRESS_S = 5.0


def main(
    model: str,
    files: tuple[Path, ...],
    /,
    *,
    convert: bool = False,
    replies: Literal["all", "last"] = "all",
    max_tokens: int = sys.maxsize,
    show: int = 1,
) -> int:
    """Convert all conversations as a fine-tuning run would, and say which can't be trained.

    It loads only the model's tokenizer. Each conversation that is refused is printed with its file,
    line and reason. The exit code is 1 if there is any.

    Args:
        model: model folder or Hugging Face hub id.
        files: files and folders of conversations.
        convert: also read rows of other formats, such as ShareGPT.
        replies: which replies are trained; templates of reasoning models need "last".
        max_tokens: the longest conversation that is allowed, in tokens.
        show: how many conversations to print, with the trained text between ⟦ and ⟧.
    """
    try:
        tokenizer, stops = _tokenizer(model)
        conversations = Conversations(*files, convert=convert, skip_bad=True)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for reason in conversations.bad:
        _say(f"refused: {reason}")
    refused = len(conversations.bad)
    lengths: list[int] = []
    trained = 0
    said = time.monotonic()
    for index, conversation in enumerate(conversations):
        if time.monotonic() - said > _PROGRESS_S:
            said = time.monotonic()
            sys.stderr.write(f"{index:,} of {len(conversations):,} conversations\n")
        try:
            sample = training_sample(
                conversation,
                tokenizer,
                max_tokens=max_tokens,
                stop_token_ids=stops,
                replies=replies,
            )
        except ConversationError as error:
            refused += 1
            _say(f"refused: {error}")
            continue
        assert sample is not None, "too long conversations are refused"
        if len(lengths) < show:
            _say(f"{conversation['id']}:\n{marked_text(sample, tokenizer)}\n")
        lengths.append(len(sample.token_ids))
        trained += int(sample.loss_mask.sum())
    _say(_summary(lengths, trained, refused))
    return 1 if refused else 0


def _tokenizer(model: str) -> tuple[Any, list[int]]:
    """Load a model's tokenizer, and the tokens that end its replies."""
    transformers = require("transformers", extra="transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    try:
        stops = transformers.GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # the model has none
        stops = None
    return tokenizer, [stops] if isinstance(stops, int) else list(stops or ())


def _summary(lengths: list[int], trained: int, refused: int) -> str:
    said = f"{len(lengths):,} conversations can be trained, {refused:,} are refused"
    if not lengths:
        return said
    total = sum(lengths)
    return (
        f"{said}\n{total:,} tokens, {trained:,} of them trained ({trained / total:.0%}); "
        f"the median conversation has {statistics.median(lengths):,.0f} tokens, the longest "
        f"{max(lengths):,}"
    )


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
