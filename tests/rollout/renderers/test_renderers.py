"""Renderers: bridges against whole renderings, with the templates of real models."""

import asyncio
import pickle
from pathlib import Path

import pytest
from byte_tokenizer import byte_tokenizer
from chat_tokenizer import chat_tokenizer

from primerl import rollout
from primerl.rollout.renderers.chatml import ChatMLRenderer, chatml_renderer
from primerl.rollout.renderers.loading import load_renderer
from primerl.rollout.renderers.template import TemplateRenderer
from primerl.rollout.renderers.tool_calls import (
    MOST_CALLS,
    parse_arguments,
    parse_object,
    parse_tool_calls,
)
from primerl.testing import ScriptedEngine
from primerl.types import SamplingParams

trl = pytest.importorskip("trl")
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STOPS = {
    "smollm2": ["<|im_end|>", "<|im_start|>"],
    "qwen2_5": ["<|im_end|>", "<|im_start|>"],
    "qwen3": ["<|im_end|>", "<|im_start|>"],
    "qwen3_instruct_2507": ["<|im_end|>", "<|im_start|>"],
    "llama3": ["<|eot_id|>"],
    "phi3": ["<|end|>"],
    "gemma3": ["<end_of_turn>"],
    "cohere2": ["<|END_OF_TURN_TOKEN|>", "<|END_RESPONSE|>"],
    "glm4moe": ["<|user|>", "<|observation|>"],
}
CHATML = ("smollm2", "qwen2_5", "qwen3", "qwen3_instruct_2507")


def tokenizer_of(name):
    template = SMOLLM2 if name == "smollm2" else (TEMPLATES / f"{name}.jinja").read_text()
    return byte_tokenizer(STOPS[name], template)


def chat(*texts, roles=("user", "assistant")):
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize("name", STOPS)
def test_a_bridge_is_what_the_template_renders_or_there_is_none(name):
    tokenizer = tokenizer_of(name)
    renderer = load_renderer(tokenizer)
    assert isinstance(renderer, ChatMLRenderer) == (name in CHATML)
    messages = chat("What is 2 + 2?")
    tokens = renderer.render(messages, add_generation_prompt=True).token_ids
    bridged = 0
    for turn in range(3):
        ended = {"cohere2": "<|END_RESPONSE|>"}.get(name, "") + tokenizer.eos_token
        reply = tokenizer.encode(f"It is {turn}.{ended}", add_special_tokens=False)
        messages += [
            {"role": "assistant", "content": f"It is {turn}."},
            {"role": "user", "content": f"And {turn} ?"},
        ]
        new = renderer.tokens_after(reply, messages[-1:])
        whole = renderer.render(messages, add_generation_prompt=True).token_ids
        bridged += new is not None
        if new is not None:
            assert tokenizer.decode([*tokens, *reply, *new]) == tokenizer.decode(whole)
        tokens = whole
    assert bridged == (0 if name == "glm4moe" else 3)  # that one renders an empty thought


@pytest.mark.parametrize("name", CHATML)
@pytest.mark.parametrize("cut", [False, True])
def test_chatml_adds_results_of_tools_as_the_template_does(name, cut):
    tokenizer = tokenizer_of(name)
    renderer, template = chatml_renderer(tokenizer), TemplateRenderer(tokenizer)
    reply = tokenizer.encode("Hm." + "" if cut else "Hm.<|im_end|>", add_special_tokens=False)
    results = [{"role": "tool", "content": text} for text in ("1", "", "<|x\n")]

    for new in (results, [*results, *chat("Go on.")], chat("No."), results[:1]):
        assert renderer.tokens_after(reply, new) == template.tokens_after(reply, new)
    assert renderer.tokens_after(reply, chat("no", "yes")) is None
    assert renderer.tokens_after(reply, []) is None


def test_reasoning_that_the_template_leaves_out_is_no_prefix():
    tokenizer = tokenizer_of("qwen3")
    renderer = load_renderer(tokenizer)
    reply = tokenizer.encode("<think>\nOh.\n</think>\n\nYes.<|im_end|>", add_special_tokens=False)

    assert renderer.tokens_after(reply, chat("Sure?")) is None
    assert renderer.tokens_after(reply, [{"role": "tool", "content": "4"}]) is not None


def test_glm_keeps_reasoning_between_tools_and_not_between_users():
    tokenizer = tokenizer_of("glm4moe")
    renderer = load_renderer(tokenizer)
    said = "\n<think>Hm.</think>\nLet me look."
    opening = [*chat("Is it open?"), {"role": "assistant", "content": said}]
    result = [{"role": "tool", "content": "yes"}]
    prompt = renderer.render(opening[:1], add_generation_prompt=True).token_ids
    reply = tokenizer.encode(said, add_special_tokens=False)

    added = renderer.tokens_after(reply, result)

    whole = renderer.render([*opening, *result], add_generation_prompt=True).token_ids
    assert tokenizer.decode([*prompt, *reply, *added]) == tokenizer.decode(whole)
    assert renderer.tokens_after(reply, chat("Sure?")) is None


def test_chatml_needs_a_template_that_renders_it():
    tokenizer = tokenizer_of("smollm2")
    tokenizer.chat_template = SMOLLM2.replace("message['content']", "(message['content'] | trim)")
    assert chatml_renderer(tokenizer) is None
    assert type(load_renderer(tokenizer)) is TemplateRenderer


