"""Harness of the bugfix environment: the agent's tools and its sandbox."""

from typing import Any

from primerl import rollout
from primerl.sandbox import SandboxEnv


class BugfixHarness(rollout.ToolHarness):
    """Agent loop with the tools bash and edit; it ends when a reply has no tool call."""

    def tools(self, runtime: Any, data: Any) -> list[rollout.Tool]:  # noqa: ARG002 - required by the base class
        """Return edit and bash, which act in the rollout's sandbox."""
        return [rollout.editor(runtime), rollout.shell(runtime)]


class BugfixEnv(SandboxEnv):
    """Environment that runs each rollout in its own sandbox and grades it in another one."""
