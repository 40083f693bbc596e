"""Harness of the swe-folder environment: the agent's tools, and its sandbox or container."""

import shutil
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.runtimes import provision_runtime

from primerl import rollout
from primerl.sandbox import SandboxEnv


class SweFolderHarness(rollout.ToolHarness):
    """Agent loop with bash and edit in the repository; it ends when a reply has no tool call."""

    def tools(self, runtime: Any, data: Any) -> list[rollout.Tool]:
        """Return edit and bash, which act in the rollout's sandbox or container."""
        return [rollout.editor(runtime), rollout.shell(runtime, workdir=data.place)]


class SweFolderEnv(SandboxEnv):
    """Environment with sandboxes for issues of folders, and containers for issues with an image."""

    async def run(self, task: Any, agents: Any) -> None:
        """Run one episode.

        Raises:
            RuntimeError: the task needs a container, but there is neither docker nor podman.
        """
        if task.data.image is None:
            await super().run(task, agents)
            return
        async with provision_runtime(container(task.data)) as runtime:
            await agents.agent.run(task, runtime=runtime)


def container(data: Any) -> Any:
    """Return the configuration of a container for a task.

    Raises:
        RuntimeError: there is neither docker nor podman.
    """
    for engine, config in (("docker", vf.DockerConfig), ("podman", vf.PodmanConfig)):
        if shutil.which(engine):
            return config(image=data.image, workdir=data.workdir)
    raise RuntimeError(
        f"{data.id} needs the image {data.image}, but there is neither docker nor podman; install "
        "one of them, or provide the repository as a folder"
    )
