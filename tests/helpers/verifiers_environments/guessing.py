"""An environment with a number to guess; a tool keeps the score in the task's state."""

import verifiers.v1 as vf
from guessing_tools import Guesses, GuessTools

__all__ = ["Guessing"]


class Secret(vf.TaskData):
    secret: int


class Guess(vf.Task[Secret, Guesses]):
    async def setup(self, trace):
        trace.state.secret = self.data.secret

    @vf.reward
    async def found(self, trace):
        return float(trace.state.found)

    @vf.metric
    async def guesses(self, trace):
        return float(trace.state.count)


class Options(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class Guessing(vf.Taskset[Guess, Options]):
    @classmethod
    def toolsets(cls, config):
        return [GuessTools(config.tools)]

    def load(self):
        return [Guess(Secret(prompt="Find it.", secret=n), self.config.task) for n in (3, 9)]
