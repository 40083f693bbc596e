"""Tokens of a text, which must say what the text says."""

import unicodedata
from typing import Any

from primerl.data.errors import ConversationError


def tokens_of(text: str, tokenizer: Any) -> list[int]:
    """Tokenize a text, and check that its tokens say the same.

    White space may differ, since some tokenizers write a space before each text, and so may the
    Unicode normalization.

    Raises:
        ConversationError: the tokenizer raises, does not know a character, or changes the text.
    """
    if not text:
        return []
    try:
        tokens = list(tokenizer.encode(text, add_special_tokens=False))
        decoded = tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    except Exception as error:  # of whatever kind the tokenizer raises for this text
        raise ConversationError(
            f"the tokenizer raised an error for {text!r:.60}: {type(error).__name__}: {error}"
        ) from error
    unknown = tokenizer.unk_token_id
    if unknown in tokens and tokens.count(unknown) > text.count(tokenizer.unk_token):
        raise ConversationError(
            f"the tokenizer has no token for a part of {text!r:.60} and writes "
            f"{tokenizer.unk_token!r}; use a tokenizer that knows all characters, or remove them"
        )
    if decoded != text:
        expected, found = _plain(text), _plain(decoded)
        if expected != found:
            same = common_prefix(expected, found)
            raise ConversationError(
                f"the tokens do not say what the text says: {expected[same : same + 30]!r} became "
                f"{found[same : same + 30]!r}; use a tokenizer that keeps the text, or change it"
            )
    return tokens


def _plain(text: str) -> str:
    return "".join(unicodedata.normalize("NFC", text).split())


def difference(expected: str, found: str) -> str:
    """Describe where two texts begin to differ."""
    same = common_prefix(expected, found)
    return f"{expected[same : same + 30]!r} became {found[same : same + 30]!r}"


def common_prefix(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
