"""Pydantic AI."""

import asyncio

import world
from pydantic_ai import Agent

PROVIDERS = {"chat": "openai-chat", "responses": "openai-responses", "messages": "anthropic"}

agent = Agent(f"{PROVIDERS[world.API]}:{world.MODEL}", tools=[world.look, world.write])


async def watch(context, events):
    async for _ in events:
        pass


async def run():
    # Without a handler, it does not stream.
    handler = watch if world.STREAMED else None
    return await agent.run(world.TASK, event_stream_handler=handler)


print(asyncio.run(run()).output)
