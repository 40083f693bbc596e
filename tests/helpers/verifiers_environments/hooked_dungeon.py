"""The dungeon with a hook on every request, which passes through verifiers' message graph."""

import dungeon
import verifiers.v1 as vf

__all__ = ["DungeonEnv", "HookedTasks"]
DungeonEnv = dungeon.DungeonEnv


class Watched(dungeon.Explore):
    @vf.stop
    async def never(self, request: vf.Request) -> bool:
        return False


class HookedTasks(vf.Taskset[Watched, dungeon.Options]):
    INFINITE = True

    def load(self):
        for task in dungeon.DungeonTasks(self.config).load():
            yield Watched(task.data, task.config)
