"""Conversations of an agent: sampled tokens are fed back, and what was altered is a branch."""

import asyncio

import hypothesis.strategies as st
import pytest
from chat_tokenizer import RecordingEngine, chat_tokenizer, tool_call, trained
from hypothesis import given, settings

from primerl.rollout.conversations.calls import ContextFull
from primerl.rollout.conversations.history import History
from primerl.rollout.renderers.loading import load_renderer
from primerl.types import SamplingParams

TOKENIZER = chat_tokenizer()
RENDERER = load_renderer(TOKENIZER)
PARAMS = SamplingParams(max_tokens=96, temperature=0.7)
TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}]


def user(text="Go on."):
    return {"role": "user", "content": text}


def history_of(engine, **options):
    return History(engine, RENDERER, PARAMS, **options)


def ask(history, *requests, **options):
    async def all_of_them():
        return [await history.reply(list(one), **options) for one in requests]

    return asyncio.run(all_of_them())


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["turn"] * 4 + ["edit", "summarise", "truncate", "fork", "again", "tool"]),
        st.integers(0, 1000),
        st.sampled_from(["policy", "policy", "helper"]),
    ),
    min_size=1,
    max_size=14,
)


async def converse(history, steps):
    """Requests of clients that continue, alter, summarise, cut and fork conversations."""
    known = {"policy": [[user("Hello")]], "helper": [[user("Help")]]}
    for step, number, agent in steps:
        messages = list(known[agent][-1])
        if step == "edit" and len(messages) > 1:
            messages[number % len(messages)] = {**messages[number % len(messages)], "content": "!"}
        elif step == "summarise":
            messages = [user(f"Summary {number}")]
        elif step == "truncate":
            messages = messages[number % len(messages) :]
        elif step == "fork":
            messages = list(known[agent][number % len(known[agent])])
        elif step == "again":
            messages = messages[: -(number % 2) - 1] or messages
        if step == "tool":
            messages.append({"role": "tool", "content": f"result {number}", "tool_call_id": "a"})
        elif step not in ("again", "fork"):
            messages.append(user(f"Turn {number}"))
        reply = await history.reply(messages, agent=agent, tools=TOOLS if step == "tool" else None)
        known[agent].append([*messages, reply.message])


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(0, 3))
def test_of_any_conversations_every_sampled_token_is_trained_once(steps, seed):
    engine = RecordingEngine(TOKENIZER, seed=seed)
    history = history_of(engine)

    asyncio.run(converse(history, steps))

    assert [one.prompt_ids.tolist() for one in history.calls] == [p for p, _ in engine.requests]
    assert trained(history.samples()) == engine.sampled
    assert sum(history.origins.values()) == len(steps)
    by_agent = [history.samples([agent]) for agent in ("policy", "helper")]
    assert trained(by_agent[0]) + trained(by_agent[1]) == engine.sampled
    starts = sum(history.origins[name] for name in ("start", "edited", "unbridged"))
    assert len(history.samples()) <= starts + history.origins["fork"]


def test_twenty_turns_of_bytes_that_are_no_text_are_one_sample():
    engine = RecordingEngine(TOKENIZER)
    history = history_of(engine)
    messages = [user("Hello")]
    for _ in range(20):
        (reply,) = ask(history, messages)
        messages += [reply.message, user()]

    (sample,) = history.samples()
    assert history.origins == {"start": 1, "extends": 19}
    tokens = sum(len(completion.token_ids) for _, completion in engine.requests)
    assert sample.loss_mask.sum() == tokens
    last, completion = engine.requests[-1]
    assert sample.token_ids.tolist() == [*last, *completion.token_ids]
    assert sample.temperature == 0.7


def test_where_each_branch_begins_is_counted_by_why():
    engine = RecordingEngine(TOKENIZER, lambda _, number: f"Reply {number}.")
    history = history_of(engine)
    said = [{"role": "assistant", "content": f"Reply {number}."} for number in range(9)]

    ask(
        history,
        [user("a")],
        [user("a"), said[0], user("b")],
        [user("a"), said[0], user("c")],
        [user("a"), {**said[0], "content": "Reply zero."}, user("b")],
        [user("Summary")],
        [user("a")],
        [user("a"), said[0], user("b"), said[1]],
    )

    assert history.origins == {"start": 2, "extends": 1, "fork": 2, "edited": 2}
    assert history.resent == 1
    assert len(history.samples()) == 6
    branches = history.conversation()["branches"]
    assert [one["origin"] for one in branches] == [
        *("start", "fork", "edited", "start", "fork", "edited")
    ]
    assert [len(one["messages"]) for one in branches] == [4, 4, 4, 2, 2, 5]
    assert [one["turns"] for one in branches] == [
        [None, 1, None, 2],
        [None, 1, None, 3],
        [None, None, None, 4],
        [None, 5],
        [None, 6],
        [None, 1, None, 2, 7],  # the second was sampled in the first branch
    ]
    assert [one["sample"] for one in branches] == list(range(6))


