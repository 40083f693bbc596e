"""Small real things for tests and demonstrations: models, a tokenizer, words, a scripted engine.

Above all other packages; nothing imports it.
"""

from primerl.testing.characters import character_tokenizer
from primerl.testing.models import smollm2, tiny_model
from primerl.testing.scripted import ScriptedEngine, lognormal
from primerl.testing.vocabulary import words

__all__ = [
    "ScriptedEngine",
    "character_tokenizer",
    "lognormal",
    "smollm2",
    "tiny_model",
    "words",
]
