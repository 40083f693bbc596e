"""Which tokenizers a teacher and its student may have."""

import pytest

from primerl import models, testing


def test_the_same_tokenizer_is_accepted_also_loaded_again(tmp_path):
    tokenizer = testing.character_tokenizer("abc")
    tokenizer.save_pretrained(tmp_path)

    again = type(tokenizer).from_pretrained(tmp_path)

    models.refuse_other_tokenizer(tokenizer, again, name="teacher")


@pytest.mark.parametrize(
    ("characters", "message"),
    [
        (
            "acb",
            r"teacher has another tokenizer: its token 3 is 'c', but 'b' in the policy's \(5 and 5",
        ),
        ("abcd", r"its token 5 is 'd', but None in the policy's \(6 and 5 tokens\)"),
        ("ab", r"its token 4 is None, but 'c' in the policy's"),
    ],
)
def test_other_tokens_are_refused(characters, message):
    tokenizer, other = map(testing.character_tokenizer, ("abc", characters))

    with pytest.raises(ValueError, match=message):
        models.refuse_other_tokenizer(tokenizer, other, name="teacher")


def test_a_token_that_was_added_to_one_of_them_is_refused():
    tokenizer, other = (testing.character_tokenizer("abc") for _ in "ab")
    other.add_special_tokens({"additional_special_tokens": ["<think>"]})

    with pytest.raises(ValueError, match="its token 5 is '<think>', but None in the policy's"):
        models.refuse_other_tokenizer(tokenizer, other, name="teacher")


def test_another_end_of_replies_is_refused():
    tokenizer, other = (testing.character_tokenizer("abc") for _ in "ab")
    other.eos_token = "c"

    with pytest.raises(
        ValueError, match="teacher ends replies with 'c', but the policy .* '<eos>'"
    ):
        models.refuse_other_tokenizer(tokenizer, other, name="teacher")
