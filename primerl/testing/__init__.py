"""Small real things for tests and demonstrations: models, a tokenizer, words, engines.

Above all other packages; nothing imports it.
"""

from primerl.testing.characters import character_tokenizer
from primerl.testing.conformance import check_engine
from primerl.testing.imitation import imitate
from primerl.testing.models import smollm2, tiny_model
from primerl.testing.scripted import ScriptedEngine, lognormal
from primerl.testing.vocabulary import words

__all__ = [
    "ScriptedEngine",
    "character_tokenizer",
    "check_engine",
    "imitate",
    "lognormal",
    "smollm2",
    "tiny_model",
    "words",
]