def test_a_conversation_does_not_repeat_what_stands_before_the_stop_token():
    """Cohere2 ends a reply with two tokens, of which the second is the stop token."""
    tokenizer = tokenizer_of("cohere2")
    ending = "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
    engine = ScriptedEngine([f"Hi.{ending}"], tokenizer=tokenizer)
    talk = rollout.Conversation(engine, tokenizer, SamplingParams(max_tokens=32))

    async def two_turns():
        await talk.turn("Hello")
        await talk.turn("Bye")

    asyncio.run(two_turns())
    text = tokenizer.decode(talk.token_ids)
    assert text.count(ending) == text.count("<|END_RESPONSE|>") == 2
    said = [*chat("Hello", "Hi.", "Bye"), {"role": "assistant", "content": "Hi."}]
    assert text == tokenizer.apply_chat_template(said, tokenize=False)


MALFORMED = {
    '<tool_call>{"name": "f", "arguments": {}': "not closed",
    '<tool_call>{"name": "f", "arguments": {]}</tool_call>': "not JSON",
    "<tool_call>[]</tool_call>": "not an object with a 'name'",
    '<tool_call>{"name": 3}</tool_call>': "not an object with a 'name'",
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>': "'arguments' are not an object",
    "<tool_call>" + "[" * 100_000 + "</tool_call>": "not JSON",
    '<tool_call>{"name": ""}</tool_call>': "not an object with a 'name'",
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>': "not JSON: NaN is not allowed",
    '<tool_call>{"name": "f", "arguments": {"a": -Infinity}}</tool_call>': "-Infinity is not",
    '<tool_call>{"name": "f", "arguments": {"a": [1e999]}}</tool_call>': "1e999 is too large",
    '<tool_call>{"name": "f", "arguments": {"a": -1e999}}</tool_call>': "-1e999 is too large",
    '<tool_call>{"name": "f", "arguments": {"a": 1' + "0" * 9999 + "}}</tool_call>": "4300 digits",
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": NaN}"}</tool_call>': "are not JSON",
    '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>': "are not an object of names",
    '<tool_call>{"name": "f", "arguments": false}</tool_call>': "are not an object of names",
}


@pytest.mark.parametrize("text", MALFORMED, ids=MALFORMED.values())
def test_a_malformed_call_stays_in_the_text_and_says_what_is_wrong(text):
    good = '<tool_call>\n{"name": "look", "arguments": {"at": "door"}}\n</tool_call>'

    parsed = parse_tool_calls(f"Hm. {good} {text}")

    look, bad = parsed.tool_calls
    assert (look.name, look.arguments, look.status) == ("look", {"at": "door"}, "ok")
    assert MALFORMED[text] in bad.status
    assert parsed.content.startswith("Hm.")
    assert parsed.content.endswith(text)
    assert good not in parsed.content


@pytest.mark.parametrize(
    ("written", "arguments"),
    {
        "": {},
        ', "arguments": {}': {},
        ', "arguments": null': {},
        ', "arguments": ""': {},
        ', "arguments": "{}"': {},
        ', "arguments": {"a": 1.5e300}': {"a": 1.5e300},
        r', "arguments": "{\"a\": [1, \"b\"]}"': {"a": [1, "b"]},
    }.items(),
)
def test_arguments_may_be_missing_or_text(written, arguments):
    text = f'<tool_call>{{"name": "f"{written}}}</tool_call>'

    parsed = parse_tool_calls(text)

    assert [(one.name, one.arguments, one.status) for one in parsed.tool_calls] == [
        ("f", arguments, "ok")
    ]
    assert parsed.content == ""


def test_objects_are_parsed_strictly():
    assert parse_object(' {"a": [1, 2.5, null, "NaN"]}\n') == {"a": [1, 2.5, None, "NaN"]}
    assert parse_arguments(None) == parse_arguments("") == {}
    for text in ("", "{", '{"a": Infinity}', '{"a": 1e400}', "[" * 100_000, "1" * 5000):
        with pytest.raises(ValueError, match="^not JSON: "):
            parse_object(text)
    for text in ("[]", "null", '"{}"'):
        with pytest.raises(ValueError, match="^not an object of names and values$"):
            parse_object(text)


def test_calls_beyond_the_limit_stay_in_the_text():
    call = '<tool_call>{"name": "f"}</tool_call>'

    parsed = parse_tool_calls(call * (MOST_CALLS + 2))

    *calls, beyond = parsed.tool_calls
    assert [one.status for one in calls] == ["ok"] * MOST_CALLS
    assert "more than 1,000 calls" in beyond.status
    assert parsed.content == call * 2


@pytest.mark.parametrize(
    "template", [SMOLLM2, "{% for m in messages %}{{ m.content }}{% endfor %}"]
)
def test_renderers_can_be_sent_to_other_processes(template):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    renderer = load_renderer(tokenizer)
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    rendered = renderer.render(messages, add_generation_prompt=True).token_ids
    copied = pickle.loads(pickle.dumps(renderer))
    assert copied.render(messages, add_generation_prompt=True).token_ids == rendered
