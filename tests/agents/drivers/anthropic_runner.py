"""Anthropic's Python client with its tool runner."""

import anthropic
import world
from anthropic import beta_tool

runner = anthropic.Anthropic().beta.messages.tool_runner(
    model=world.MODEL,
    max_tokens=1024,
    tools=[beta_tool(world.look), beta_tool(world.write)],
    messages=[{"role": "user", "content": world.TASK}],
    stream=world.STREAMED,
)
for said in runner:
    last = said.get_final_message() if world.STREAMED else said
print("".join(block.text for block in last.content if block.type == "text"))
