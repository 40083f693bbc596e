"""mini-swe-agent from PyPI, unchanged, as the agent: it finds the gateway in its configuration."""

import asyncio
import importlib.util
import sys

import pytest
from chat_tokenizer import RecordingEngine, chat_tokenizer, tool_call, trained

from primerl import rollout
from primerl.rollout import AgentLimits
from primerl.types import SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("minisweagent", "litellm")),
        reason="mini-swe-agent is not installed: pip install mini-swe-agent",
    ),
]
TOKENIZER = chat_tokenizer()


def command(task, session):
    settings = [
        "agent.cost_limit=0",
        "model.cost_tracking=ignore_errors",
        "model.model_kwargs.custom_llm_provider=openai",
        f"model.model_kwargs.api_base={session.base_url}",
        f"model.model_kwargs.api_key={session.key}",
    ]
    program = "from minisweagent.run.mini import app; app()"
    options = ["--model", "policy", "--model-class", "litellm", "--task", task["prompt"]]
    options += ["--exit-immediately", "--yolo", "-c", "mini"]
    return [
        *(sys.executable, "-c", program),
        *options,
        *(part for setting in settings for part in ("-c", setting)),
    ]


def test_what_it_was_told_and_did_is_one_sample():
    def reply(prompt, number):
        return tool_call(
            "bash",
            command=[
                "echo fixed > result.txt",
                "cat result.txt",
                "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
            ][number % 3],
        )

    def fixed(task, run):
        result = run.folder / "result.txt"
        assert result.exists(), run.output
        return float(result.read_text() == "fixed\n")

    engine = RecordingEngine(TOKENIZER, reply)
    environment = rollout.command_agent(
        command,
        TOKENIZER,
        reward=fixed,
        variables={
            "LITELLM_LOCAL_MODEL_COST_MAP": "true",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "true",
            "PYTHONPATH": ":".join(filter(None, sys.path)),
        },
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
    (sample,) = played.samples
    assert trained([sample]) == engine.sampled
    assert played.metrics["turns"] == len(engine.requests) == 3
    text = TOKENIZER.decode(sample.token_ids)
    assert '"output": "fixed\\n"' in text.split("cat result.txt")[1]
