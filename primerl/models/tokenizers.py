"""Check that two tokenizers assign the same ids to the same tokens."""

from typing import Any


def refuse_other_tokenizer(tokenizer: Any, other: Any, *, name: str) -> None:
    """Check that each token id means the same token in both, and that ``eos_token_id`` is equal.

    This is needed if one model scores the token ids that another sampled, such as a teacher its
    student's; otherwise it scores another text. How text is split into tokens is not compared,
    because only ids are exchanged.

    Args:
        tokenizer: the tokenizer of the model that samples.
        other: the tokenizer of the model that scores.
        name: the name of the model that scores, for the error.

    Raises:
        ValueError: they differ; the message shows the first difference.
    """
    mine, theirs = _tokens(tokenizer), _tokens(other)
    for number in sorted(mine.keys() | theirs.keys()):
        if mine.get(number) != theirs.get(number):
            raise ValueError(
                f"{name} has another tokenizer: its token {number} is {theirs.get(number)!r}, "
                f"but {mine.get(number)!r} in the policy's ({len(theirs)} and {len(mine)} tokens); "
                "choose models with the same tokenizer"
            )
    if tokenizer.eos_token_id != other.eos_token_id:
        raise ValueError(
            f"{name} ends replies with {other.eos_token!r}, but the policy ends them with "
            f"{tokenizer.eos_token!r}, so the policy's ends would score as wrong; set the same "
            "eos_token in both models' tokenizer_config.json"
        )


def _tokens(tokenizer: Any) -> dict[int, str]:
    """Return the token of each id."""
    return {number: token for token, number in tokenizer.get_vocab().items()}
