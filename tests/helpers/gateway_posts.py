"""Plain HTTP requests to a gateway, without a client's library."""

import asyncio
import contextlib
import json
import socket

import aiohttp
from chat_tokenizer import RecordingEngine, chat_tokenizer

from primerl import rollout
from primerl.types import SamplingParams

TOKENIZER = chat_tokenizer()
PARAMS = SamplingParams(max_tokens=256)


class Posts:
    """One session of a gateway, and requests to it."""

    def __init__(self, session, http):
        self.session = session
        self._http = http

    async def post(self, path, body, **options):
        """Return the status and the parsed answer."""
        status, content = await self.raw(path, json.dumps(body).encode(), **options)
        return status, json.loads(content)

    async def stream(self, path, body):
        """Return the data of each event of a streamed answer."""
        _, content = await self.raw(path, json.dumps({**body, "stream": True}).encode())
        lines = content.decode().split("\n")
        return [json.loads(one[6:]) for one in lines if one.startswith("data: {")]

    async def raw(self, path, content, *, method="POST", headers=None, key=None, base=None):
        """Return the status and the answer's bytes."""
        sent = {"Authorization": f"Bearer {key or self.session.key}", **(headers or {})}
        url = (base or self.session.base_url) + path
        async with self._http.request(method, url, data=content, headers=sent) as answer:
            return answer.status, await answer.read()


@contextlib.asynccontextmanager
async def opened(engine, *, tokenizer=TOKENIZER, limits=None, **options):
    """Open a session of a new gateway."""
    async with (
        rollout.gateway(engine, tokenizer, params=PARAMS, **options) as gateway,
        aiohttp.ClientSession() as http,
        gateway.open(limits=limits) as session,
    ):
        yield Posts(session, http)


def played(scenario, reply, *, tokenizer=TOKENIZER, pause=None, **options):
    """Run a scenario with an engine that replies by ``reply``.

    Return the session, the engine and what the scenario returned.
    """
    engine = RecordingEngine(tokenizer, reply, pause=pause)

    async def main():
        async with opened(engine, tokenizer=tokenizer, **options) as posts:
            result = await scenario(posts)
        return posts.session, engine, result

    return asyncio.run(main())


HELLO = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/chat/completions": {"messages": HELLO},
    "/responses": {"input": HELLO},
    "/messages": {"messages": HELLO, "max_tokens": 200},
}


def script(_, number):
    return f"Reply {number}. " * 10


async def sent(posts, path, body):
    """Send a request over a connection of its own; return reader and writer."""
    host, port = posts.session.anthropic_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**22)
    content = json.dumps(body).encode()
    head = (
        f"POST /v1{path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {posts.session.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


async def until(holds):
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.005)


async def close(writer):
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def answered(posts, count=1):
    outcomes = posts.session.outcomes
    await until(lambda: outcomes["answered"] + outcomes["disconnected"] >= count)


async def unread_socket(posts, path, body, *, head=""):
    """Send a request over a plain socket, and wait for the answer without reading it."""
    host, port = posts.session.anthropic_url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    content = json.dumps(body).encode()
    lines = (
        f"POST /v1{path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {posts.session.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n{head}\r\n"
    )
    connection.sendall(lines.encode() + content)
    await answered(posts)
    return connection


def blocks_of(events):
    """Put streamed blocks together, as clients do."""
    blocks = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                blocks[-1]["input"] = json.loads(delta["partial_json"])
            else:
                key = delta["type"].removesuffix("_delta")
                blocks[-1][key] += delta[key]
    return blocks
