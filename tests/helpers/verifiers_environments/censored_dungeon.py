"""The dungeon with hooks that change messages: upper-case requests, and one reply to "..."."""

import dungeon
import verifiers.v1 as vf

__all__ = ["CensoredTasks", "DungeonEnv"]
DungeonEnv = dungeon.DungeonEnv


class Censored(dungeon.Explore):
    @vf.intercept
    async def shout(self, request: vf.Request) -> vf.Request:
        for message in request.messages:
            if isinstance(message, vf.UserMessage):
                message.content = message.content.upper()
        return request

    @vf.intercept
    async def censor(self, response: vf.Response, trace: vf.Trace) -> vf.Response | None:
        if trace.num_turns != 1:
            return None
        response.message = vf.AssistantMessage(content="...")
        return response

    @vf.stop
    async def after_four(self, response: vf.Response, trace: vf.Trace) -> bool:
        return trace.num_turns == 3


class CensoredTasks(vf.Taskset[Censored, dungeon.Options]):
    INFINITE = True

    def load(self):
        for task in dungeon.DungeonTasks(self.config).load():
            yield Censored(task.data, task.config)
