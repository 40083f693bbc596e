"""The child process of ``isolated``, which plays rollouts."""

from primerl.rollout.collection.rollouts import attempt
from primerl.rollout.engines.remote import EngineAddress, RemoteEngines
from primerl.rollout.environments.environment import Environment, Task
from primerl.rollout.processes.channel import Channel
from primerl.types import PolicyVersion, Rollout, SamplingParams

MAX_REPLY_BYTES = 1 << 31  # a larger rollout is a mistake, and would exhaust the worker's memory


class EnvironmentHost:
    """Plays rollouts in the child process."""

    def __init__(self, channel: Channel, *, environment: Environment) -> None:
        channel.max_message_bytes = MAX_REPLY_BYTES
        self._engines = RemoteEngines(channel)
        self._environment = environment

    async def astart(self) -> None:
        """Do nothing: environments set themselves up."""

    async def aclose(self) -> None:
        """Close the environment."""
        if hasattr(self._environment, "aclose"):
            await self._environment.aclose()

    async def play(self, task: Task, engine: EngineAddress, params: SamplingParams) -> Rollout:
        """Play one rollout; completions come from the parent's engine."""
        try:
            return await attempt(self._environment, task, self._engines.find(engine), params)
        finally:
            self._engines.forget(engine)

    def serves(self, index: int, version: PolicyVersion, newest: PolicyVersion) -> None:
        """The parent reports the versions that an engine serves now."""
        self._engines.serves(index, version, newest)

    def ping(self) -> bool:
        """Answer, which shows that the event loop is not blocked."""
        return True
