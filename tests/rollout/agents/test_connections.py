"""What a connection tells of its client, with a protocol that sends more than systems buffer."""

import asyncio
import socket

import pytest

from primerl.rollout.gateways.connections import Connections

LARGE = 40_000_000  # bytes; the system's buffers take less


class Sender(asyncio.Protocol):
    """Sends a large response to each request."""

    made = None

    def connection_made(self, transport):
        Sender.made = transport

    def data_received(self, data):
        Sender.made.write(b"x" * LARGE)


async def until(holds):
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.005)


async def asked():
    """Start a server, and ask it over a socket that does not read yet."""
    connections = Connections(Sender)
    server = await asyncio.get_running_loop().create_server(connections, "127.0.0.1", 0)
    client = socket.create_connection(server.sockets[0].getsockname())
    client.sendall(b"?")
    await until(lambda: Sender.made is not None and Sender.made.unsent)
    return connections, server, client


async def read_all(client):
    """Read one response."""
    count = 0
    while count < LARGE:
        count += len(await asyncio.to_thread(client.recv, 2**22))


@pytest.mark.parametrize("looks", ["its own session", "another session"])
def test_only_its_own_session_takes_a_response_that_is_still_being_sent_for_unread(looks):
    unread = []

    async def main():
        connections, server, client = await asked()
        connections.sent(Sender.made, "its own session", lambda: unread.append("first"))
        connections.look(looks)
        await read_all(client)
        connections.sent(Sender.made, "its own session", lambda: unread.append("second"))
        connections.look("its own session")
        client.close()
        server.close()
        await until(lambda: not connections.opened)

    Sender.made = None
    asyncio.run(main())
    assert unread == (["first"] if looks == "its own session" else [])


def test_a_client_that_leaves_has_read_none_of_what_was_sent_since_its_last_request():
    unread = []

    async def main():
        connections, server, client = await asked()
        for number in range(2):
            connections.sent(Sender.made, "session", lambda number=number: unread.append(number))
        client.close()
        await until(lambda: not connections.opened)
        connections.sent(Sender.made, "session", lambda: unread.append("late"))
        server.close()

    Sender.made = None
    asyncio.run(main())
    assert unread == [0, 1, "late"]
