"""Whether two tokenizers mean the same by the same number."""

from typing import Any


def refuse_other_tokenizer(tokenizer: Any, other: Any, *, name: str) -> None:
    """Raise unless each token id is the same token in both, and replies end with the same one.

    A model that scores the token ids of another, such as a teacher those of its student, needs
    this: otherwise it scores another text. How text is divided into tokens is not compared, because
    only ids are exchanged.

    Args:
        tokenizer: of the model that samples.
        other: of the model that scores.
        name: of the latter, for the error.

    Raises:
        ValueError: they differ; the message has the first difference.
    """
    mine, theirs = _tokens(tokenizer), _tokens(other)
    for number in sorted(mine.keys() | theirs.keys()):
        if mine.get(number) != theirs.get(number):
            raise ValueError(
                f"{name} has another tokenizer: the token {number} is {theirs.get(number)!r} "
                f"there, but {mine.get(number)!r} here ({len(theirs)} and {len(mine)} tokens); "
                "choose models of one tokenizer"
            )
    if tokenizer.eos_token_id != other.eos_token_id:
        raise ValueError(
            f"{name} ends replies with {other.eos_token!r}, but here they end with "
            f"{tokenizer.eos_token!r}, which it would call wrong; set the same eos_token in both "
            "models' tokenizer_config.json"
        )


def _tokens(tokenizer: Any) -> dict[int, str]:
    """The token of each id."""
    return {number: token for token, number in tokenizer.get_vocab().items()}
