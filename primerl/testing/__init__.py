"""Tiny models, a tokenizer, words and engines for tests and demonstrations.

``HostileEngine``, ``HostileEnvironment`` and ``HostileServer`` break the rules on purpose, to test
that faults are detected. No package of the training loop imports this one.
"""

from primerl.testing.conformance import check_engine
from primerl.testing.hostile import (
    HostileEngine,
    HostileEnvironment,
    engine_faults,
    environment_faults,
)
from primerl.testing.hostile_server import HostileServer, server_faults
from primerl.testing.imitation import imitate
from primerl.testing.models import smollm2, tiny_chat_model, tiny_model
from primerl.testing.scripted import ScriptedEngine, lognormal
from primerl.testing.vocabulary import character_tokenizer, chat_tokenizer, words

__all__ = [
    "HostileEngine",
    "HostileEnvironment",
    "HostileServer",
    "ScriptedEngine",
    "character_tokenizer",
    "chat_tokenizer",
    "check_engine",
    "engine_faults",
    "environment_faults",
    "imitate",
    "lognormal",
    "server_faults",
    "smollm2",
    "tiny_chat_model",
    "tiny_model",
    "words",
]
