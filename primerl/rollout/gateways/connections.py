"""Connections that tell whether a client has received what was sent to it.

A system that closes a connection whose received bytes its program did not read resets the
connection. A reset after a response therefore says that the client left without reading the whole
response. The next request, or an orderly end, says that the client has read everything.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

ProtocolFactory = Callable[[], Any]

# How long a connection stays open after its last response, until the client has read it.
LINGER_S = 5.0
# How long after the end of a client's requests the gateway looks whether the client has reset.
HALF_CLOSED_S = 0.2
_TCP_CLOSE = 7  # Linux, include/net/tcp_states.h


class ClientConnection(asyncio.Protocol):
    """One connection: passes everything on to a server's own protocol."""

    def __init__(self, protocol: Any, all_connections: "Connections") -> None:
        self._protocol = protocol
        self._all = all_connections
        self._transport: LingeringTransport | None = None
        self._unread: list[tuple[object, Callable[[], None]]] = []

    def sent(self, session: object, on_unread: Callable[[], None]) -> None:
        """Note that a response was sent; ``on_unread`` is called if the client does not read it."""
        self._unread.append((session, on_unread))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = LingeringTransport(transport)
        self._all.opened[self._transport] = self
        self._protocol.connection_made(self._transport)

    def data_received(self, data: bytes) -> None:
        """Pass on a part of a request; a client that sends one has read the responses before."""
        self._unread.clear()
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass on that no more requests come; the client may not have read all responses yet."""
        if self._unread and self._transport is not None:
            asyncio.get_running_loop().call_later(HALF_CLOSED_S, self._transport.close_now)
            return True
        result: bool | None = self._protocol.eof_received()
        return result

    def connection_lost(self, exc: Exception | None) -> None:
        """End; with an error if the client has reset the connection."""
        for session in [session for session, _ in self._unread]:
            self.look(session, reset=exc is not None)
        if self._transport is not None:
            self._all.opened.pop(self._transport, None)
        self._protocol.connection_lost(exc)

    def look(self, session: object, *, reset: bool = False) -> None:
        """Look whether the client can't have read what was sent for a session."""
        transport = self._transport
        if transport is None or not (reset or transport.unsent or transport.was_reset):
            return
        unread, self._unread = self._unread, []
        for owner, on_unread in unread:
            if owner is session:
                on_unread()
            else:
                self._unread.append((owner, on_unread))

    def pause_writing(self) -> None:
        """Pass on that the client reads more slowly than the server writes."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Pass on that the client has caught up."""
        self._protocol.resume_writing()


class LingeringTransport:
    """A transport that stays open for a while after it is closed, until the client has read all."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._closing = False
        self._was_reset = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        """Send no more; close when the client closes, or after ``LINGER_S`` seconds."""
        if self._closing or self._transport.is_closing():
            return
        self._was_reset = self.was_reset
        self._closing = True
        self._transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self.close_now)

    def close_now(self) -> None:
        """Close without waiting."""
        self._was_reset = self.was_reset
        self._closing = True
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether nothing may be sent any more."""
        return self._closing or bool(self._transport.is_closing())

    @property
    def unsent(self) -> int:
        """How many bytes the system has not taken over yet."""
        return int(self._transport.get_write_buffer_size())

    @property
    def was_reset(self) -> bool:
        """Whether the client had reset the connection before it was closed here."""
        connection = self._transport.get_extra_info("socket")
        if self._closing or connection is None or connection.fileno() < 0:
            return self._was_reset  # afterwards, the system's state is the same as after a reset
        if not hasattr(socket, "TCP_INFO"):
            return False
        state: bytes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return state[0] == _TCP_CLOSE


class Connections:
    """The open connections of a server.

    Args:
        make_protocol: makes the server's own protocol of a new connection.
    """

    def __init__(self, make_protocol: ProtocolFactory) -> None:
        self._make_protocol = make_protocol
        self.opened: dict[Any, ClientConnection] = {}

    def __call__(self) -> ClientConnection:
        """Return the protocol of a new connection."""
        return ClientConnection(self._make_protocol(), self)

    def sent(self, transport: Any, session: object, on_unread: Callable[[], None]) -> None:
        """Note that a response was sent; ``on_unread`` is called if its client does not read it.

        ``session`` is whose response it is; see ``look``.
        """
        connection = self.opened.get(transport)
        if connection is None:
            on_unread()
        else:
            connection.sent(session, on_unread)

    def look(self, session: object) -> None:
        """Look which clients can't have read what was sent for a session that ends."""
        for connection in list(self.opened.values()):
            connection.look(session)

    def close(self) -> None:
        """Close what is still open."""
        for transport in list(self.opened):
            transport.close_now()
