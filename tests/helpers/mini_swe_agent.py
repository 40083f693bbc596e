"""The unmodified mini-swe-agent from PyPI as a command for ``rollout.command_agent``."""

import importlib.util
import sys

import pytest

installed = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("minisweagent", "litellm")),
    reason="mini-swe-agent is not installed: pip install mini-swe-agent",
)
VARIABLES = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "true",
    "PYTHONPATH": ":".join(filter(None, sys.path)),
}


def command_with(*settings):
    """Return the command of a task, with further settings of mini-swe-agent as ``key=value``."""

    def command(task, session):
        every = [
            "agent.cost_limit=0",
            "model.cost_tracking=ignore_errors",
            "model.model_kwargs.custom_llm_provider=openai",
            f"model.model_kwargs.api_base={session.base_url}",
            f"model.model_kwargs.api_key={session.key}",
            *settings,
        ]
        program = "from minisweagent.run.mini import app; app()"
        options = ["--model", "policy", "--model-class", "litellm", "--task", task["prompt"]]
        options += ["--exit-immediately", "--yolo", "-c", "mini"]
        return [
            *(sys.executable, "-c", program),
            *options,
            *(part for setting in every for part in ("-c", setting)),
        ]

    return command
