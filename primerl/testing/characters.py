"""A tokenizer with one token per character."""

from typing import Any

from primerl._optional import require


def character_tokenizer(characters: str) -> Any:
    """A Hugging Face tokenizer of single characters, plus ``<pad>`` (0) and ``<eos>`` (1).

    It saves and loads like any other. A character that is not among ``characters`` is dropped.
    """
    transformers = require("transformers", extra="transformers")
    tokenizers = require("tokenizers", extra="transformers")
    vocabulary = {"<pad>": 0, "<eos>": 1}
    for character in dict.fromkeys(characters):
        vocabulary[character] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )
