"""Masks of chat templates that models ship with, as the package trl holds them.

Beside each template, trl has one whose replies are marked for transformers' own mask: a second
opinion, made in another way.
"""

import asyncio

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from chat_templates import STOPS, TEMPLATES
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl import data, rollout, testing
from primerl.types import NOT_SAMPLED, SamplingParams

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]
SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
]
CALL = {"id": "call00001", "type": "function"}
CALL["function"] = {"name": "add", "arguments": {"a": 1, "b": 2}}
TOOL_USE = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Bye"},
]
CONVERSATIONS = {
    "chat": {"messages": CHAT},
    "system": {"messages": [SYSTEM, *CHAT]},
    "tools": {"messages": TOOL_USE, "tools": TOOLS},
}


def tokenizer_of(name: str):
    return byte_tokenizer(STOPS[name], (TEMPLATES / f"{name}.jinja").read_text())


def sample_of(name: str, conversation, **options):
    tokenizer = tokenizer_of(name)
    stops = tokenizer.convert_tokens_to_ids(STOPS[name])
    sample = data.training_sample(
        conversation, tokenizer, max_tokens=100_000, stop_token_ids=stops, **options
    )
    return sample, tokenizer


def trained_texts(sample, tokenizer) -> list[str]:
    edges = np.flatnonzero(np.diff(sample.loss_mask.astype(int), prepend=0, append=0))
    spans = edges.reshape(-1, 2)
    return [tokenizer.decode(sample.token_ids[start:end].tolist()) for start, end in spans]


# How each template writes "Hello." with what ends it.
HELLO = {
    "cohere": "Hello.<|END_OF_TURN_TOKEN|>",
    "cohere2": "Hello.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    "gemma": "Hello.<end_of_turn>",
    "gemma3": "Hello.<end_of_turn>",
    "gemma4": "Hello.<turn|>",
    "glm4moe": "\n<think></think>\nHello.<|user|>",
    "lfm2": "Hello.<|im_end|>",
    "lfm2_v2": "Hello.<|im_end|>",
    "llama3": "Hello.<|eot_id|>",
    "llama3_1": "Hello.<|eot_id|>",
    "phi3": "Hello.<|end|>",
    "phi3_5": "Hello.<|end|>",
    "qwen2_5": "Hello.<|im_end|>",
    "qwen3_instruct_2507": "Hello.<|im_end|>",
    # Its prompt ends with <think>.
    "qwen3_8": "\n</think>\n\nHello.<|im_end|>",
}
CALLS = {
    "gemma4": "<|tool_call>call:add{a:1,b:2}<tool_call|><|tool_response>",
    "glm4moe": "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call><|observation|>",
    "lfm2_v2": "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|><|im_end|>",
    "llama3_1": '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>',
    "qwen2_5": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    "<|im_end|>",
    "qwen3_instruct_2507": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'
    "</tool_call><|im_end|>",
    "qwen3_8": "\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=b>\n2\n</parameter>\n</function>\n</tool_call><|im_end|>",
}


@pytest.mark.parametrize("kind", ["chat", "system"])
@pytest.mark.parametrize("name", HELLO)
def test_replies_of_a_chat(name, kind):
    if (name, kind) == ("gemma", "system"):
        pytest.skip("the template has no system role")
    sample, tokenizer = sample_of(name, CONVERSATIONS[kind])
    assert trained_texts(sample, tokenizer) == [HELLO[name], HELLO[name].replace("Hello.", "4")]


