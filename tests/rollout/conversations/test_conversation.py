"""Conversations, token by token, with scripted replies and a real chat template."""

import asyncio

import attrs
import numpy as np
import pytest
from conftest import CharacterCodes

from primerl import rollout
from primerl.types import NOT_SAMPLED, Completion, SamplingParams

PARAMS = SamplingParams(max_tokens=8)
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Codes(CharacterCodes):
    """Characters, with a chat template that ends each message with ``|``."""

    eos_token_id = ord("|")
    chat_template = TEMPLATE

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, tools=None):
        from jinja2 import Template

        return Template(TEMPLATE).render(
            messages=messages, add_generation_prompt=add_generation_prompt
        )


class Scripted:
    """Gives scripted replies, and records the requests."""

    context_length = 1000
    version = 0

    def __init__(self, *replies):
        self.replies = iter(replies)
        self.prompts = []
        self.params = []

    async def generate(self, prompt_ids, params, *, session=None):
        self.prompts.append("".join(map(chr, prompt_ids)))
        self.params.append(params)
        reply = [ord(c) for c in next(self.replies)]
        self.version += 1
        stopped = reply[-1] in params.stop_token_ids
        return Completion(
            token_ids=reply,
            logprobs=-np.arange(len(reply)) / 10,
            versions=[self.version] * len(reply),
            finish_reason="stop" if stopped else "length",
        )


def play(engine, *turns, tokenizer=None, params=PARAMS):
    chat = rollout.Conversation(engine, tokenizer or Codes(), params)

    async def main():
        return [await chat.turn(turn) for turn in turns]

    return chat, asyncio.run(main())


def user(text):
    return [{"role": "user", "content": text}]


def test_a_second_turn_extends_the_first_token_by_token():
    engine = Scripted("four|", "yes|")

    chat, replies = play(engine, user("2+2?"), user("sure?"))

    assert engine.prompts == [
        "<user>2+2?|<assistant>",
        "<user>2+2?|<assistant>four|<user>sure?|<assistant>",
    ]
    assert replies == ["four|", "yes|"]
    text = "".join(map(chr, chat.token_ids))
    assert text == "<user>2+2?|<assistant>four|<user>sure?|<assistant>yes|"


def test_the_missing_end_of_a_cut_reply_is_added_but_not_trained():
    engine = Scripted("fou", "yes|")

    chat, _ = play(engine, user("2+2?"), user("sure?"))

    assert engine.prompts[1] == "<user>2+2?|<assistant>fou|<user>sure?|<assistant>"
    sample = chat.sample()
    trained = "".join(chr(t) for t in sample.token_ids[sample.loss_mask])
    assert trained == "fouyes|"


def test_sampled_tokens_are_kept_with_their_logprobs_and_versions():
    chat, _ = play(Scripted("ab|", "c|"), user("x"), user("y"))

    sample = chat.sample()
    mask = sample.loss_mask

    assert "".join(chr(t) for t in sample.token_ids[mask]) == "ab|c|"
    np.testing.assert_allclose(sample.behavior_logprobs[mask], [0, -0.1, -0.2, 0, -0.1], rtol=1e-6)
    assert sample.versions[mask].tolist() == [1, 1, 1, 2, 2]
    assert (sample.versions[~mask] == NOT_SAMPLED).all()
    assert sample.temperature == 1.0


class Recording(Scripted):
    """Its completions have routes, but for that of one turn."""

    silent = None

    async def generate(self, prompt_ids, params, *, session=None):
        completion = await super().generate(prompt_ids, params)
        turn = len(self.prompts) - 1
        return completion if turn == self.silent else attrs.evolve(completion, routes=f"r:{turn}")


def test_each_turn_asks_for_the_routes_that_are_not_known():
    engine = Recording("four|", "yes|", "ok|")

    chat, _ = play(engine, user("2+2?"), user("sure?"), user("really?"))

    first, second = "<user>2+2?|<assistant>four", "|<user>sure?|<assistant>yes"
    known = [0, len(first), len(first + second)]  # of the last tokens sampled, none are recorded
    assert [params.routes_start for params in engine.params] == known
    assert chat.sample().routes == ("r:0", "r:1", "r:2")


def test_after_a_turn_without_routes_all_are_asked_for():
    engine = Recording("four|", "yes|", "ok|")
    engine.silent = 1

    params = attrs.evolve(PARAMS, routes_start=3)  # of another conversation
    chat, _ = play(engine, user("2+2?"), user("sure?"), user("really?"), params=params)

    start = len("<user>2+2?|<assistant>four")
    assert [params.routes_start for params in engine.params] == [0, start, 0]
    assert chat.sample().routes == ("r:0", "r:2")


def test_a_single_turn_has_the_routes_of_its_completion():
    environment = rollout.single_turn(Codes(), reward=lambda task, reply: 1.0)
    played = asyncio.run(environment({"prompt": "x"}, Recording("abc"), PARAMS))
    assert played.samples[0].routes == ("r:0",)


def test_several_messages_may_come_between_two_replies():
    engine = Scripted("call|", "done|")
    between = [{"role": "tool", "content": "42"}, {"role": "user", "content": "go on"}]

    play(engine, [{"role": "system", "content": "s"}, *user("q")], between)

    assert engine.prompts[0] == "<system>s|<user>q|<assistant>"
    assert engine.prompts[1] == engine.prompts[0] + "call|<tool>42|<user>go on|<assistant>"


