"""Agents in this process: tools, limits, context management, and agents that misbehave."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest
from chat_tokenizer import RecordingEngine, chat_tokenizer, tool_call, trained

from primerl import rollout
from primerl.rollout import AgentLimits, Tool
from primerl.types import SamplingParams

TOKENIZER = chat_tokenizer()
PARAMS = SamplingParams(max_tokens=256)
TASK = {"id": "t", "prompt": "Begin."}


def tool(call, name="act", required=()):
    parameters = {"type": "object", "properties": {}, "required": list(required)}
    return Tool(name=name, description="Act.", parameters=parameters, call=call)


def play(reply, *tools, context_length=1 << 20, pause=None, **options):
    """The rollout of an agent whose replies are ``reply(prompt, number)``, and its engine."""
    engine = RecordingEngine(TOKENIZER, reply, pause=pause)
    engine.context_length = context_length
    options = {"reward": lambda task, run: 1.0, "keep_conversation": True, **options}
    environment = rollout.tool_agent(TOKENIZER, tools=tools, **options)
    played = asyncio.run(environment(TASK, engine, PARAMS))
    assert trained(played.samples) == engine.sampled
    return played, engine


def results(played):
    return [one["content"] for one in played.conversation["messages"] if one["role"] == "tool"]


def test_without_tools_it_is_a_chat_of_one_reply():
    played, engine = play(lambda *_: "Hello.", reward=lambda task, run: float(len(run.reply)))

    assert (played.reward, played.stop, played.metrics["turns"]) == (6.0, "stop", 1)
    assert TOKENIZER.decode(engine.requests[0][0]).endswith(
        "Begin.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_turns_of_a_rollout_go_to_one_server():
    sessions = []

    class Recording(RecordingEngine):
        async def generate(self, prompt_ids, params, *, session=None):
            sessions.append(session)
            return await super().generate(prompt_ids, params, session=session)

    environment = rollout.tool_agent(TOKENIZER, tools=[tool(broken)], reward=lambda *_: 0.0)

    async def two():
        for _ in range(2):
            engine = Recording(TOKENIZER, lambda _, number: [tool_call("act", y=1), "Bye."][number])
            await environment(
                {"id": "t", "prompt": "Begin."}, engine, SamplingParams(max_tokens=64)
            )

    asyncio.run(two())
    first, second, third, fourth = sessions
    assert first == second != third == fourth
    assert None not in sessions


def test_tools_share_the_state_of_their_rollout():
    def count(arguments, state):
        state["count"] = state.get("count", 0) + arguments["by"]
        return f"It is {state['count']}, of {state['task']['id']}"

    def reply(prompt, number):
        return tool_call("act", by=number + 1) if number < 3 else "Done."

    shared = tool(count)
    for _ in range(2):
        played, _ = play(reply, shared, reward=lambda task, run: run.state["count"])
        assert results(played) == [f"It is {n}, of t" for n in (1, 3, 6)]
        assert played.reward == 6
        assert len(played.samples) == 1
        assert played.metrics["tool_calls"] == 3


def test_several_calls_of_one_reply_are_answered_in_order():
    def reply(prompt, number):
        return tool_call("act", n=1) + tool_call("act", n=2) if number == 0 else "Done."

    played, engine = play(reply, tool(lambda arguments, state: str(arguments["n"])))

    assert results(played) == ["1", "2"]
    assert len(engine.requests) == 2


async def never(arguments, state):
    await asyncio.sleep(600)


def broken(arguments, state):
    raise OSError("no such room")


MISTAKES = {
    "missing": (tool_call("shout"), "error: there is no tool 'shout', only ['act']"),
    "arguments": (tool_call("act", x=1), "error: act needs the arguments ['y']"),
    "not JSON": ("<tool_call>{]</tool_call>", "error: the call is not JSON"),
    "not closed": ('<tool_call>{"name": "act"', "error: the call is not closed"),
    "raises": (tool_call("act", y=1), "error: OSError: no such room"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_call_is_told_to_the_policy(name):
    said, told = MISTAKES[name]

    played, engine = play(
        lambda _, number: said if number == 0 else "Sorry.", tool(broken, required=["y"])
    )

    assert told in TOKENIZER.decode(engine.requests[1][0])
    assert (played.stop, len(played.samples), played.metrics["turns"]) == ("stop", 1, 2)
    kind = "malformed_calls" if name.startswith("not") else "tool_errors"
    assert played.metrics[kind] == 1


def test_a_tool_that_does_not_answer_is_given_up():
    played, _ = play(
        lambda _, number: tool_call("act") if number == 0 else "Well.",
        tool(never),
        tool_timeout_s=0.01,
    )

    assert results(played) == ["error: act did not answer within 0.01 s"]


def test_an_agent_that_never_stops_is_ended_by_a_limit():
    def act(*_):
        return tool_call("act")

    limits = AgentLimits(max_turns=5)
    played, engine = play(act, tool(lambda *_: "Again."), limits=limits)
    assert (played.stop, len(engine.requests), len(played.samples)) == ("max_turns", 5, 1)

    played, engine = play(act, tool(lambda *_: "Again."), limits=AgentLimits(max_tokens=100))
    assert played.stop == "max_tokens"
    assert played.samples[0].loss_mask.sum() == 100

    played, _ = play(act, tool(lambda *_: "Again."), context_length=1000)
    assert played.stop == "context"

    played, engine = play(act, tool(never), limits=AgentLimits(timeout_s=0.05))
    assert (played.stop, len(engine.requests)) == ("timeout", 1)


def test_a_prompt_that_fills_the_context_is_an_outcome():
    played, engine = play(lambda *_: "Hello.", context_length=20)

    assert (played.stop, len(played.samples), len(engine.requests)) == ("context", 0, 0)


@pytest.mark.parametrize("output", ["x" * 100_000_000, b"\xff\xfe" * 50_000_000, "\ud800" * 1000])
def test_any_output_of_a_tool_is_bounded_text(output):
    played, _ = play(
        lambda _, number: tool_call("act") if number == 0 else "Long.",
        tool(lambda *_: output),
        limits=AgentLimits(max_output=500),
    )

    (result,) = results(played)
    assert len(result) < 600
    assert "characters left out" in result
    assert played.metrics["clipped_results"] == 1
    result.encode()


def refuse(arguments, state):
    raise ValueError(f"there is no {arguments['what']}")


@pytest.mark.parametrize("said", [tool_call("\ud83d"), tool_call("act", what="\ud83d")])
def test_half_of_a_surrogate_pair_in_a_call_makes_no_text_that_cannot_be_stored(said):
    played, _ = play(lambda _, number: said if number == 0 else "Sorry.", tool(refuse))

    msgspec.msgpack.encode(played.conversation)
    (result,) = results(played)
    assert result.startswith("error: ")
    assert "?" in result


def test_a_shell_runs_in_a_borrowed_runtime():
    class Box:
        def __init__(self):
            self.ran = []

        async def run(self, argv, env):
            self.ran.append(argv)
            return SimpleNamespace(exit_code=len(self.ran) - 1, stdout="out\n", stderr="err")

    box = Box()
    played, _ = play(
        lambda _, number: tool_call("bash", command="ls") if number < 2 else "Done.",
        rollout.shell(box, workdir="/repo"),
    )

    assert box.ran == [["bash", "-c", "cd /repo && ls"]] * 2
    assert results(played) == ["out\nerr", "out\nerr\n[exit code 1]"]


def test_dropping_old_results_makes_few_branches_which_are_exact():
    def reply(prompt, number):
        return tool_call("act") if number < 12 else "Done."

    played, engine = play(
        reply,
        tool(lambda *_: "r" * 100),
        manage_context=rollout.drop_tool_results(over=600, to=200),
    )

    assert played.metrics["turns"] == 13
    assert 2 <= played.metrics["branches"] <= 4
    assert played.metrics["edited"] == played.metrics["branches"] - 1
    longest = max(len(prompt) for prompt, _ in engine.requests)
    assert longest < len(TOKENIZER.encode("r" * 700)) + 13 * 150


def test_a_summary_is_sampled_by_a_sub_agent_and_trained():
    def reply(prompt, number):
        if "Summarise the conversation" in prompt:
            return "Much happened."
        return "Done." if "Much happened" in prompt else tool_call("act")

    played, engine = play(
        reply, tool(lambda *_: "r" * 100), manage_context=rollout.summarise(over=350)
    )

    assert "Summary of what came before:\nMuch happened." in TOKENIZER.decode(
        engine.requests[-1][0]
    )
    assert [one["agent"] for one in played.conversation["branches"]] == [
        "policy",
        "summary",
        "policy",
    ]
    assert played.metrics["agents"] == 2
    assert len(played.samples) == 3


def test_context_functions_and_limits_say_what_they_take():
    with pytest.raises(ValueError, match="expected 0 <= to < over"):
        rollout.drop_tool_results(over=100, to=100)
    with pytest.raises(ValueError, match="max_turns is 0"):
        AgentLimits(max_turns=0)
    with pytest.raises(ValueError, match="two tools have the same name"):
        play(lambda *_: "", tool(never), tool(never))


def test_a_failing_engine_and_a_failing_reward_are_raised():
    async def fail(number):
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        play(lambda *_: "", pause=fail)
    with pytest.raises(rollout.RewardError):
        play(lambda *_: "Hello.", reward=lambda task, run: "much")
