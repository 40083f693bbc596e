"""The protocol by which a server keeps the prompt of a conversation, and is sent only what is new.

A request for a completion with the header ``Primerl-Prompt: NAME`` asks the server to keep its
prompt under that name. The server confirms it with the header ``Primerl-Prompt: kept`` in its
response; servers that do not know the protocol ignore the header. Later requests that continue the
prompt have the header ``Primerl-Prompt: NAME DIGEST``, and ``added_token_ids`` in place of
``token_ids``. The digest is that of the tokens which the server is to hold. A server that does not
hold exactly these answers 409 (Conflict), and the client then sends all tokens.

The tokens are kept as JSON text without brackets, so neither side converts what it has converted
before.
"""

from typing import Any

import attrs
import msgspec
import numpy as np
import xxhash

HEADER = "Primerl-Prompt"
KEPT = "kept"
TOKENS = "token_ids"
ADDED = "added_token_ids"


@attrs.frozen(kw_only=True, eq=False)
class PromptFields:
    """A prompt in a request: ``fields`` of its body, and the ``header``, which may be empty.

    ``length`` is that of the whole prompt.
    """

    length: int
    fields: dict[str, Any]
    header: str = ""

    @property
    def whole(self) -> bool:
        """Whether the request has all tokens of the prompt."""
        return TOKENS in self.fields


def text_of(token_ids: np.ndarray) -> bytes:
    """Return token ids as JSON text without the brackets of the list."""
    return msgspec.json.encode(token_ids.tolist())[1:-1]


def in_brackets(text: bytes | bytearray | memoryview) -> msgspec.Raw:
    """Return token ids, given as text, as a JSON list that is encoded as it is."""
    return msgspec.Raw(b"".join((b"[", text, b"]")))


def digest_of(text: bytes | bytearray | memoryview) -> str:
    """Return the digest of token ids, given as text."""
    return xxhash.xxh3_128_hexdigest(text)
