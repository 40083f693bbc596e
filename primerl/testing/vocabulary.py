"""Common English words, a character tokenizer, and a byte-level tokenizer for chats."""

from collections.abc import Iterable
from importlib import resources
from typing import Any

from primerl._common.optional import require


def words() -> list[str]:
    """Return common English words of 3 to 5 lower-case letters, in a fixed shuffled order.

    They are from the SCOWL word lists, whose license is in ``words.LICENSE`` in the same folder.
    """
    text = resources.files("primerl.testing").joinpath("words.txt").read_text(encoding="utf-8")
    return text.split()


def character_tokenizer(characters: str) -> Any:
    """Make a Hugging Face tokenizer of single characters, plus ``<pad>`` (0) and ``<eos>`` (1).

    It can be saved and loaded like any other. Characters that are not among ``characters`` are
    dropped.
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


CHAT_TEMPLATE = (
    "{% set told = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% if told or tools %}{{ '<|im_start|>system\n' + told }}{% endif %}"
    "{% if tools %}{{ '\n<tools>' }}{% endif %}"
    "{% for tool in tools or [] %}{{ '\n' + tool | tojson }}{% endfor %}"
    "{% if tools %}{{ '\n</tools>' }}{% endif %}"
    "{% if told or tools %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages if message.role != 'system' %}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{% set written = {'name': call.function.name, 'arguments': call.function.arguments} %}"
    "{{ '<tool_call>' + written | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A ChatML template, with tools and tool calls in the Hermes format."""


def chat_tokenizer(texts: Iterable[str] = (), *, vocab_size: int = 260) -> Any:
    """Make a byte-level BPE tokenizer with a chat template (ChatML) for conversations with tools.

    The first 260 tokens are ``<pad>`` (0), ``<|im_end|>`` (1), which ends a reply,
    ``<|im_start|>``, ``<bos>``, and the bytes. Further tokens are merges learned from ``texts``,
    deterministically.

    Raises:
        ValueError: ``vocab_size`` is below 260.
    """
    if vocab_size < 260:
        raise ValueError(f"vocab_size is {vocab_size}, expected at least 260")
    transformers = require("transformers", extra="transformers")
    tokenizers = require("tokenizers", extra="transformers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=["<pad>", "<|im_end|>", "<|im_start|>", "<bos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
