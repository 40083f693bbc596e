"""OpenAI's Python client with its tool runner for Responses."""

import openai
import world
from openai.lib.responses_tool_runner import RegisteredFunction, ResponsesToolRunner

functions = [
    RegisteredFunction(
        tool={
            "type": "function",
            "name": name,
            "description": world.DESCRIPTIONS[name],
            "parameters": parameters,
            "strict": False,
        },
        execute=lambda arguments, name=name: world.TOOLS[name](**arguments),
    )
    for name, parameters in world.PARAMETERS.items()
]
said = ResponsesToolRunner(functions=functions).run(
    openai.OpenAI(),
    {"model": world.MODEL, "input": world.TASK},
    stream=world.STREAMED,
)
print(said.output_text)
