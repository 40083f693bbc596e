"""A conversation in which the environment acts as the user, as in a text game."""

import itertools

import verifiers.v1 as vf

__all__ = ["DungeonEnv", "DungeonTasks"]


class Cell(vf.TaskData):
    number: int


class Explore(vf.Task[Cell]):
    @vf.reward(weight=2.0)
    async def length(self, trace):
        return float(sum(len(reply.content or "") for reply in trace.assistant_messages))

    @vf.metric
    async def number(self, trace):
        return float(self.data.number)


class Options(vf.TasksetConfig):
    system: str | None = "You are in a dungeon."


class DungeonTasks(vf.Taskset[Explore, Options]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            data = Cell(prompt=f"Cell {number}.", number=number, system_prompt=self.config.system)
            yield Explore(data, self.config.task)


class DungeonConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    turns: int = 3


class DungeonEnv(vf.Env[DungeonConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for turn in range(1, self.config.turns):
                if segment.terminated:
                    break
                segment = await interaction.turn(f"Room {turn}: a door.")
        interaction.trace.record_reward("played", 1.0)
