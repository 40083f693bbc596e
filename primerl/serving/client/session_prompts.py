"""The prompts of sessions, of which a turn's request sends only what the server does not hold."""

import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Iterator

import attrs
import numpy as np

from primerl.serving.client.held_prefixes import extend_hashes
from primerl.serving.protocol.kept_prompts import (
    ADDED,
    TOKENS,
    PromptFields,
    digest_of,
    in_brackets,
    text_of,
)

BRANCHES = 8  # prompts of one session that are known at once, such as those of its agents
KNOWN_BYTES = 1 << 29  # of text and tokens in all; a prompt of 131k tokens takes about 1.4 MB
_OBJECT_BYTES = 1024


@attrs.define(eq=False)
class SessionPrompt:
    """The prompt of a conversation's last request, as tokens and as JSON text, which only grows.

    Servers keep the prompt under ``name``; without a name they do not. ``held_by`` is the url of a
    server that keeps the first ``held`` bytes of the text. It was last sent ``held_tokens`` tokens,
    whose keys and values it may have cached.
    """

    token_ids: np.ndarray
    text: bytearray
    name: str = ""
    held_by: str = ""
    held: int = 0
    held_tokens: int = 0
    _hashes: list[int] = attrs.field(factory=list, init=False)

    @classmethod
    def alone(cls, token_ids: np.ndarray, *, name: str = "") -> "SessionPrompt":
        """Return a prompt that continues no other; servers keep it if it has a name."""
        return cls(token_ids, bytearray(text_of(token_ids)), name)

    @property
    def size(self) -> int:
        """The size of tokens and text in bytes."""
        return self.token_ids.nbytes + len(self.text) + _OBJECT_BYTES

    def extend(self, token_ids: np.ndarray) -> None:
        """Continue the prompt: ``token_ids`` begin with its tokens."""
        added = text_of(token_ids[len(self.token_ids) :])
        self.text += b"," + added if added else b""
        self.token_ids = token_ids

    def hashes(self) -> list[int]:
        """Return the hashes of the prompt's blocks; only blocks that were added are hashed."""
        extend_hashes(self._hashes, self.token_ids)
        return self._hashes

    def for_server(self, url: str) -> PromptFields:
        """Return the prompt as sent to a server: without what the server holds.

        Until ``confirm``, no server is taken to hold anything.
        """
        held, self.held = self.held if url == self.held_by else 0, 0
        text = memoryview(self.text)
        fields = {ADDED if held else TOKENS: in_brackets(text[held + 1 if held else 0 :])}
        header = f"{self.name} {digest_of(text[:held])}" if held else self.name
        return PromptFields(length=len(self.token_ids), fields=fields, header=header)

    def confirm(self, url: str) -> None:
        """Record that a server keeps the whole prompt."""
        self.held_by, self.held = url, len(self.text)
        self.held_tokens = len(self.token_ids)


class SessionPrompts:
    """The latest prompts of each session; those of the least recent sessions are dropped first."""

    def __init__(self) -> None:
        self.size = 0
        self._known: OrderedDict[str, list[SessionPrompt]] = OrderedDict()

    @contextlib.contextmanager
    def sent(self, session: str | None, token_ids: np.ndarray) -> Iterator[SessionPrompt]:
        """Yield the prompt ``token_ids``, based on the longest known prompt that it continues.

        The known prompt is not known during the body, so that no two requests extend it at once.
        Requests without a session are not continued, so their prompts are not remembered.
        """
        if session is None:
            yield SessionPrompt.alone(token_ids)
            return
        prompt = self._take(session, token_ids)
        try:
            yield prompt
        finally:
            self._put(session, prompt)

    def _take(self, session: str, token_ids: np.ndarray) -> SessionPrompt:
        known = self._known.get(session, [])
        begins = [one for one in known if _begins(token_ids, one.token_ids)]
        if not begins:
            return SessionPrompt.alone(token_ids, name=secrets.token_hex(8))
        found = max(begins, key=lambda one: len(one.token_ids))
        known.remove(found)
        self.size -= found.size
        found.extend(token_ids)
        return found

    def _put(self, session: str, prompt: SessionPrompt) -> None:
        known = self._known.setdefault(session, [])
        self._known.move_to_end(session)
        known.append(prompt)
        self.size += prompt.size
        if len(known) > BRANCHES:
            self.size -= known.pop(0).size
        while self.size > KNOWN_BYTES and len(self._known) > 1:
            _, dropped = self._known.popitem(last=False)
            self.size -= sum(one.size for one in dropped)


def _begins(token_ids: np.ndarray, with_ids: np.ndarray) -> bool:
    return np.array_equal(token_ids[: len(with_ids)], with_ids)
