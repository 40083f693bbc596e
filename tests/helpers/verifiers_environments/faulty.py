"""An environment that fails at a chosen place."""

import asyncio

import verifiers.v1 as vf

__all__ = ["Faulty"]


class Fault(vf.TaskData):
    where: str = ""


class Fails(vf.Task[Fault]):
    async def setup(self, trace, runtime):
        if self.data.where == "setup":
            raise KeyError("no such room")
        if self.data.where == "folder":
            await runtime.write("notes.txt", b"left behind")
        if self.data.where == "hanging setup":
            await asyncio.sleep(600)

    @vf.stop
    async def enough(self, trace: vf.Trace):
        if self.data.where == "stop":
            raise OSError("stop hook")
        return self.data.where == "stopped"

    @vf.reward
    async def score_it(self, trace, runtime):
        match self.data.where:
            case "reward":
                raise ZeroDivisionError("bad arithmetic")
            case "nan":
                return float("nan")
            case "hanging reward":
                await asyncio.sleep(600)
            case "folder":
                return float(len(await runtime.read("notes.txt")))
        return 1.0


class Options(vf.TasksetConfig):
    where: str = ""
    prompt: str = "Go on."


class Faulty(vf.Taskset[Fails, Options]):
    def load(self):
        data = Fault(prompt=self.config.prompt, where=self.config.where)
        return [Fails(data, self.config.task)]