@pytest.mark.parametrize("name", CALLS)
def test_replies_with_tool_calls(name):
    sample, tokenizer = sample_of(name, CONVERSATIONS["tools"])
    expected = [CALLS[name], HELLO[name].replace("Hello.", "It is 3.")]
    expected.append(HELLO[name].replace("Hello.", "Bye"))
    assert trained_texts(sample, tokenizer) == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "chat") for name in HELLO] + [(name, "tools") for name in CALLS],
)
def test_tokens_and_mask_are_transformers_own(name, kind):
    if name == "qwen3_8":
        pytest.skip("its marks hold the <think> of the prompt, which no policy samples")
    conversation = CONVERSATIONS[kind]
    sample, tokenizer = sample_of(name, conversation)
    marked = TEMPLATES / f"{name}_training.jinja"
    if not marked.exists():
        pytest.skip("trl has no template with marks for this one")
    tokenizer.chat_template = marked.read_text()
    reference = tokenizer.apply_chat_template(
        conversation["messages"],
        tools=conversation.get("tools"),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    # At the end, our stop token may be that of a next message, and theirs white space or an <eos>.
    length = len(sample.token_ids) - 1
    assert sample.token_ids[:length].tolist() == reference["input_ids"][:length]
    differs = sample.loss_mask[:length] != np.array(reference["assistant_masks"][:length], bool)
    # Marks may hold the line break after a stop token, or end before the stop token.
    for token in set(sample.token_ids[:length][differs].tolist()):
        text = tokenizer.decode([token])
        assert text.isspace() or text in STOPS[name], (name, text)


SMOLLM2 = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = st.text(alphabet="ab \n\té漢<|>{}", min_size=1, max_size=8)
REPLIES = TEXTS.filter(str.strip)  # of white space alone, some templates leave nothing


@pytest.mark.parametrize("name", ["qwen2_5", "glm4moe", "llama3", "phi3", "gemma3"])
@settings(max_examples=10)
@given(turns=st.lists(st.tuples(TEXTS, REPLIES), min_size=1, max_size=3))
def test_a_sample_is_the_rollout_whose_policy_sampled_the_replies(name, turns):
    messages = []
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    sample, tokenizer = sample_of(name, {"messages": messages})

    replies = []
    edges = np.flatnonzero(np.diff(sample.loss_mask.astype(int), prepend=0, append=0))
    for start, end in edges.reshape(-1, 2):
        replies.append(sample.token_ids[start:end].tolist())
    engine = testing.ScriptedEngine(replies=replies)
    params = SamplingParams(
        max_tokens=1000, stop_token_ids=tokenizer.convert_tokens_to_ids(STOPS[name])
    )
    chat = rollout.Conversation(engine, tokenizer, params)

    async def play():
        for message in messages[::2]:
            await chat.turn([message])

    asyncio.run(play())
    played = chat.sample()
    assert sample.token_ids.tolist() == played.token_ids.tolist()
    assert sample.loss_mask.tolist() == played.loss_mask.tolist()


def test_the_text_with_marks():
    sample, tokenizer = sample_of("gemma", CONVERSATIONS["chat"])
    assert data.marked_text(sample, tokenizer, marks=("[", "]")) == (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n[Hello.<end_of_turn>]\n"
        "<start_of_turn>user\n2 + 2?<end_of_turn>\n<start_of_turn>model\n[4<end_of_turn>]"
    )


def test_values_of_a_sample():
    sample, _ = sample_of("qwen2_5", CONVERSATIONS["chat"])
    trained = sample.loss_mask
    assert not trained[0]
    assert sample.advantages.tolist() == trained.astype(float).tolist()
    assert sample.behavior_logprobs.tolist() == [0.0] * len(trained)
    assert sample.versions.tolist() == np.where(trained, 0, NOT_SAMPLED).tolist()


def test_the_last_reply_alone():
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>\nTwo twos.\n</think>\n\n4"},
    ]
    with pytest.raises(ValueError, match=r"messages\[3\] differently.*replies='last'"):
        sample_of("qwen3", {"messages": messages})
    sample, tokenizer = sample_of("qwen3", {"messages": messages}, replies="last")
    assert trained_texts(sample, tokenizer) == ["<think>\nTwo twos.\n</think>\n\n4<|im_end|>"]
    assert "A greeting" not in tokenizer.decode(sample.token_ids.tolist())


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("gemma", "system", "raised an error for these messages: System role not supported"),
        ("qwen3", "chat", r"before messages\[3\] differently.*<think>"),
        ("gptoss", "chat", r"before messages\[3\] differently.*return\|>.*end\|>"),
        ("llama3", "tools", r"leaves 'add' of messages\[1\] out of the reply"),
        ("lfm2", "tools", r"leaves 'add' of messages\[1\] out of the reply"),
        ("smolvlm", "chat", r"leaves 'Hello.' of messages\[1\] out of the reply"),
    ],
)
def test_templates_that_cannot_be_masked_are_refused(name, kind, reason):
    conversation = {"id": "chats.jsonl:3", **CONVERSATIONS[kind]}
    with pytest.raises(ValueError, match=rf"(?s)^chats.jsonl:3: .*{reason}"):
        sample_of(name, conversation)


