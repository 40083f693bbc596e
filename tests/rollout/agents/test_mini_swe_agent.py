"""mini-swe-agent from PyPI, unchanged, as the agent: it finds the gateway in its configuration.

    pip install mini-swe-agent && pytest tests/rollout/agents/test_mini_swe_agent.py -m slow

On real vLLM: tests/vllm/test_gateway.py.
"""

import asyncio

import mini_swe_agent
import pytest
from chat_tokenizer import RecordingEngine, chat_tokenizer, tool_call, trained

from primerl import rollout
from primerl.rollout import AgentLimits
from primerl.types import SamplingParams

pytestmark = [pytest.mark.slow, mini_swe_agent.installed]
TOKENIZER = chat_tokenizer()


def test_what_it_was_told_and_did_is_trained():
    replies = [
        '<tool_call>{"name": "bash", "arguments": {"command": </tool_call>',  # it is told so
        tool_call("bash", command="echo fixed > result.txt"),
        tool_call("bash", command="cat result.txt"),
        tool_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]

    def fixed(task, run):
        result = run.folder / "result.txt"
        assert result.exists(), run.output
        return float(result.read_text() == "fixed\n")

    engine = RecordingEngine(TOKENIZER, lambda _, number: replies[number])
    environment = rollout.command_agent(
        mini_swe_agent.command_with(),
        TOKENIZER,
        reward=fixed,
        variables=mini_swe_agent.VARIABLES,
        limits=AgentLimits(max_turns=10, timeout_s=300.0),
        keep_conversation=True,
    )

    async def play():
        try:
            task = {"id": "t", "prompt": "Write 'fixed' into result.txt."}
            return await environment(task, engine, SamplingParams(max_tokens=512))
        finally:
            await environment.aclose()

    played = asyncio.run(play())
    assert (played.stop, played.reward) == ("stop", 1.0)
    assert trained(played.samples) == engine.sampled
    assert played.metrics["turns"] == len(engine.requests) == 4
    assert (played.metrics["malformed_calls"], played.metrics["edited"]) == (1, 0)
    # It forgets a reply without a call, and remembers what it said to that: a history of its own.
    malformed, others = played.samples
    assert replies[0] in TOKENIZER.decode(malformed.token_ids)
    text = TOKENIZER.decode(others.token_ids)
    assert replies[0] not in text
    assert "Tool call error" in text.split(replies[1])[0]
    assert '"output": "fixed\\n"' in text.split("cat result.txt")[1]
