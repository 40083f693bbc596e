"""Endpoints that take messages: what is sent, what comes back, and what becomes of their errors."""

import asyncio
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("verifiers")
from scripted_chat import ScriptedChat

from primerl import rollout, testing
from primerl.rollout.engines.chat_endpoint import PromptTooLong
from primerl.rollout.engines.contract import BadCompletion
from primerl.types import SamplingParams

HERE = Path(__file__).parents[2] / "helpers/verifiers_environments"
PARAMS = SamplingParams(max_tokens=8, temperature=0.5)
QUESTION = [{"role": "user", "content": "cat"}]


@pytest.fixture
def environments(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def backwards(messages):
    return messages[-1]["content"].split()[-1][::-1]


@pytest.fixture
def chat():
    with ScriptedChat(backwards) as server:
        yield server


@pytest.fixture
def engine(chat):
    with rollout.ChatEndpoint(chat.url) as endpoint:
        yield endpoint


def ask(engine, params=PARAMS, **how):
    return asyncio.run(engine.chat(QUESTION, params, **how))


def test_a_reply_and_its_tokens(chat, engine):
    reply = ask(engine)
    assert reply.message["content"] == "tac"
    assert (reply.finish_reason, reply.prompt_tokens, reply.completion_tokens) == ("stop", 3, 3)
    assert chat.bodies == [
        {
            "model": "small",
            "messages": QUESTION,
            "temperature": 0.5,
            "top_p": 1.0,
            "max_tokens": 8,
        }
    ]
    assert ask(engine, SamplingParams(max_tokens=2)).finish_reason == "length"


def test_what_is_not_a_default_is_sent_too(chat):
    params = SamplingParams(max_tokens=8, seed=7, top_k=5, top_p=0.5, stop_token_ids=(3,))
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    with rollout.ChatEndpoint(
        chat.url, model="other", token_limit="max_completion_tokens"
    ) as endpoint:
        chat.faults = [(400, {"message": "only its fields are looked at"})]
        with pytest.raises(ValueError, match="only its fields"):
            asyncio.run(endpoint.chat(QUESTION, params, tools=tools))
    (body,) = chat.bodies
    assert body["model"] == "other"
    assert body["max_completion_tokens"] == 8
    assert "max_tokens" not in body
    assert (body["seed"], body["top_k"], body["top_p"]) == (7, 5, 0.5)
    assert body["stop_token_ids"] == [3]
    assert body["tools"] == tools


def test_the_key_is_sent_and_a_wrong_one_is_refused_before_anything_starts(monkeypatch):
    with ScriptedChat(backwards, key="right") as chat:
        with rollout.ChatEndpoint(chat.url, api_key="right") as endpoint:
            assert ask(endpoint).message["content"] == "tac"
        monkeypatch.setenv("OPENAI_API_KEY", "right")
        with rollout.ChatEndpoint(chat.url) as endpoint:
            assert ask(endpoint).message["content"] == "tac"
        with pytest.raises(ValueError, match="wrong key") as refused:
            rollout.ChatEndpoint(chat.url, api_key="secret")
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize("models", [(), ("a", "b")])
def test_without_a_name_the_endpoint_must_serve_one_model(models):
    with ScriptedChat(backwards, models=models) as chat:
        with pytest.raises(ValueError, match=r"serves \[.*\]; say which with model="):
            rollout.ChatEndpoint(chat.url)
        with rollout.ChatEndpoint(chat.url, model="b") as endpoint:
            assert endpoint.model == "b"


def test_an_endpoint_that_lists_nothing_needs_a_name():
    with ScriptedChat(backwards, models=None) as chat:
        with pytest.raises(ValueError, match="does not list its models; say which"):
            rollout.ChatEndpoint(chat.url)
        with rollout.ChatEndpoint(chat.url, model="b") as endpoint:
            assert ask(endpoint).message["content"] == "tac"


@pytest.mark.parametrize("answer", ["<html>hello</html>", "{}", '{"object": "list", "data": null}'])
def test_a_server_of_something_else_is_named(answer):
    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header(
                "Content-Type", "application/json" if answer[0] == "{" else "text/html"
            )
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with pytest.raises(ValueError, match=f"{url} does not answer as OpenAI's API does"):
            rollout.ChatEndpoint(url)
        server.shutdown()


def test_what_is_no_endpoint_is_an_error_at_once():
    with pytest.raises(ValueError, match="expected a URL such as http://HOST:PORT/v1"):
        rollout.ChatEndpoint("localhost:8000")
    with ScriptedChat(backwards) as chat:
        url = chat.url
    with pytest.raises(RuntimeError, match=f"the endpoint {url} can't be used: Connection error"):
        rollout.ChatEndpoint(url)


@pytest.mark.parametrize(
    "error",
    [
        {"message": "This model's maximum context length is 100 tokens", "code": 400},
        {"message": "too many", "code": "context_length_exceeded"},
        {"message": "exceeds the available context size; the context window is full"},
    ],
)
def test_a_conversation_that_is_too_long_is_told_apart(chat, engine, error):
    chat.faults = [(400, error)]
    with pytest.raises(PromptTooLong):
        ask(engine)


@pytest.mark.parametrize("body", [{"choices": []}, {}, {"choices": None}, ["what"], "text"])
def test_a_response_without_a_message_is_a_bad_completion(chat, engine, body):
    chat.faults = [body]
    with pytest.raises(BadCompletion, match="no message"):
        ask(engine)


def test_a_busy_or_broken_server_is_asked_again(chat, engine):
    chat.faults = [(429, {"message": "busy"}), (503, {"message": "loading"}), "drop"]
    assert ask(engine).message["content"] == "tac"
    assert len(chat.bodies) == 4


def test_cancelling_a_call_cancels_its_request(chat, engine):
    chat.hold.clear()

    async def cancelled():
        call = asyncio.create_task(engine.chat(QUESTION, PARAMS))
        while not chat.running:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(cancelled())
    deadline = time.monotonic() + 60
    while chat.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not chat.running


def test_it_takes_no_tokens_and_no_worker_takes_it(engine):
    with pytest.raises(ValueError, match="takes messages, not tokens"):
        asyncio.run(engine.generate([1], PARAMS))
    with pytest.raises(ValueError, match="ChatEndpoint, which has no tokens to train on"):
        rollout.worker(
            engine,
            rollout.single_turn(testing.character_tokenizer("ab"), reward=lambda *_: 0.0),
            [{"prompt": "a"}],
            params=SamplingParams(max_tokens=2),
            group_size=2,
            groups_per_step=1,
            max_staleness=0,
        )


# ---- environments of verifiers


def play(engine, name, **how):
    environment = rollout.verifiers(name, tokenizer=None, keep_conversation=True, **how)
    tasks = [next(iter(environment.tasks))]
    (played,) = rollout.evaluate_tasks(engine, environment, tasks, PARAMS, retries=0, timeout_s=20)
    assert played.error is None, played.message
    return played.rollout


def test_an_environment_is_played_without_a_tokenizer(chat, engine):
    played = play(engine, "reverse-words")
    assert played.reward == 1.0
    assert played.samples == ()
    assert played.stop == "stop"
    assert played.metrics["completion_tokens"] == 5
    assert played.metrics["turns"] == 1
    user, reply = played.conversation["messages"]
    assert user["content"].endswith(reply["content"][::-1])
    assert "tools" not in played.conversation


def test_a_reply_that_was_cut_short_says_so(chat, engine):
    chat.reply = lambda messages: "a long story"
    assert play(engine, "reverse-words").stop == "length"


def guess(messages):
    """Guesses 1, 2 and 3 by the tool, then says that it is found."""
    results = [one for one in messages if one["role"] == "tool"]
    if len(results) == 3:
        return "found"
    call = {"name": "guess", "arguments": json.dumps({"n": len(results) + 1})}
    return {"tool_calls": [{"id": f"c{len(results)}", "type": "function", "function": call}]}


@pytest.mark.thorough
def test_tools_are_offered_and_called(chat, engine, environments):
    chat.reply = guess
    played = play(engine, "guessing")
    assert played.reward == 1.0
    assert played.metrics["guesses"] == 3
    assert played.metrics["turns"] == 4
    roles = [message["role"] for message in played.conversation["messages"]]
    assert roles == ["user", *["assistant", "tool"] * 3, "assistant"]
    assert "guess" in [tool["function"]["name"] for tool in played.conversation["tools"]]
    assert chat.bodies[-1]["tools"] == played.conversation["tools"]
    sent = chat.bodies[-1]["messages"]
    assert sent[1]["tool_calls"][0]["id"] == sent[2]["tool_call_id"]


@pytest.mark.thorough
def test_a_context_that_is_full_ends_the_play_as_such(chat, engine, environments):
    full = (400, {"message": "full", "code": "context_length_exceeded"})

    def twice(messages):
        chat.faults = [full]
        return guess(messages)

    chat.reply = twice
    assert play(engine, "guessing").stop == "context"


def test_a_server_that_is_killed_is_waited_for(chat, engine):
    environment = rollout.verifiers("reverse-words", tokenizer=None)
    tasks = [task for task, _ in zip(environment.tasks, range(6), strict=False)]
    chat.hold.clear()
    plays = rollout.evaluate_tasks(
        engine, environment, tasks, PARAMS, concurrency=2, retries=0, timeout_s=60
    )
    chat.hold.set()
    ends = [next(plays)]
    chat.kill()
    chat.start()
    ends += plays
    assert [end.error for end in ends] == [None] * 6
    assert len({end.task["id"] for end in ends}) == 6


def test_an_engine_of_tokens_needs_a_tokenizer():
    environment = rollout.verifiers("reverse-words", tokenizer=None)
    tasks = [next(iter(environment.tasks))]
    (played,) = rollout.evaluate_tasks(testing.ScriptedEngine(), environment, tasks, PARAMS)
    assert played.error == "ValueError"
    assert "was made without a tokenizer" in played.message