def test_content_in_parts_is_joined():
    parts = [{"type": "text", "text": "One "}, {"type": "text", "text": "two."}]
    messages = [CHAT[0], {"role": "assistant", "content": parts}]
    sample, tokenizer = sample_of("gemma3", {"messages": messages})
    assert trained_texts(sample, tokenizer) == ["One two.<end_of_turn>"]
    template = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}{{ m.content }}"
    template += "{% endif %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    with pytest.raises(ValueError, match=r"leaves 'One two.' of messages\[1\] out of the reply"):
        data.training_sample(
            {"messages": messages}, byte_tokenizer(["<end>"], template), max_tokens=100
        )


def test_a_prompt_that_changes_with_the_reply_is_refused():
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    )
    tokenizer = byte_tokenizer(["<end>"], template)
    with pytest.raises(ValueError, match=r"prompt of messages\[1\] differently.*'<think>' became"):
        data.training_sample({"messages": CHAT}, tokenizer, max_tokens=1000)


def test_a_reply_that_nothing_stops_is_refused():
    tokenizer = tokenizer_of("llama3")
    with pytest.raises(ValueError, match=r"ends messages\[1\] with .*eot_id.*pass stop_token_ids"):
        data.training_sample({"messages": CHAT}, tokenizer, max_tokens=1000)


def test_a_stop_token_inside_a_reply_is_refused():
    messages = [CHAT[0], {"role": "assistant", "content": "One.<|im_end|>Two."}]
    with pytest.raises(ValueError, match=r"messages\[1\] contains the stop token '<\|im_end\|>'"):
        sample_of("qwen2_5", {"messages": messages})


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (CHAT[:1], "no message has the role 'assistant'"),
        (CHAT[1:], r"messages\[0\] has the role 'assistant'"),
    ],
)
def test_conversations_without_a_prompt_or_a_reply(messages, reason):
    with pytest.raises(ValueError, match=f"^the conversation: {reason}"):
        sample_of("qwen2_5", {"messages": messages})


def test_a_tokenizer_without_template():
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        data.training_sample({"messages": CHAT}, tokenizer, max_tokens=1000)


def test_a_conversation_longer_than_the_context():
    tokenizer = byte_tokenizer(["<|im_end|>"], SMOLLM2)
    conversation = {"id": "chats.jsonl:7", "messages": CHAT}
    whole = data.training_sample(conversation, tokenizer, max_tokens=1000)
    length = len(whole.token_ids)

    assert len(data.training_sample(conversation, tokenizer, max_tokens=length).token_ids) == length
    with pytest.raises(ValueError, match=rf"^chats.jsonl:7: .* {length} tokens.*{length - 1}"):
        data.training_sample(conversation, tokenizer, max_tokens=length - 1)

    skipped = data.training_sample(conversation, tokenizer, max_tokens=length - 1, too_long="skip")
    assert skipped is None
    cut = data.training_sample(conversation, tokenizer, max_tokens=length - 1, too_long="cut")
    assert cut.token_ids.tolist() == whole.token_ids[:-1].tolist()
    assert cut.loss_mask.tolist() == whole.loss_mask[:-1].tolist()
    first_reply = int(whole.loss_mask.argmax())
    assert (
        data.training_sample(conversation, tokenizer, max_tokens=first_reply, too_long="cut")
        is None
    )


@pytest.mark.parametrize("wrong", [{"replies": "first"}, {"too_long": "drop"}])
def test_choices_that_are_unknown(wrong):
    with pytest.raises(ValueError, match="expected 'all' or 'last', and 'raise', 'skip' or 'cut'"):
        sample_of("qwen2_5", {"messages": CHAT}, **wrong)


def test_a_reply_is_tokenized_by_itself():
    # "ab" is one token, but a policy that is prompted with "a" replies with "b".
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<e>{% endif %}"
        "{% endfor %}"
    )
    tokenizer = byte_tokenizer(["<e>"], template, merges=[("a", "b")])
    assert len(tokenizer.encode("ab", add_special_tokens=False)) == 1
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    sample = data.training_sample({"messages": messages}, tokenizer, max_tokens=10)
    assert sample.loss_mask.tolist() == [False, True, True]
