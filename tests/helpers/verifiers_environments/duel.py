"""Two agents on one task; the referee is never trained."""

import verifiers.v1 as vf
from dungeon import DungeonTasks

__all__ = ["Duel", "DuelEnv"]


class Duel(DungeonTasks):
    pass


class DuelConfig(vf.EnvConfig):
    left: vf.AgentConfig = vf.AgentConfig()
    right: vf.AgentConfig = vf.AgentConfig()
    referee: vf.AgentConfig = vf.AgentConfig()


class DuelEnv(vf.Env[DuelConfig]):
    async def setup(self, agents):
        agents.referee.trainable = False

    async def run(self, task, agents):
        for name in ("left", "right", "referee"):
            await getattr(agents, name).run(task)

    async def finalize(self, task, episode):
        for trace in episode.traces:
            trace.record_reward("seat", float(len(trace.agent.name)))
