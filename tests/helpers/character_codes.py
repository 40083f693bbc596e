"""A tokenizer for tests, in a separate module so that its objects can be pickled."""


class CharacterCodes:
    """A tokenizer of code points, which suffices for environments and has no dependencies."""

    eos_token_id = 1
    chat_template = None

    def encode(self, text, add_special_tokens=False):
        return [ord(character) for character in text]

    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(map(chr, token_ids))
