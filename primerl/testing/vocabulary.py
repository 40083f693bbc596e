"""Common English words, and a tokenizer with one token per character."""

from importlib import resources
from typing import Any

from primerl._optional import require


def words() -> list[str]:
    """Common English words of 3 to 5 lower-case letters, in a fixed shuffled order.

    Drawn from the SCOWL word lists, whose notice is in ``words.LICENSE`` beside them.
    """
    text = resources.files("primerl.testing").joinpath("words.txt").read_text(encoding="utf-8")
    return text.split()


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
