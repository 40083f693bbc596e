"""A tokenizer with one token per byte and the given special tokens."""

from collections.abc import Iterable

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers


def byte_tokenizer(
    special_tokens: Iterable[str], chat_template: str, *, merges: Iterable[tuple[str, str]] = ()
):
    """Make the tokenizer; the first special token is ``eos_token``, ``merges`` are BPE merges."""
    merges = list(merges)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(first + second for first, second in merges)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    eos, *others = special_tokens
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token=eos
    )
    wrapped.add_tokens(
        [tokenizers.AddedToken(token, normalized=False, special=True) for token in others],
        special_tokens=True,
    )
    wrapped.chat_template = chat_template
    return wrapped
