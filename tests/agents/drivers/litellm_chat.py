"""LiteLLM's completions, with the providers of OpenAI and Anthropic."""

import json

import litellm
import world

MODELS = {"chat": "openai/policy", "messages": "anthropic/policy"}
functions = [
    {"name": name, "description": world.DESCRIPTIONS[name], "parameters": parameters}
    for name, parameters in world.PARAMETERS.items()
]
tools = [{"type": "function", "function": function} for function in functions]
messages = [{"role": "user", "content": world.TASK}]


def reply():
    made = litellm.completion(
        model=MODELS[world.API],
        messages=messages,
        tools=tools,
        stream=world.STREAMED,
    )
    if world.STREAMED:
        made = litellm.stream_chunk_builder(list(made), messages=messages)
    return made.choices[0].message


said = reply()
while said.tool_calls:
    messages.append(said)
    for call in said.tool_calls:
        arguments = json.loads(call.function.arguments)
        result = world.TOOLS[call.function.name](**arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    said = reply()
print(said.content)
