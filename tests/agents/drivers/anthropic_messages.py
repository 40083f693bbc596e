"""Anthropic's Python client with Messages, in the loop of its documentation."""

import anthropic
import world

client = anthropic.Anthropic()
tools = [
    {"name": name, "description": world.DESCRIPTIONS[name], "input_schema": parameters}
    for name, parameters in world.PARAMETERS.items()
]
messages = [{"role": "user", "content": world.TASK}]


def reply():
    fields = {"model": world.MODEL, "max_tokens": 1024, "messages": messages, "tools": tools}
    if not world.STREAMED:
        return client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        return stream.get_final_message()


said = reply()
while said.stop_reason == "tool_use":
    results = [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": world.TOOLS[block.name](**block.input),
        }
        for block in said.content
        if block.type == "tool_use"
    ]
    messages.append({"role": "assistant", "content": said.content})
    messages.append({"role": "user", "content": results})
    said = reply()
print("".join(block.text for block in said.content if block.type == "text"))
