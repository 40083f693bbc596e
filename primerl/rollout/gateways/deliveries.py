"""The replies of a session, and whether clients have received them."""

from collections.abc import Iterator

import attrs

from primerl.rollout.conversations.history import Reply


@attrs.define(eq=False)
class Delivery:
    """A reply, and how many clients it was sent to that have not left without reading it."""

    reply: Reply
    sent: int = 0

    @property
    def received(self) -> bool:
        """Whether a client has the reply, as far as is known."""
        return self.sent > 0 or self.reply.continued


class Deliveries:
    """The replies of one session, from the time when they were sampled."""

    def __init__(self) -> None:
        self._of: dict[int, Delivery] = {}  # by the id of the reply, which the value keeps alive
        self._answers: dict[bytes, list[Delivery]] = {}  # by the digest of the request

    def add(self, reply: Reply, digest: bytes) -> None:
        """Add a reply that was sampled for a request."""
        delivery = self._of[id(reply)] = Delivery(reply)
        self._answers.setdefault(digest, []).append(delivery)

    def of(self, reply: Reply) -> Delivery:
        """Return the delivery of a reply."""
        return self._of[id(reply)]

    def waiting(self, digest: bytes) -> Reply | None:
        """Return the reply to a request that no client has received yet, or None."""
        answers = self._answers.get(digest, ())
        return next((one.reply for one in answers if not one.received), None)

    @property
    def unreceived(self) -> Iterator[Reply]:
        """The replies that no client has received, the latest first."""
        return (one.reply for one in reversed(self._of.values()) if not one.received)
