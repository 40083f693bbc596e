"""The OpenAI Agents SDK, with the model that is its default."""

import asyncio

import world
from agents import Agent, Runner, function_tool, set_default_openai_api

set_default_openai_api("chat_completions" if world.API == "chat" else "responses")
agent = Agent(
    name="Writer",
    instructions="Use the tools.",
    tools=[function_tool(world.look), function_tool(world.write)],
)


async def streamed():
    result = Runner.run_streamed(agent, world.TASK)
    async for _ in result.stream_events():
        pass
    return result.final_output


if world.STREAMED:
    print(asyncio.run(streamed()))
else:
    print(Runner.run_sync(agent, world.TASK).final_output)
