"""Harnesses that use the Chat Completions, Messages or Responses API of verifiers' server."""

import asyncio
import importlib
import json
import os
from pathlib import Path

import attrs
import pytest
from chat_tokenizer import RecordingEngine, chat_tokenizer, tool_call

pytest.importorskip("verifiers")
pytest.importorskip("openai")
pytest.importorskip("anthropic")
from primerl import rollout
from primerl.rollout.engines.chat_endpoint import ChatReply
from primerl.rollout.renderers.loading import load_renderer
from primerl.types import SamplingParams

HERE = Path(__file__).parents[2] / "helpers/verifiers_environments"
TOKENIZER = chat_tokenizer()
RENDERER = load_renderer(TOKENIZER)
PARAMS = SamplingParams(max_tokens=400, temperature=0.7)
APIS = ["chat", "messages", "responses"]
LOOKED = f"I look. {tool_call('look', at='door')}"


class Thinking(type(RENDERER)):
    """A renderer for which the text before a bar is reasoning."""

    def parse_response(self, *args, **options):
        parsed = super().parse_response(*args, **options)
        thought, bar, said = parsed.content.partition("|")
        if not bar:
            return parsed
        return attrs.evolve(parsed, content=said, reasoning_content=thought)


@pytest.fixture(autouse=True)
def sdk_chat(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    module = importlib.import_module("sdk_chat")
    for kept in (module.SEEN, module.BODIES, module.COUNTED, module.LISTED):
        kept.clear()
    return module


def says(*lines):
    return RecordingEngine(TOKENIZER, lambda _, number: lines[number])


def play(engine, *, tokenizer=TOKENIZER, environment="arcade:echo", **harness):
    made = rollout.verifiers(
        environment,
        tokenizer=tokenizer,
        renderer=Thinking(TOKENIZER) if tokenizer is not None else None,
        config={"agent": {"harness": {"id": "sdk-chat", **harness}}},
        keep_conversation=True,
    )

    async def once():
        try:
            return await made(next(iter(made.tasks)), engine, PARAMS)
        finally:
            await made.aclose()

    return asyncio.run(once())


def usages(bodies, api, *, stream):
    """Return the usage of each answer, as pairs of prompt and sampled tokens."""
    found = []
    for body in bodies:
        if not stream:
            events = [json.loads(body)]
        else:
            lines = [line for line in body.splitlines() if line.startswith("data: {")]
            events = [json.loads(line[len("data: ") :]) for line in lines]
        if api == "chat":
            usage = events[-1]["usage"]
            found.append((usage["prompt_tokens"], usage["completion_tokens"]))
        elif api == "messages":
            begin = events[0]["message"] if stream else events[0]
            end = events[-2] if stream else events[0]
            found.append((begin["usage"]["input_tokens"], end["usage"]["output_tokens"]))
        else:
            usage = (events[-1]["response"] if stream else events[0])["usage"]
            found.append((usage["input_tokens"], usage["output_tokens"]))
            assert usage["total_tokens"] == sum(found[-1])
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_a_harness_gets_replies_in_its_own_api(sdk_chat, api, stream):
    engine = says(LOOKED, "I open it.", "abc")

    played = play(engine, api=api, stream=stream, turns=3)

    (text, calls, reason), *others = sdk_chat.SEEN
    assert (text.strip(), reason) == ("I look.", "tool_calls")
    assert [(name, arguments) for _, name, arguments in calls] == [("look", {"at": "door"})]
    assert others == [("I open it.", [], "stop"), ("abc", [], "stop")]
    assert played.reward == 1.0
    (sample,) = played.samples  # what the client sent back is what was sampled
    trained = TOKENIZER.decode(sample.token_ids[sample.loss_mask])
    assert trained == "".join(f"{line}<|im_end|>" for line in (LOOKED, "I open it.", "abc"))
    sampled = [len(line) + 1 for line in (LOOKED, "I open it.", "abc")]
    expected = [
        (len(prompt), count) for (prompt, *_), count in zip(engine.requests, sampled, strict=True)
    ]
    assert usages(sdk_chat.BODIES, api, stream=stream) == expected


@pytest.mark.parametrize(
    ("api", "stream"),
    [("chat", False), *((api, stream) for api in APIS[1:] for stream in (False, True))],
)
def test_reasoning_is_sent_and_taken_back(sdk_chat, api, stream):
    lines = [f"Hm.|{LOOKED}", "So.|abc", "Well.|abc"]

    played = play(says(*lines), api=api, stream=stream, turns=3)

    assert [reply[0].strip() for reply in sdk_chat.SEEN] == ["I look.", "abc", "abc"]
    assert all(line[:3] in body for line, body in zip(lines, sdk_chat.BODIES, strict=True))
    (sample,) = played.samples
    trained = TOKENIZER.decode(sample.token_ids[sample.loss_mask])
    assert trained == "".join(f"{line}<|im_end|>" for line in lines)
    thoughts = [message.get("reasoning_content") for message in played.conversation["messages"]]
    assert [thought for thought in thoughts if thought] == ["Hm.", "So.", "Well."]


def test_all_apis_lead_to_the_same_samples(sdk_chat):
    played = {}
    for api in APIS:
        for stream in (False, True):
            engine = says(LOOKED, "I open it.", "abc")
            played[api, stream] = play(engine, api=api, stream=stream, turns=3)

    first, *others = played.values()
    for other in others:
        for one, two in zip(first.samples, other.samples, strict=True):
            assert one.token_ids.tolist() == two.token_ids.tolist()
            assert one.loss_mask.tolist() == two.loss_mask.tolist()
            assert one.versions.tolist() == two.versions.tolist()
            assert one.behavior_logprobs.tolist() == two.behavior_logprobs.tolist()
        assert (first.reward, first.metrics, first.stop) == (
            *(other.reward, other.metrics, other.stop),
        )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_a_reply_of_calls_alone_or_of_nothing_or_cut_short(sdk_chat, api, stream):
    engine = says(tool_call("look", at="1") + tool_call("look", at="2"), "<|im_end|>", "x" * 500)

    played = play(engine, api=api, stream=stream, turns=3)

    (text, calls, reason), empty, (cut, _, why) = sdk_chat.SEEN
    assert (text.strip(), reason, why) == ("", "tool_calls", "length")
    assert [arguments["at"] for *_, arguments in calls] == ["1", "2"]
    assert empty == ("", [], "stop")
    assert cut == "x" * PARAMS.max_tokens
    assert sum(int(sample.loss_mask.sum()) for sample in played.samples) == sum(
        len(completion.token_ids) for _, completion in engine.requests
    )


class Endpoint:
    """An engine that takes messages, whose model reasons and writes malformed arguments."""

    version, context_length = 0, 1 << 30

    def __init__(self):
        self.messages = []

    async def chat(self, messages, params, *, tools=None):
        self.messages.append(messages)
        function = {"name": "look", "arguments": "not JSON"}
        call = {"id": "call_7", "type": "function", "function": function}
        said = {"role": "assistant", "content": "", "reasoning": "Hm.", "tool_calls": [call]}
        first = len(self.messages) == 1
        return ChatReply(
            message=said if first else {"role": "assistant", "content": "abc"},
            finish_reason="tool_calls" if first else "stop",
            prompt_tokens=11,
            completion_tokens=5,
        )


def test_an_endpoint_is_reached_through_every_api(sdk_chat):
    for stream in (False, True):
        engine = Endpoint()
        sdk_chat.SEEN.clear()
        played = play(engine, tokenizer=None, api="messages", stream=stream, turns=2)

        assert sdk_chat.SEEN[0][1] == [("call_7", "look", {"arguments": "not JSON"})]
        assert played.reward == 1.0
        assert played.metrics["prompt_tokens"] == 22.0
        *_, said, result = engine.messages[-1]
        assert (said["reasoning_content"], result["name"]) == ("Hm.", "look")


@pytest.mark.parametrize("api", APIS)
def test_errors_have_the_form_of_the_api(sdk_chat, api):
    engine = says("abc")
    play(engine, api=api, turns=1)
    tight = says("abc")
    tight.context_length = len(engine.requests[0][0]) + 10

    played = play(tight, api=api, turns=2)

    assert played.stop == "context"
    assert len(played.samples) == 1
    error = sdk_chat.SEEN[-1]
    assert error.status_code == 400
    assert error.body["type"] == ("error" if api == "messages" else "invalid_request_error")


@pytest.mark.parametrize("api", APIS)
def test_a_stream_is_kept_alive_while_the_engine_samples(sdk_chat, monkeypatch, api):
    server = importlib.import_module("verifiers.v1.interception.server")
    monkeypatch.setattr(server, "KEEPALIVE_GRACE_SECONDS", 0.02)
    monkeypatch.setattr(server, "KEEPALIVE_INTERVAL_SECONDS", 0.02)
    engine = says(LOOKED, "abc")
    engine._pause = lambda _: asyncio.sleep(0.2)

    played = play(engine, api=api, stream=True, turns=2)

    assert [len(calls) for _, calls, _ in sdk_chat.SEEN] == [1, 0]
    mark = {"chat": ": keepalive", "messages": "event: ping", "responses": "resp_keepalive"}[api]
    assert mark in sdk_chat.BODIES[0]
    assert len(played.samples) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_hooks_change_what_a_harness_gets(sdk_chat, api, stream):
    engine = says(f"Hm.|{LOOKED}", "abc", "abc")

    played = play(engine, environment="hooked-arcade:echo", api=api, stream=stream, turns=3)

    assert sdk_chat.SEEN == [("...", [], "stop"), ("abc", [], "stop"), ("abc", [], "stop")]
    last = TOKENIZER.decode(engine.requests[-1][0])
    assert "SAY IT BACK: ABC" in last
    assert "GO ON, 1." in last
    assert "assistant\n...<|im_end|>" in last
    trained = [TOKENIZER.decode(one.token_ids[one.loss_mask]) for one in played.samples]
    assert trained == ["abc<|im_end|>abc<|im_end|>"]


def test_content_that_is_not_text_is_refused_and_not_dropped(sdk_chat):
    pdf = {"type": "text", "media_type": "text/plain", "data": "The answer is 7."}
    document = {"role": "user", "content": [{"type": "document", "source": pdf}]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": document["content"]}
    file = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,Nw=="}
    audio = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    for api, key, message, kind in (
        ("messages", "messages", document, "document"),
        ("messages", "messages", {"role": "user", "content": [result]}, "document"),
        ("responses", "input", {"role": "user", "content": [file]}, "input_file"),
        ("chat", "messages", {"role": "user", "content": [audio]}, "input_audio"),
    ):
        engine = says("abc")
        with pytest.raises(RuntimeError, match=f"a part of type '{kind}'; only text"):
            play(engine, api=api, options={key: [message]})
        assert sdk_chat.SEEN[-1].status_code == 400
        assert not engine.requests


def test_tools_that_are_no_functions_are_refused(sdk_chat):
    search = {"type": "web_search"}
    grammar = {"type": "custom", "name": "apply_patch"}
    shell = {"type": "bash_20250124", "name": "bash"}
    for api, tool in (("responses", search), ("responses", grammar), ("messages", shell)):
        with pytest.raises(RuntimeError, match="only functions without a namespace are supported"):
            play(says("abc"), api=api, options={"tools": [tool]})
        assert sdk_chat.SEEN[-1].status_code == 400
        assert tool.get("name", "web_search") in str(sdk_chat.SEEN[-1])


def test_a_request_that_continues_a_stored_response_is_refused(sdk_chat):
    engine = says("abc")
    item = {"type": "item_reference", "id": "msg_1"}
    for name, options in (
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("item_reference", {"input": [item, {"role": "user", "content": "Hello"}]}),
    ):
        with pytest.raises(RuntimeError, match=name):
            play(engine, api="responses", options=options)
        assert "send the whole conversation as input" in str(sdk_chat.SEEN[-1])
    assert not engine.requests


def test_a_harness_is_told_the_tokens_of_a_request_and_the_model(sdk_chat):
    engine = says("abc")

    play(engine, api="messages", turns=1, count=True)

    assert [len(engine.requests[0][0])] == sdk_chat.COUNTED
    (model,) = sdk_chat.LISTED
    assert (model.id, model.max_model_len) == ("policy", engine.context_length)
