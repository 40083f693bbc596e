"""Tiny models, tokenizers, words and engines for tests and demonstrations.

No package of the training loop imports ``primerl.testing``.
"""

from primerl.testing.conformance import check_engine
from primerl.testing.imitation import imitate
from primerl.testing.models import save_once, smollm2, tiny_chat_model, tiny_model
from primerl.testing.scripted import ScriptedEngine, lognormal
from primerl.testing.vocabulary import character_tokenizer, chat_tokenizer, words

__all__ = [
    "ScriptedEngine",
    "character_tokenizer",
    "chat_tokenizer",
    "check_engine",
    "imitate",
    "lognormal",
    "save_once",
    "smollm2",
    "tiny_chat_model",
    "tiny_model",
    "words",
]
