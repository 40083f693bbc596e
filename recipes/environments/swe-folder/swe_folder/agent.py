"""The agent's tools, and where it acts: a sandbox, or a container of the issue's image."""

import shutil
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.runtimes import provision_runtime

from primerl import rollout
from primerl.sandbox import SandboxEnv


class SweFolderHarness(rollout.ToolHarness):
    """bash and edit in the repository, until the agent answers without a call."""

    def tools(self, runtime: Any, data: Any) -> list[rollout.Tool]:
        """Both act in the rollout's sandbox or container."""
        return [rollout.editor(runtime), rollout.shell(runtime, workdir=data.place)]


class SweFolderEnv(SandboxEnv):
    """Folders are played in sandboxes, issues with an image in containers."""

    async def run(self, task: Any, agents: Any) -> None:
        """One episode.

        Raises:
            RuntimeError: the task needs a container, and there is no engine.
        """
        if task.data.image is None:
            await super().run(task, agents)
            return
        async with provision_runtime(container(task.data)) as runtime:
            await agents.agent.run(task, runtime=runtime)


def container(data: Any) -> Any:
    """The configuration of a container for a task.

    Raises:
        RuntimeError: there is no container engine.
    """
    for engine, config in (("docker", vf.DockerConfig), ("podman", vf.PodmanConfig)):
        if shutil.which(engine):
            return config(image=data.image, workdir=data.workdir)
    raise RuntimeError(
        f"{data.id} needs the image {data.image}, and there is neither docker nor podman; install "
        "one, or give the repository as a folder"
    )
