"""A session's replies by the ids and keys that its clients got with them."""

import hmac
import secrets

import attrs

from primerl.rollout.conversations.history import Reply
from primerl.rollout.gateways.apis import ModelRequest


def new_name() -> str:
    """Return a new id."""
    return secrets.token_hex(12)


@attrs.frozen(eq=False)
class RecordedReply:
    """A reply and its request."""

    reply: Reply
    request: ModelRequest


class RecordedReplies:
    """The replies of one session.

    Clients send reasoning back with a key, which is an id and a code that only the session can
    make. With the key, the reasoning is found as it was sampled, whatever the client does to it.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._replies: dict[str, RecordedReply] = {}
        self._arguments: dict[str, str] = {}

    def add(self, name: str, reply: Reply, request: ModelRequest) -> None:
        """Record a reply under its id."""
        self._replies[name] = RecordedReply(reply, request)
        for call in reply.message.get("tool_calls", ()):
            self._arguments[call["id"]] = call["function"]["arguments"]

    def find(self, name: str) -> RecordedReply | None:
        """Return a reply by its id."""
        return self._replies.get(name)

    def arguments(self, call: object) -> str | None:
        """Return the arguments of a call by its id, as the policy gave them."""
        return self._arguments.get(call) if isinstance(call, str) else None

    def key(self, name: str) -> str:
        """Return the key of a reply's reasoning."""
        return f"{name}.{self._code(name)}"

    def thought(self, key: object) -> str | None:
        """Return the reasoning that belongs to a key; None if the key is not of this session."""
        if not isinstance(key, str):
            return None
        name, _, code = key.partition(".")
        found = self._replies.get(name)
        if found is None or not hmac.compare_digest(
            code.encode(errors="replace"), self._code(name).encode()
        ):
            return None
        thought = found.reply.message.get("reasoning_content", "")
        return str(thought)

    def _code(self, name: str) -> str:
        return hmac.new(self._secret, name.encode(), "sha256").hexdigest()
