"""OpenAI's Python client with Chat Completions, in the loop of its documentation."""

import json

import openai
import world

client = openai.OpenAI()
functions = [
    {"name": name, "description": world.DESCRIPTIONS[name], "parameters": parameters}
    for name, parameters in world.PARAMETERS.items()
]
tools = [{"type": "function", "function": function} for function in functions]
messages = [{"role": "user", "content": world.TASK}]


def reply():
    if not world.STREAMED:
        made = client.chat.completions.create(model=world.MODEL, messages=messages, tools=tools)
        return made.choices[0].message
    with client.chat.completions.stream(
        model=world.MODEL,
        messages=messages,
        tools=tools,
    ) as stream:
        return stream.get_final_completion().choices[0].message


said = reply()
while said.tool_calls:
    messages.append(said)
    for call in said.tool_calls:
        arguments = json.loads(call.function.arguments)
        result = world.TOOLS[call.function.name](**arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    said = reply()
print(said.content)