def test_a_string_is_a_users_message_in_each_turn_and_in_a_task():
    as_text, as_messages, as_task = (Scripted("b", "d") for _ in range(3))

    play(as_text, "a", "c")
    play(as_messages, user("a"), user("c"))
    environment = rollout.single_turn(Codes(), reward=lambda task, reply: 1.0)
    asyncio.run(environment({"prompt": "a"}, as_task, PARAMS))

    assert as_text.prompts == as_messages.prompts
    assert as_task.prompts == as_messages.prompts[:1]


def test_without_a_template_turns_are_plain_text():
    engine = Scripted("b", "d")

    chat, _ = play(engine, "a", "c", tokenizer=CharacterCodes())

    assert engine.prompts == ["a", "abc"]
    assert chat.sample().loss_mask.tolist() == [False, True, False, True]
    with pytest.raises(ValueError, match="no chat template"):
        play(Scripted("b"), user("a"), tokenizer=CharacterCodes())


def test_the_end_of_the_context_shortens_the_last_reply():
    engine = Scripted("abc", "d")
    engine.context_length = 7

    chat, _ = play(
        engine, "xx", "y", tokenizer=CharacterCodes(), params=SamplingParams(max_tokens=3)
    )

    assert [params.max_tokens for params in engine.params] == [3, 1]
    assert chat.stop == "context"


def test_a_conversation_that_fills_the_context_is_an_error():
    engine = Scripted("abc")
    engine.context_length = 3

    with pytest.raises(ValueError, match="4 tokens fill the engine's context of 3"):
        play(engine, "wxyz", tokenizer=CharacterCodes())


class RefusesOne(Scripted):
    """Refuses its second request."""

    async def generate(self, prompt_ids, params, *, session=None):
        completion = await super().generate(prompt_ids, params)
        if len(self.prompts) == 2:
            raise ValueError("refused")
        return completion


@pytest.mark.parametrize(
    ("engine", "refused"),
    [(Scripted("a|", "c|"), "y" * 5000), (RefusesOne("a|", "b|", "c|"), "y")],
    ids=["for want of room", "by the engine"],
)
def test_a_turn_that_is_refused_leaves_the_conversation_as_it_was(engine, refused):
    chat = rollout.Conversation(engine, Codes(), PARAMS)

    async def main():
        await chat.turn("x")
        with pytest.raises(ValueError, match="fill the engine's context|refused"):
            await chat.turn(refused)
        assert "".join(map(chr, chat.sample().token_ids)) == "<user>x|<assistant>a|"
        await chat.turn("z")

    asyncio.run(main())
    text = "".join(map(chr, chat.sample().token_ids))
    assert text == "<user>x|<assistant>a|<user>z|<assistant>c|"


def test_a_rollout_has_the_conversation_and_its_reward():
    chat, _ = play(Scripted("a|"), user("x"))

    finished = chat.rollout(reward=0.5, metrics={"length": 2.0})

    assert finished.reward == 0.5
    assert finished.stop == "stop"
    assert finished.metrics == {"length": 2.0}
    assert len(finished.samples) == 1


def test_the_end_of_text_token_stops_in_addition_to_the_given_ones():
    engine = Scripted("a|")

    play(engine, user("x"), params=SamplingParams(max_tokens=3, stop_token_ids=(7,)))

    assert engine.params[0].stop_token_ids == (7, ord("|"))


def test_a_task_without_a_prompt_is_named():
    environment = rollout.single_turn(CharacterCodes(), reward=lambda task, reply: 0.0)

    with pytest.raises(ValueError, match=r"no 'prompt'; its keys are \['question'\]"):
        asyncio.run(environment({"question": "?"}, Scripted("a"), PARAMS))


def test_a_reward_may_be_a_coroutine():
    async def judge(task, reply):
        await asyncio.sleep(0)
        return len(reply)

    environment = rollout.single_turn(CharacterCodes(), reward=judge)

    assert asyncio.run(environment({"prompt": "x"}, Scripted("abc"), PARAMS)).reward == 3.0


@pytest.mark.thorough
def test_turns_of_a_real_chat_template_equal_the_template_of_the_whole(smollm2_folder):
    """SmolLM2: the model's prompt is the template's text of the whole conversation."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    said = ["Four.", "Yes, I am."]

    class Speaks(Scripted):
        async def generate(self, prompt_ids, params, *, session=None):
            self.prompts.append(list(prompt_ids))
            reply = [*tokenizer.encode(next(self.replies)), tokenizer.eos_token_id]
            return Completion(
                token_ids=reply,
                logprobs=[0.0] * len(reply),
                versions=[0] * len(reply),
                finish_reason="stop",
            )

    engine = Speaks(*said)
    _, replies = play(engine, user("What is 2 + 2?"), user("Sure?"), tokenizer=tokenizer)

    assert replies == said
    messages = [*user("What is 2 + 2?"), {"role": "assistant", "content": said[0]}, *user("Sure?")]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(engine.prompts[1]) == whole
    assert engine.prompts[1] == tokenizer.encode(whole)
