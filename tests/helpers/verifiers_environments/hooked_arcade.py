"""The arcade with hooks: they censor the first reply, and change what the agent was told."""

import arcade
import verifiers.v1 as vf

__all__ = ["HookedArcade"]


class Hooked(arcade.Play):
    @vf.intercept
    async def shout(self, request: vf.Request) -> vf.Request:
        for message in request.messages:
            if isinstance(message, vf.UserMessage) and isinstance(message.content, str):
                message.content = message.content.upper()
        return request

    @vf.intercept
    async def censor(self, response: vf.Response, trace: vf.Trace) -> vf.Response | None:
        if trace.num_turns:
            return None
        response.message = vf.AssistantMessage(content="...")
        return response


class HookedArcade(vf.Taskset[Hooked, arcade.Options]):
    def load(self):
        for task in arcade.Arcade(self.config).load():
            yield Hooked(task.data, task.config)
