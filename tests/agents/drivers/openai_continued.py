"""OpenAI's Python client with Responses that sends only new items, and the last response's id."""

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
items, last = [{"role": "user", "content": world.TASK}], None


def reply():
    fields = {
        "model": world.MODEL,
        "instructions": "Be brief.",
        "input": items,
        "tools": tools,
        "previous_response_id": last,
    }
    if not world.STREAMED:
        return client.responses.create(**fields)
    done = [
        event.response
        for event in client.responses.create(**fields, stream=True)
        if event.type == "response.completed"
    ]
    return done[0]


while True:
    said = reply()
    last, items = said.id, []
    calls = [item for item in said.output if item.type == "function_call"]
    if not calls:
        break
    for call in calls:
        result = world.TOOLS[call.name](**json.loads(call.arguments))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
print(said.output_text)
