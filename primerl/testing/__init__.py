"""Small real things for tests and demonstrations: a model, a tokenizer, words.

Above all other packages; nothing imports it.
"""

from primerl.testing.characters import character_tokenizer
from primerl.testing.imitation import imitate
from primerl.testing.models import smollm2, tiny_model
from primerl.testing.vocabulary import words

__all__ = ["character_tokenizer", "imitate", "smollm2", "tiny_model", "words"]
