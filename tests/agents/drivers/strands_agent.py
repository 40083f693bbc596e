"""Strands Agents, which always streams."""

import world
from strands import Agent, tool

if world.API == "chat":
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(model_id=world.MODEL)
elif world.API == "responses":
    from strands.models.openai_responses import OpenAIResponsesModel

    model = OpenAIResponsesModel(model_id=world.MODEL)
else:
    from strands.models.anthropic import AnthropicModel

    model = AnthropicModel(model_id=world.MODEL, max_tokens=1024)
agent = Agent(model=model, tools=[tool(world.look), tool(world.write)], callback_handler=None)
print(agent(world.TASK))
