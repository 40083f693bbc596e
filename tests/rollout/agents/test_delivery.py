"""Replies that clients did not read are not trained; what they read is, however they leave."""

import asyncio
import json

import pytest
from chat_tokenizer import trained
from gateway_posts import (
    BODIES,
    HELLO,
    close,
    played,
    script,
    sent,
    unread_socket,
    until,
)

from primerl.rollout.gateways import server


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("read", [0, 100])
def test_a_client_that_leaves_without_reading_all_is_not_trained(path, stream, read):
    async def talk(posts):
        body = {**BODIES[path], "stream": stream}
        connection = await unread_socket(posts, path, body)
        if read:
            await asyncio.to_thread(connection.recv, read)
        connection.close()
        await until(lambda: posts.session.outcomes["disconnected"])

    session, engine, _ = played(talk, script)
    assert len(engine.requests) == 1
    assert session.outcomes["undelivered"] == 1
    assert session.rollout(reward=1.0).samples == ()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_reads_all_and_leaves_is_trained(path, stream):
    async def talk(posts):
        reader, writer = await sent(posts, path, {**BODIES[path], "stream": stream})
        content = b""
        ends = b"\r\n0\r\n\r\n" if stream else b"}"
        while not content.endswith(ends):
            content += await reader.read(2**16)
        await close(writer)
        await asyncio.sleep(0.05)

    session, engine, _ = played(talk, script)
    assert session.outcomes["answered"] == 1
    assert session.outcomes["undelivered"] == 0
    assert trained(session.rollout(reward=1.0).samples) == engine.sampled


def test_the_next_attempt_gets_the_reply_that_was_not_read():
    async def talk(posts):
        body = BODIES["/chat/completions"]
        connection = await unread_socket(posts, "/chat/completions", body)
        connection.close()
        await until(lambda: posts.session.outcomes["disconnected"])
        _, answer = await posts.raw("/chat/completions", json.dumps(body).encode())
        return json.loads(answer)["choices"][0]["message"]["content"]

    session, engine, text = played(talk, script)
    assert text.startswith("Reply 0.")
    assert len(engine.requests) == 1
    assert trained(session.rollout(reward=1.0).samples) == engine.sampled


def test_a_reply_that_its_client_continues_was_received():
    """Whatever its connection says: some clients leave before the end of a stream."""

    async def talk(posts):
        body = {**BODIES["/chat/completions"], "stream": True}
        connection = await unread_socket(posts, "/chat/completions", body)
        await asyncio.to_thread(connection.recv, 100)
        connection.close()
        await until(lambda: posts.session.outcomes["disconnected"])
        following = [
            *HELLO,
            {"role": "assistant", "content": script("", 0)},
            {"role": "user", "content": "Go on"},
        ]
        return await posts.post("/chat/completions", {"messages": following})

    session, engine, (status, _) = played(talk, script)
    assert status == 200
    assert session.outcomes["undelivered"] == 0
    (sample,) = session.rollout(reward=1.0).samples
    assert trained([sample]) == engine.sampled


def slowly(_):
    return asyncio.sleep(0.3)


@pytest.mark.parametrize("leaves", [False, True])
def test_equal_requests_at_once_are_one_reply(leaves):
    """Also if one of the clients leaves while it waits."""

    async def talk(posts):
        content = json.dumps(BODIES["/chat/completions"]).encode()
        first = asyncio.create_task(posts.raw("/chat/completions", content))
        second = asyncio.create_task(posts.raw("/chat/completions", content))
        await asyncio.sleep(0.1)
        if leaves:
            first.cancel()
        answers = await asyncio.gather(first, second, return_exceptions=True)
        return [json.loads(one[1]) for one in answers if not isinstance(one, BaseException)]

    session, engine, answers = played(talk, script, pause=slowly)
    assert len(answers) == (1 if leaves else 2)
    assert {one["choices"][0]["message"]["content"] for one in answers} == {script("", 0)}
    assert len(engine.requests) == 1
    assert trained(session.rollout(reward=1.0).samples) == engine.sampled


def test_a_reply_that_one_of_two_clients_read_is_trained():
    async def talk(posts):
        body = BODIES["/chat/completions"]
        unread = asyncio.create_task(unread_socket(posts, "/chat/completions", body))
        status, _ = await posts.raw("/chat/completions", json.dumps(body).encode())
        (await unread).close()
        await until(lambda: posts.session.outcomes["disconnected"])
        return status

    session, engine, status = played(talk, script, pause=slowly)
    assert status == 200
    assert len(engine.requests) == 1
    assert trained(session.rollout(reward=1.0).samples) == engine.sampled


@pytest.mark.parametrize("path", BODIES)
def test_streams_that_wait_have_events_which_clients_see(path, monkeypatch):
    monkeypatch.setattr(server, "PING_S", 0.05)
    events = {
        "/chat/completions": "chat.completion.chunk",
        "/responses": "response.in_progress",
        "/messages": "ping",
    }

    async def talk(posts):
        return await posts.stream(path, BODIES[path])

    session, engine, found = played(talk, script, pause=slowly)
    kinds = [one.get("object") or one["type"] for one in found]
    assert kinds[1:4] == [events[path]] * 3
    if path == "/responses":
        assert [one["sequence_number"] for one in found] == list(range(len(found)))
        assert kinds.count("response.created") == 1
    if path == "/chat/completions":
        assert len({one["id"] for one in found}) == 1
    assert trained(session.rollout(reward=1.0).samples) == engine.sampled
