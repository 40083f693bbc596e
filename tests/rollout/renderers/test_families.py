"""The families of the ``renderers`` package: which add a turn to sampled tokens, and GLM's agents.

Their tokenizers have a token per byte, and the families' special tokens.
"""

import asyncio
from pathlib import Path

import pytest
from api_clients import Chat, connections
from chat_tokenizer import RecordingEngine, trained

pytest.importorskip("renderers", reason="renderers is not installed")
from toy_families import families, toy_renderer

from primerl import rollout
from primerl.rollout import AgentLimits, History, Tool
from primerl.types import SamplingParams

DOCS = Path(__file__).parents[3] / "docs" / "agents.md"
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK = Tool(name="look", description="", parameters=PARAMETERS, call=lambda *_: "It is open.")
OPENING = [{"role": "user", "content": "Is it open?"}]
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"at": "door"}}}
SAID = {"role": "assistant", "content": "Hm.", "reasoning_content": "Let me see."}
TURNS = {
    "tools": ({**SAID, "tool_calls": [CALL]}, {"role": "tool", "content": "yes", "name": "look"}),
    "user": (SAID, {"role": "user", "content": "And now?"}),
}


def bridges(renderer, turn):
    """Whether a turn is added to the prompt and the reply before it."""
    said, new = TURNS[turn]
    tools = [LOOK.wire]
    prompt = list(renderer.render(OPENING, tools=tools, add_generation_prompt=True).token_ids)
    whole = list(renderer.render([*OPENING, said], tools=tools).token_ids)
    pairs = enumerate(zip(prompt, whole, strict=False))
    same = next((i for i, (one, other) in pairs if one != other), len(prompt))
    reply = whole[same:]
    stops = renderer.get_stop_token_ids()
    ends = [i for i, token in enumerate(reply) if token in stops]
    reply = reply[: ends[0] + 1] if ends else [*reply, stops[0]]
    bridged = renderer.bridge_to_next_turn(prompt, reply, [new], tools=tools)
    if bridged is None:
        return False
    assert list(bridged.token_ids[: len(prompt) + len(reply)]) == prompt + reply
    return True


def documented():
    """The table of the documentation: each renderer's name, and what it bridges."""
    table = DOCS.read_text().split("| after tool results |")[1].split("\n\n")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines()[2:]]
    return {
        name.strip(" `"): {"tools": tools.strip() == "yes", "user": user.strip() == "yes"}
        for names, tools, user in rows
        for name in names.split(",")
    }


def test_the_documentation_says_which_families_bridge():
    untested = {"gpt-oss"}  # its tokens are those of the harmony format's own library
    known = documented()
    assert set(known) | untested == set(families())
    for name, expected in known.items():
        renderer, _ = toy_renderer(name)
        found = {turn: bridges(renderer, turn) for turn in TURNS}
        assert (name, found) == (name, expected)


@pytest.mark.parametrize("name", ["glm-4.5", "glm-5", "glm-5.1", "qwen3", "minimax-m2"])
def test_reasoning_that_is_retained_bridges_users_too(name):
    renderer, _ = toy_renderer(name, thinking_retention="all")
    assert bridges(renderer, "user")


GLM = ["glm-4.5", "glm-5", "glm-5.1", "glm-5.3"]
TURNS_OF_AGENT = 20
PARAMS = SamplingParams(max_tokens=256)


def glm_engine(tokenizer):
    """Reasons and calls a tool in each turn, at last answers, and ends replies as GLM does."""
    call = "<tool_call>look<arg_key>at</arg_key><arg_value>door</arg_value></tool_call>"

    def reply(prompt, number):
        thought = "Let me see.</think>"
        if not prompt.endswith("<think>"):
            thought = f"\n<think>{thought}"
        if number == TURNS_OF_AGENT - 1:
            return f"{thought}It is open.<|user|>"
        return f"{thought}{call}<|observation|>"

    return RecordingEngine(tokenizer, reply)


@pytest.mark.parametrize("name", GLM)
def test_twenty_turns_of_glm_with_tools_are_one_sample(name):
    renderer, tokenizer = toy_renderer(name)
    engine = glm_engine(tokenizer)
    history = History(engine, renderer, PARAMS)

    run = asyncio.run(
        rollout.run_agent(history, OPENING, tools=[LOOK], limits=AgentLimits(max_turns=30))
    )

    played = run.rollout(reward=1.0)
    assert (played.metrics["turns"], played.metrics["tool_calls"]) == (20, 19)
    assert run.reply == "It is open."
    assert len(played.samples) == 1
    assert trained(played.samples) == engine.sampled


@pytest.mark.thorough
@pytest.mark.parametrize("sends_reasoning", [True, False])
@pytest.mark.parametrize("keep_reasoning", [True, False])
@pytest.mark.parametrize("name", GLM)
def test_a_client_decides_whether_the_reasoning_of_glm_stays(name, keep_reasoning, sends_reasoning):
    renderer, tokenizer = toy_renderer(name)
    engine = glm_engine(tokenizer)

    async def play():
        async with (
            rollout.gateway(
                engine,
                tokenizer,
                params=PARAMS,
                renderer=renderer,
                keep_reasoning=keep_reasoning,
            ) as gateway,
            connections(),
            gateway.open() as session,
        ):
            chat = Chat(session)
            chat.say("Is it open?")
            _, calls, _ = await chat.reply()
            while calls:
                if not sends_reasoning:
                    for key in ("reasoning_content", "reasoning"):
                        del chat.messages[-1][key]
                for call in calls:
                    chat.result(call, "It is open.")
                text, calls, _ = await chat.reply()
            return session, text

    session, text = asyncio.run(play())

    played = session.rollout(reward=1.0)
    assert text == "It is open."
    assert trained(played.samples) == engine.sampled
    stays = keep_reasoning or sends_reasoning
    assert len(played.samples) == (1 if stays else TURNS_OF_AGENT)
    assert played.metrics["edited"] == (0 if stays else TURNS_OF_AGENT - 1)
