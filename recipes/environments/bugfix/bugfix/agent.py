"""The agent's tools, and its sandbox."""

from typing import Any

from primerl import rollout
from primerl.sandbox import SandboxEnv


class BugfixHarness(rollout.ToolHarness):
    """bash and edit, until the agent answers without a call."""

    def tools(self, runtime: Any, data: Any) -> list[rollout.Tool]:  # noqa: ARG002 - as it has to be
        """Both act in the rollout's sandbox."""
        return [rollout.editor(runtime), rollout.shell(runtime)]


class BugfixEnv(SandboxEnv):
    """Each rollout in a sandbox of its own, and each grading in another one."""
