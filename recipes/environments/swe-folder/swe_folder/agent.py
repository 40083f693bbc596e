"""Harness and environment of swe-folder: the agent's tools, and its sandbox."""

from typing import Any

from primerl import rollout
from primerl.sandbox import SandboxEnv


class SweFolderHarness(rollout.ToolHarness):
    """Agent loop with bash and edit in the repository; it ends when a reply has no tool call."""

    def tools(self, runtime: Any, data: Any) -> list[rollout.Tool]:
        """Return edit and bash, which act in the rollout's sandbox."""
        return [rollout.editor(runtime), rollout.shell(runtime, workdir=data.place)]


class SweFolderEnv(SandboxEnv):
    """Environment with a sandbox for each issue, which has the files of the issue's image."""
