"""Every error has the form of the API that the request was for."""

import json
import zlib

import pytest
from chat_tokenizer import chat_tokenizer
from gateway_posts import played

from primerl.rollout.gateways import server

HELLO = [{"role": "user", "content": "Hi"}]
ASKED = {
    "unknown path": ("POST", "/nothing", b"{}", {}, 404),
    "unknown path of messages": ("POST", "/messages/batches", b"{}", {}, 404),
    "wrong method": ("GET", "/chat/completions", b"", {}, 405),
    "wrong method of messages": ("PUT", "/messages", b"{}", {}, 405),
    "websocket": ("GET", "/responses", b"", {"Upgrade": "websocket"}, 426),
    "bad gzip": ("POST", "/chat/completions", b"no gzip", {"Content-Encoding": "gzip"}, 400),
    "bad gzip of messages": ("POST", "/messages", b"no gzip", {"Content-Encoding": "gzip"}, 400),
    "not json": ("POST", "/responses", b"{", {}, 400),
    "not a number": ("POST", "/messages", b'{"max_tokens": NaN}', {}, 400),
    "too large": ("POST", "/messages", b" " * 3000, {}, 413),
    "too large for counting": ("POST", "/messages/count_tokens", b" " * 3000, {}, 413),
    "nothing to count": ("POST", "/messages/count_tokens", b"{}", {}, 400),
}


def check_form(path, answer):
    error = answer["error"]
    assert isinstance(error["message"], str)
    if path.startswith("/messages"):
        assert answer["type"] == "error"
        assert error["type"].endswith("_error")
    else:
        assert {"type", "param", "code"} <= set(error)


@pytest.mark.parametrize("name", ASKED)
def test_errors_have_the_form_of_the_api(name, monkeypatch):
    monkeypatch.setattr(server, "MAX_BODY", 2000)
    method, path, content, headers, expected = ASKED[name]

    async def talk(posts):
        return await posts.raw(path, content, method=method, headers=headers)

    _, engine, (status, content) = played(talk, lambda *_: "Hello.")
    assert status == expected, content
    check_form(path, json.loads(content))
    assert engine.requests == []


def test_what_cannot_be_counted_is_a_refusal():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"

    async def talk(posts):
        body = {"messages": HELLO, "max_tokens": 9}
        return await posts.post("/messages/count_tokens", body)

    _, _, (status, answer) = played(talk, lambda *_: "Hello.", tokenizer=tokenizer)
    assert status == 400
    check_form("/messages", answer)
    assert "roles must alternate" in answer["error"]["message"]


def test_compressed_requests_are_read():
    async def talk(posts):
        content = zlib.compress(json.dumps({"messages": HELLO}).encode())
        headers = {"Content-Encoding": "deflate"}
        return await posts.raw("/chat/completions", content, headers=headers)

    _, _, (status, _) = played(talk, lambda *_: "Hello.")
    assert status == 200


def test_any_model_is_there_and_listed_ones_have_an_end():
    async def talk(posts):
        named = await posts.raw("/models/gpt%2Fany", b"", method="GET")
        listed = await posts.raw("/models", b"", method="GET")
        unknown = await posts.raw("/models/x", b"", method="GET", key="a.b")
        return named, listed, unknown

    _, _, (named, listed, unknown) = played(talk, lambda *_: "Hello.")
    assert (named[0], json.loads(named[1])["id"]) == (200, "gpt/any")
    assert json.loads(listed[1])["data"][0]["id"] == "policy"
    assert unknown[0] == 401


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses"])
def test_base_urls_with_and_without_the_version_are_served(path):
    body = {"/responses": {"input": HELLO}}.get(path, {"messages": HELLO, "max_tokens": 9})

    async def talk(posts):
        content = json.dumps(body).encode()
        bases = [posts.session.base_url, posts.session.anthropic_url]
        return [await posts.raw(path, content, base=base) for base in bases]

    _, engine, answers = played(talk, lambda *_: "Hello.")
    assert [status for status, _ in answers] == [200, 200]
    assert len(engine.requests) == 2


def test_keys_of_any_bytes_are_refused():
    async def talk(posts):
        name = posts.session.name
        return [
            await posts.raw("/chat/completions", b"{}", key=key)
            for key in (f"{name}.\u00e9", f"{name}.", "\u00e9.x", ".")
        ]

    _, _, answers = played(talk, lambda *_: "Hello.")
    assert {status for status, _ in answers} == {401}
