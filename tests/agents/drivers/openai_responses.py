"""OpenAI's Python client with Responses, in the loop of its documentation."""

import json

import openai
import world

client = openai.OpenAI()
tools = [
    {
        "type": "function",
        "name": name,
        "description": world.DESCRIPTIONS[name],
        "parameters": parameters,
    }
    for name, parameters in world.PARAMETERS.items()
]
items = [{"role": "user", "content": world.TASK}]


def reply():
    if not world.STREAMED:
        return client.responses.create(model=world.MODEL, input=items, tools=tools)
    with client.responses.stream(model=world.MODEL, input=items, tools=tools) as stream:
        return stream.get_final_response()


while True:
    said = reply()
    items += said.output
    calls = [item for item in said.output if item.type == "function_call"]
    if not calls:
        break
    for call in calls:
        result = world.TOOLS[call.name](**json.loads(call.arguments))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
print(said.output_text)