def test_a_call_that_a_client_writes_otherwise_is_the_same():
    engine = RecordingEngine(TOKENIZER, lambda *_: tool_call("look", b=1, a="ö"))
    history = history_of(engine)
    (first,) = ask(history, [user()], tools=TOOLS)
    (call,) = first.message["tool_calls"]
    call["function"]["arguments"] = '{"a":"\\u00f6",   "b": 1}'
    result = {"role": "tool", "content": "A door.", "tool_call_id": call["id"]}

    ask(history, [user(), first.message, result], tools=TOOLS)

    assert history.origins == {"start": 1, "extends": 1}
    assert len(history.samples()) == 1


@pytest.mark.parametrize("kept", [False, True])
def test_reasoning_is_kept_or_left_out_as_the_client_does(kept):
    class Thinking(type(RENDERER)):
        def parse_response(self, *args, **options):
            parsed = super().parse_response(*args, **options)
            thought, _, said = parsed.content.partition("|")
            return type(parsed)(said, [], thought)

    engine = RecordingEngine(TOKENIZER, lambda *_: "Hm.|Yes.")
    history = History(engine, Thinking(TOKENIZER), PARAMS, keep_reasoning=kept)
    (first,) = ask(history, [user()])
    without = {"role": "assistant", "content": "Yes."}

    ask(history, [user(), first.message, user()], [user(), without, user("Sure?")])

    assert first.message["reasoning_content"] == "Hm."
    assert history.origins["edited"] == (not kept)
    seen = TOKENIZER.decode(engine.requests[-1][0])
    assert ("Hm.|" in seen) == kept


def test_a_request_that_is_cancelled_or_fails_leaves_no_trace():
    async def wait(number):
        if number == 1:
            await asyncio.sleep(600)

    engine = RecordingEngine(TOKENIZER, pause=wait)
    history = history_of(engine)

    async def play():
        first = await history.reply([user()])
        messages = [user(), first.message, user("a")]
        waiting = asyncio.create_task(history.reply(messages))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        engine._pause = None
        await history.reply([user(), first.message, user("b")])

    asyncio.run(play())
    assert history.origins == {"start": 1, "extends": 1}
    (sample,) = history.samples()
    assert TOKENIZER.decode(sample.token_ids).count("<|im_start|>user\n") == 2


def test_a_full_context_is_refused_and_one_that_fills_up_is_said():
    engine = RecordingEngine(TOKENIZER, lambda *_: "x" * 100)
    history = history_of(engine)
    prompt = len(RENDERER.render([user()], add_generation_prompt=True).token_ids)
    engine.context_length = prompt + 10

    (cut,) = ask(history, [user()])
    assert cut.finish_reason == "context"
    with pytest.raises(ContextFull, match="fill the engine's context of"):
        ask(history, [user(), cut.message, user()])
    engine.context_length = 10_000
    assert ask(history, [user("a")], max_tokens=3)[0].finish_reason == "length"


def test_routes_are_asked_for_from_where_they_are_unknown():
    starts = []

    class Routed(RecordingEngine):
        async def generate(self, prompt_ids, params, *, session=None):
            starts.append(params.routes_start)
            made = await super().generate(prompt_ids, params)
            return type(made)(
                token_ids=made.token_ids,
                logprobs=made.logprobs,
                versions=made.versions,
                finish_reason=made.finish_reason,
                routes=[f"call {len(starts)}"],
            )

    engine = Routed(TOKENIZER)
    history = history_of(engine)
    (first,) = ask(history, [user()])
    ask(history, [user(), first.message, user()])

    assert starts == [
        0,
        sum(len(one) for one in (engine.requests[0][0], first.call.completion.token_ids)) - 1,
    ]
    assert history.samples()[0].routes == ("call 1", "call 2")


def test_a_message_that_is_changed_in_place_is_another():
    engine = RecordingEngine(TOKENIZER, lambda *_: "Yes.")
    history = history_of(engine)
    messages = [user("a")]
    (first,) = ask(history, messages)
    messages += [first.message, user("b")]
    ask(history, messages)

    messages[0]["content"] = "changed"
    ask(history, messages)

    assert history.origins["edited"] == 1
    assert "changed" in TOKENIZER.decode(engine.requests[-1][0])


class WithoutBridge:
    """Renders whole conversations only, and replies as ``shown`` makes them."""

    get_stop_token_ids = RENDERER.get_stop_token_ids
    parse_response = RENDERER.parse_response

    def __init__(self, shown):
        self._shown = shown

    def render(self, messages, **options):
        replies = [one["role"] == "assistant" for one in messages]
        shown = [
            {**one, "content": self._shown(one["content"])} if reply else one
            for one, reply in zip(messages, replies, strict=True)
        ]
        return RENDERER.render(shown, **options)

    def bridge_to_next_turn(self, *_, **__):
        return None


@pytest.mark.parametrize(("shown", "origin"), [(str, "extends"), (str.upper, "unbridged")])
def test_without_a_bridge_a_turn_goes_on_if_its_rendering_begins_with_the_sampled_tokens(
    shown, origin
):
    engine = RecordingEngine(TOKENIZER, lambda *_: "Yes.")
    history = History(engine, WithoutBridge(shown), PARAMS)
    (first,) = ask(history, [user()])

    ask(history, [user(), first.message, user("b")])

    assert history.origins == {"start": 1, origin: 1}
    assert len(history.samples()) == (1 if origin == "extends" else 2)
    assert trained(history.samples()) == engine.sampled
