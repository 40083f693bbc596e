"""An environment of four tasks, two of which raise."""

import verifiers.v1 as vf

__all__ = ["Moody"]


class Mood(vf.Task[vf.TaskData]):
    @vf.reward
    async def pleased(self) -> float:
        """Return 1, or raise for two of the tasks."""
        if self.data.idx == 1:
            raise LookupError("no such mood")
        if self.data.idx == 2:
            raise OSError("no ink")
        return 1.0


class Moody(vf.Taskset[Mood, vf.TasksetConfig]):
    def load(self):
        return [Mood(vf.TaskData(prompt="Well?"), self.config.task) for _ in range(4)]
